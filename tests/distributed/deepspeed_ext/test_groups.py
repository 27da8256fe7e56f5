"""Expert groups: consecutive ranks share the experts, ranks with a stride hold copies; marks of parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed_ext
from deepspeed_ext.groups import build_groups, expert_group_name, mark_experts, ranks_of
from tests.helpers import run_distributed


def _groups(rank: int, world: int) -> dict[str, object]:
    deepspeed_ext.init_distributed()
    groups = build_groups(["ep_size_2", "ep_size_4", "ep_size_1", "ep_size_2"])
    found: dict[str, object] = {name: ranks_of(group) for name, group in groups.expert.items()}
    found["dense"] = ranks_of(groups.dense)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=groups.expert["ep_size_2"])
    found["sum"] = total.item()
    for name in ("ep_size_3", "experts"):
        try:
            build_groups([name])
        except ValueError as error:
            found[name] = str(error)
    deepspeed_ext.shutdown()
    return found


def test_copies_of_experts_have_a_group_each() -> None:
    for rank, found in enumerate(run_distributed(_groups, 4)):
        assert found["dense"] == found["ep_size_1"] == [0, 1, 2, 3]
        assert found["ep_size_2"] == [rank % 2, rank % 2 + 2] and found["sum"] == 2 * (rank % 2) + 2
        assert found["ep_size_4"] == [rank]  # every rank has experts of its own
        assert "3 (group 'ep_size_3') must divide the 4 data-parallel ranks; use one of [1, 2, 4]" in found["ep_size_3"]
        assert "must be named 'ep_size_N', or be passed in groups=ZeroGroups" in found["experts"]


def test_parameters_are_marked_by_name() -> None:
    model = nn.ModuleDict({"dense": nn.Linear(2, 2), "experts": nn.Linear(2, 2)})
    marked = mark_experts(model, lambda name: "ep_size_2" if name.startswith("experts.") else None)
    assert marked == 2
    assert {name: expert_group_name(param) for name, param in model.named_parameters()} == {
        "dense.weight": None,
        "dense.bias": None,
        "experts.weight": "ep_size_2",
        "experts.bias": "ep_size_2",
    }
    del model["experts"].weight.group_name  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="needs group_name='ep_size_N'"):
        expert_group_name(model["experts"].weight)  # type: ignore[arg-type]
    for is_expert, message in (
        (None, "must be a function of a parameter's name"),
        (lambda name: True, "returned True; return a name"),
    ):
        with pytest.raises(ValueError, match=message):
            mark_experts(model, is_expert)  # type: ignore[arg-type]
