"""Who waits for the gathered parameters: every module that uses them, in any order, and nobody else."""

from __future__ import annotations

from typing import Any

import torch

import deepspeed_ext
from tests.distributed.lazy_updates import READERS, lazy_updates
from tests.distributed.param_waits import compiled, waits
from tests.distributed.zero_stack import Stack, input_of, sharded, take_step
from tests.helpers import run_distributed


def _awaited(rank: int) -> tuple[int, list[int], bool]:
    """Buckets being gathered after step(), then as each layer is reached; whether a state dict waits for all."""
    model = Stack()
    optimizer = sharded(model, overlap_param_gather=True)
    buckets = optimizer._reducer.buckets

    def pending() -> int:
        return sum(bucket._gathering is not None for bucket in buckets)

    for step in range(2):
        take_step(model, optimizer, step, rank, use_side=True)
    after_step = pending()
    seen: list[int] = []
    hooks = [layer.register_forward_hook(lambda *_: seen.append(pending())) for layer in model.layers]
    model(input_of(2, rank))
    for hook in hooks:
        hook.remove()
    take_step(model, optimizer, 2, rank, use_side=True)
    model.state_dict()
    return after_step, seen, pending() == 0


def _check_compiled(found: dict[str, Any]) -> None:
    assert "deepspeed_ext" not in (cut_by := found.pop("cut by")) and "Work" not in cut_by, cut_by
    serial = found["not"][2]
    for style, (after_steps, after_forwards, output) in found.items():
        assert after_steps[0] == 0 < min(after_steps[1:]), f"{style}: the first step waits, later ones do not"
        assert after_forwards == [0, 0, 0, 0] and torch.equal(output, serial), style


def _scenarios(rank: int, world: int) -> dict[str, Any]:
    deepspeed_ext.init_distributed()
    results = {
        "awaited": _awaited(rank),
        "waits": waits(rank, sharded),
        "lazy": lazy_updates(rank),
        "compiled": compiled(rank),
    }
    deepspeed_ext.shutdown()
    return results


def test_who_waits_for_parameters() -> None:
    for result in run_distributed(_scenarios, 2):
        after_step, seen, state_dict_waits = result["awaited"]
        assert after_step > 10 and seen == sorted(seen, reverse=True) and seen[0] > seen[-1] > 0
        assert state_dict_waits
        found = result["waits"]
        assert found.pop("in order") == (6, []), "step() gives every layer its hook"
        between, hooked, late = found.pop("after forward")
        assert 0 < between[0] < 6 and between[1] > 0, "only what lies in the buckets at hand has lost it"
        assert hooked == 0 and not late
        ends = {"copied": True, "state dict of a part": 0, "loaded": (0.5, 0.5), "destroyed": 0}
        assert {name: found.pop(name) for name in ends} == ends
        assert len(found) == 6 and all(seen == (True, []) for seen in found.values()), found
        assert result["lazy"] == dict.fromkeys(READERS, (True, True))
        _check_compiled(result["compiled"])
