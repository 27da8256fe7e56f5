"""What identifies a flat buffer in files, and which parameters lie in one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_ext.groups import ZeroGroups
from deepspeed_ext.optimizers.elementwise import ShardAdam
from deepspeed_ext.zero.flat_buffer import FlatBufferKey, build_flat_buffers
from deepspeed_ext.zero.options import ZeroOptions
from tests.helpers import run_distributed


def test_the_text_in_checkpoint_files_stays() -> None:
    """DeepSpeed's files of earlier versions hold exactly this, and load only if it is equal."""
    dense = FlatBufferKey(0, None, torch.float32)
    assert str(dense) == (
        "FamilyKey(param_group=0, expert_group=None, dtype=torch.float32, is_tensor_replica=False, "
        "is_pipe_replica=False, is_pipe_tied=False)"
    )
    expert = FlatBufferKey(1, "ep_size_2", torch.bfloat16, is_tensor_replica=True, is_pipe_tied=True)
    assert str(expert) == (
        "FamilyKey(param_group=1, expert_group='ep_size_2', dtype=torch.bfloat16, is_tensor_replica=True, "
        "is_pipe_replica=False, is_pipe_tied=True)"
    )


def _built(rank: int, world: int) -> None:
    assert dist.group.WORLD is not None
    groups, rules = ZeroGroups(dist.group.WORLD, {"ep_size_1": None}), [ShardAdam(), ShardAdam()]
    a, b, expert, other = (nn.Parameter(torch.zeros(size)) for size in (5, 3, 70, 4))
    expert.allreduce, expert.group_name = False, "ep_size_1"  # type: ignore[attr-defined]
    names = {a: "a", expert: "expert", b: "b", other: "other"}
    built = build_flat_buffers([[a, expert, b], [other]], rules, names, groups, ZeroOptions())
    assert [list(one.params) for one in built] == [["b", "a"], ["expert"], ["other"]]
    with pytest.raises(ValueError, match="'a' occurs twice; each element needs exactly one owner"):
        build_flat_buffers([[a, b], [other]], rules, {**names, other: "a"}, groups, ZeroOptions())
    expert.group_name = "ep_size_4"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"'ep_size_4', which has no process group; known groups: \['ep_size_1'\]"):
        build_flat_buffers([[a, expert, b], [other]], rules, names, groups, ZeroOptions())


def test_parameters_that_are_updated_alike_lie_together_in_the_order_of_backward() -> None:
    run_distributed(_built, 1)
