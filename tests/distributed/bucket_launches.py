"""When a pipeline's chunks launch the reductions of their gradients, for test_training_layouts.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.optimus.platform.mesh import Mesh
from tests.distributed.training_cases import STEPS


def chunks_of(schedule: Any) -> list[torch.nn.Module]:
    return list(schedule.pipeline._chunks.values())


Event = tuple[str, int]  # ("before" or "after", number of a chunk) of its last backward, ("launch", number of a bucket)


def record_launches(schedule: Any, buckets: list[Any]) -> list[Event]:
    """What happens from now on, in its order."""
    events: list[Event] = []
    chunks, hooks = chunks_of(schedule), schedule.pipeline.backward_hooks
    before, after = hooks.before, hooks.after

    def record_before(micro_batch: int, chunk: torch.nn.Module, *, is_whole: bool) -> None:
        before(micro_batch, chunk, is_whole=is_whole)
        events.append((f"before {micro_batch}" if is_whole else "inputs", chunks.index(chunk)))

    def record_after(micro_batch: int, chunk: torch.nn.Module, *, is_whole: bool) -> None:
        events.append((f"after {micro_batch}" if is_whole else "inputs", chunks.index(chunk)))
        after(micro_batch, chunk, is_whole=is_whole)

    def record_launch(start: Callable[[], None], index: int) -> Callable[[], None]:
        return lambda: (events.append(("launch", index)), start())[1]

    hooks.before, hooks.after = record_before, record_after
    for index, bucket in enumerate(buckets):
        bucket.start_reduce = record_launch(bucket.start_reduce, index)
    return events


def check_launches(events: list[Event], schedule: Any, engine: Any, mesh: Mesh) -> None:
    """Each chunk's buckets leave in its last backward, while it runs and not when the pipeline is empty; ranks that
    reduce together launch in the same order."""
    orders: list[Any] = [None] * mesh.size("dp")
    dist.all_gather_object(orders, events, group=mesh.group("dp"))
    assert all(order == events for order in orders)
    steps = _in_parts(events, STEPS)
    last = schedule.pipeline.num_micro_batches - 1
    alone = [set(engine.optimizer.buckets_of(chunk.parameters())) for chunk in chunks_of(schedule)]
    numbers = {bucket: index for index, bucket in enumerate(engine.optimizer._reducer.buckets)}
    hooked = schedule.pipeline._schedule.__class__.__name__ == "ScheduleInterleaved1F1B"
    for step, part in enumerate(steps):
        for chunk, reached in enumerate(alone):
            others = set().union(*(buckets for other, buckets in enumerate(alone) if other != chunk))
            own = {numbers[bucket] for bucket in reached - others}
            began, ended = part.index((f"before {last}", chunk)), part.index((f"after {last}", chunk))
            following = next((i for i in range(ended, len(part)) if part[i][0].startswith("before")), len(part))
            launched = [number for name, number in part[began:following] if name == "launch"]
            assert len(own) > 3 and own <= set(launched), (step, chunk, own, launched)
            early = [number for name, number in part[began:ended] if name == "launch"]
            if step and hooked:  # the zero-bubble schedules compute weights' gradients without hooks
                assert len(early) > len(own) // 2, (step, chunk, own, early)


def _in_parts(events: list[Event], parts: int) -> list[list[Event]]:
    assert len(events) % parts == 0, "every step is the same"
    length = len(events) // parts
    return [events[start : start + length] for start in range(0, len(events), length)]
