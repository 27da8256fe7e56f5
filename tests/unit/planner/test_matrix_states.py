"""States and work of whole matrices: what the optimizers themselves declare, and shares of the ranks that own them."""

from __future__ import annotations

import math

import pytest
import torch

from deepspeed_ext.optimizers import OWN_OPTIMIZERS
from megatron.optimus.config.load import load
from megatron.optimus.config.rank_plan import rank_plans
from megatron.optimus.config.schema import OptimizerConfig, OptimizerName, ShampooGraft
from megatron.optimus.planner.matrix_states import matrix_flops, matrix_state_bytes, matrix_state_numel, matrix_work

SHAPES = [(12, 12), (12, 40), (40, 12), (7, 33)]
CASES = {
    "NorMuon": ({}, {}),
    "SOAP": (dict(soap_max_dim=20), dict(max_dim=20)),
    "Shampoo": (dict(shampoo_block_size=10), dict(block_size=10)),
    "Shampoo, SGD's": (
        dict(shampoo_block_size=10, shampoo_graft=ShampooGraft.SGD),
        dict(block_size=10, graft="sgd"),
    ),
    "GaLore": (dict(galore_rank=5), dict(rank=5)),
    "Dion": (dict(dion_rank_fraction=0.4), dict(rank_fraction=0.4)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_states_are_those_that_the_optimizer_declares(case: str, shape: tuple[int, int]) -> None:
    options, theirs = CASES[case]
    name = case.partition(",")[0]
    config = OptimizerConfig(optimizer=OptimizerName(name.lower()), **options)  # type: ignore[arg-type]
    optimizer = OWN_OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(shape))], **theirs)
    group = optimizer.param_groups[0]
    declared = optimizer.shard_optimizer(group).matrix_states(shape, group)
    assert matrix_state_numel(config, *shape) == sum(math.prod(sizes) for sizes in declared.values())


def test_owners_share_the_states() -> None:
    """Of attention's matrices all ranks are owners, of experts those of a data-parallel group of experts."""
    words = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 --num-experts 8 --moe-router-topk 2 "
        "--moe-ffn-hidden-size 48 --seq-length 32 --global-batch-size 16 --optimizer soap "
    )
    [alone] = rank_plans(load(words.split()).config, 1)
    [shared] = rank_plans(load(f"{words} --expert-model-parallel-size 2".split()).config, 4)
    options = alone.config.optimizer
    attention, up, down, router = (
        matrix_state_numel(options, *shape) for shape in ((64, 64), (48, 64), (64, 48), (8, 64))
    )
    whole = 2 * (4 * attention + 8 * (2 * up + down) + router)
    assert matrix_state_bytes(alone) == 4 * whole
    assert matrix_state_bytes(shared) == whole  # a quarter of them
    assert matrix_work(alone).memory_bytes == 2 * matrix_state_bytes(alone)
    assert matrix_work(shared).wide == pytest.approx(matrix_work(alone).wide / 4)
    [elementwise] = rank_plans(load(words.replace("soap", "adam").split()).config, 1)
    assert matrix_state_bytes(elementwise) == 0


def test_work_falls_with_the_interval() -> None:
    for name, option in (("soap", "soap_precondition_frequency"), ("shampoo", "shampoo_precondition_frequency")):
        often, seldom = (
            matrix_flops(OptimizerConfig(optimizer=OptimizerName(name), **{option: every}), 64, 64)  # type: ignore[arg-type]
            for every in (1, 10)
        )
        base = (10 * seldom - often) / 9
        assert 0 < base < seldom < often and often - base == pytest.approx(10 * (seldom - base))
    assert matrix_flops(OptimizerConfig(), 64, 64) == 0
