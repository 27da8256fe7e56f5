"""Optimizers of whole matrices at layouts of ranks against one process: three steps of the training program, fp32.

Tensor and expert tensor parallelism cut matrices, expert parallelism spreads them, pipeline stages hold some of them.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from megatron.optimus.config.schema import OptimizerName, TokenDispatcherType
from tests.distributed.layouts import deviation, part_of
from tests.distributed.test_training_layouts import Trained, _init, train
from tests.distributed.training_cases import Case
from tests.helpers import run_distributed

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {},
    "normuon": {},
    "soap": {},
    # eps: in directions that no gradient has had yet, roots must not hang on the rounding of fp32 factors
    "shampoo": dict(shampoo_precondition_frequency=2, shampoo_block_size=20, shampoo_eps=1e-3),
    "galore": dict(galore_rank=6, galore_update_proj_gap=2),
    "dion": {},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # ranks, parallel options, optimizer's options
    "tp 2": (2, dict(tensor_model_parallel_size=2), {}),
    "tp 2 x ep 2, small buckets": (
        4,
        dict(tensor_model_parallel_size=2, expert_model_parallel_size=2),
        dict(ddp_bucket_size=3000),
    ),
    "tp 2 x dp 2, ep 2 x etp 2": (
        4,
        dict(
            tensor_model_parallel_size=2,
            expert_model_parallel_size=2,
            expert_tensor_parallel_size=2,
            moe_token_dispatcher_type=TokenDispatcherType.ALLTOALL,
        ),
        {},
    ),
    "pp 2 x dp 2, ep 2, zero 2": (
        4,
        dict(pipeline_model_parallel_size=2, expert_model_parallel_size=2),
        dict(zero_stage=2, ddp_bucket_size=3000),
    ),
}


def case_of(name: str, parallel: dict[str, Any], options: dict[str, Any]) -> Case:
    return Case(parallel, "moe", dict(optimizer=OptimizerName(name)) | OPTIMIZERS[name] | options)


def serial(rank: int, world: int) -> dict[str, Trained]:
    _init()
    found = {}
    for name in OPTIMIZERS:
        lines, weights = train(rank, world, case_of(name, {}, {}), fuses=False)
        found[name] = lines, {key: weight.detach().clone() for key, weight in weights.items()}
    return found


def compared(rank: int, world: int, pickled: bytes) -> dict[tuple[str, str], dict[str, float]]:
    """``pickled``: what ``serial`` gave."""
    _init()
    expected: dict[str, Trained] = pickle.loads(pickled)
    found = {}
    for layout, (ranks, parallel, options) in LAYOUTS.items():
        for name in OPTIMIZERS if ranks == world else ():
            own_lines, own = train(rank, world, case_of(name, parallel, options))
            lines, weights = expected[name]
            one = {key: deviation(weight.detach(), part_of(weights[key], weight)) for key, weight in own.items()}
            found[layout, name] = one | {"lines": deviation(own_lines, lines, each=True)}
    return found


@pytest.fixture(scope="module")
def measured() -> dict[int, list[dict[tuple[str, str], dict[str, float]]]]:
    pickled = pickle.dumps(run_distributed(serial, 1)[0])
    return {ranks: run_distributed(compared, ranks, pickled, timeout=300) for ranks in (2, 4)}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_equal_one_process(measured: Any, layout: str, name: str) -> None:
    for rank, result in enumerate(measured[LAYOUTS[layout][0]]):
        found = dict(result[layout, name])
        lines = found.pop("lines")
        assert {key: value for key, value in found.items() if not value <= 1e-5} == {}, rank
        assert lines <= 1e-5, rank
