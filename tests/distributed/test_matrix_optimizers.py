"""Optimizers of whole matrices at layouts of ranks against one process: three steps of the training program, fp32.

Tensor and expert tensor parallelism cut matrices, expert parallelism spreads them, pipeline stages hold some of them.
Checkpoints go from any of these layouts to another, and a resumed run goes on bit for bit.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.optimus.checkpoint import load, save, training_slices
from megatron.optimus.checkpoint.slices import TensorSlice
from megatron.optimus.config.schema import OptimizerName, TokenDispatcherType
from megatron.optimus.context import RunContext
from megatron.optimus.platform.mesh import Mesh
from tests.distributed.layouts import Case as LayoutCase
from tests.distributed.layouts import deviation, inputs_of, part_of
from tests.distributed.test_training_layouts import Trained, _init, train
from tests.distributed.training_cases import Case, run_config
from tests.helpers import run_distributed
from tests.unit.checkpoint.helpers import CONFIG

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {},
    "normuon": {},
    "soap": {},
    # eps: in directions that no gradient has had yet, roots must not hang on the rounding of fp32 factors
    "shampoo": dict(shampoo_precondition_frequency=2, shampoo_block_size=20, shampoo_eps=1e-3),
    "galore": dict(galore_rank=6, galore_update_proj_gap=2),
    "dion": {},
}
STATEFUL = [name for name in OPTIMIZERS if name != "muon"]
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


# ---- checkpoints


class Run:
    """An engine at a layout, which takes steps on batches that are the same for every data-parallel rank."""

    def __init__(self, rank: int, world: int, name: str, layout: str | None) -> None:
        from megatron.optimus.training.engine import build_engine, build_model

        parallel, options = LAYOUTS[layout][1:] if layout else ({}, {})
        config = run_config(case_of(name, parallel, options))
        self.mesh = Mesh(config.parallel, rank=rank, world_size=world)
        run = RunContext.of(config, self.mesh, torch.device("cpu"))
        self.model = build_model(run)
        self.engine = build_engine(run, self.model)

    def step(self, number: int) -> None:
        """One step; number 2 has a gradient that is not finite and is skipped."""
        tokens, labels, *_ = inputs_of(number, LayoutCase({}, {}))
        output = self.model(tokens, labels)
        loss = output.loss_sum / tokens.numel() + 0.3 * output.aux_loss
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.backward(loss * (torch.inf if number == 2 else 1.0))
        self.engine.step()

    def state(self) -> list[tuple[str, str, Tensor]]:
        slices = training_slices(self.model, self.engine.optimizer, buffers=True)
        return [(one.name, one.kind, one.tensor.clone()) for one in slices]

    def save(self, root: Path) -> Path:
        is_first = self.mesh.index("dense") == 0 and self.mesh.index("tp") == 0
        slices = training_slices(self.model, self.engine.optimizer, buffers=is_first)
        if self.mesh.index("tp") > 0:  # as the program does
            cut = {name for name, p in self.model.named_parameters() if hasattr(p, "tensor_model_parallel")}
            slices = [one for one in slices if one.name in cut]
        return save(root, 1, slices, kind="full", consumed_samples=1, config=CONFIG, metadata={})

    def load(self, path: Path) -> None:
        load(path, training_slices(self.model, self.engine.optimizer, buffers=True, to_load=True))
        self.engine.optimizer.step_count = 2
        self.engine.optimizer.sync_params_from_master()


def assert_same(found: list[tuple[str, str, Tensor]], expected: list[tuple[str, str, Tensor]]) -> None:
    for (*one, value), (*other, wanted) in zip(found, expected, strict=True):
        assert one == other and torch.equal(value, wanted), one


def train_and_save(rank: int, world: int, folder: Path, layout: str) -> None:
    """Two steps and a skipped one, a checkpoint, and one more: of the run itself, and of one that resumes."""
    _init()
    for name in STATEFUL:
        unbroken, resumed = (Run(rank, world, name, layout) for _ in range(2))
        for number in (0, 1, 2):
            before = unbroken.state()
            unbroken.step(number)
            if number == 2:
                assert_same(unbroken.state(), before)
        path = unbroken.save(folder / name / "first")
        resumed.load(path)
        assert_same(resumed.state(), unbroken.state())
        for run in (unbroken, resumed):
            run.step(3)
        assert_same(resumed.state(), unbroken.state())
        optimizer, after = unbroken.engine.optimizer, unbroken.state()
        files = copy.deepcopy(optimizer.state_dict())  # DeepSpeed's
        resumed.step(4)
        dense = [files] * dist.get_world_size(optimizer.groups.dense)
        resumed.engine.optimizer.load_state_dict(dense)
        assert_same(resumed.state(), after)
        from deepspeed_ext.zero.stock_files import ours_in

        ours_in(files)["matrix_states"] = []
        with pytest.raises(ValueError, match="holds other optimizer states"):
            resumed.engine.optimizer.load_state_dict(dense)


def load_and_save(rank: int, world: int, folder: Path, source: str, target: str, layout: str | None) -> None:
    _init()
    for name in STATEFUL:
        run = Run(rank, world, name, layout)
        run.load(next((folder / name / source).iterdir()))
        run.save(folder / name / target)


def whole_tensors(folder: Path) -> dict[tuple[str, str], Tensor]:
    from megatron.optimus.checkpoint.manifest import read_manifest

    [path] = folder.iterdir()
    entries = read_manifest(path).tensors
    slices = []
    for (name, kind), entry in entries.items():
        flat = torch.full((max(1, torch.Size(entry.shape).numel()),), torch.nan)
        slices.append(TensorSlice(name, kind, entry.shape, 0, len(flat), flat))
    load(path, slices)
    return {(one.name, one.kind): one.tensor for one in slices}


def test_checkpoints_go_from_any_layout_to_any_other_and_resume_bit_for_bit(tmp_path: Path) -> None:
    run_distributed(train_and_save, 4, tmp_path, "tp 2 x dp 2, ep 2 x etp 2", timeout=300)
    run_distributed(load_and_save, 1, tmp_path, "first", "second", None, timeout=300)
    run_distributed(load_and_save, 4, tmp_path, "second", "third", "tp 2 x ep 2, small buckets", timeout=300)
    kinds = {
        "normuon": {"momentum_buffer", "row_moment"},
        "soap": {"exp_avg", "exp_avg_sq", "left_factor", "right_factor", "left_basis", "right_basis"},
        "shampoo": {"exp_avg", "exp_avg_sq", "left_factor", "right_factor", "left_root", "right_root"},
        "galore": {"projector", "exp_avg", "exp_avg_sq"},
        "dion": {"momentum", "basis"},
    }
    for name, own_kinds in kinds.items():
        expected = whole_tensors(tmp_path / name / "first")
        of_experts = {kind for key, kind in expected if key == "layers.1.moe.experts.gate_up_weight"}
        assert of_experts == own_kinds | {"master"}
        for folder in ("second", "third"):
            found = whole_tensors(tmp_path / name / folder)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], value) and value.isfinite().all() for key, value in expected.items())
