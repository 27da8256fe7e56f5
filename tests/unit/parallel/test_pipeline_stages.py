"""Point-to-point groups of a pipeline: who shares one, and what it costs torch's interleaved order, by simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from megatron.optimus.config.stages import num_p2p_groups, stages_of_rank
from megatron.optimus.parallel.pipeline_stages import p2p_group_index

TRAVEL = 0.01  # in forward times of a chunk; a backward takes two
KIND = schedules._ComputationType


def ranks_of(pp: int, chunks: int, *, v_shape: bool) -> dict[int, int]:
    return {stage: rank for rank in range(pp) for stage in stages_of_rank(rank, pp, chunks, v_shape=v_shape)}


@given(st.integers(2, 13), st.integers(2, 4), st.booleans())
def test_no_rank_sends_and_receives_over_one_group(pp: int, chunks: int, v_shape: bool) -> None:
    rank_of = ranks_of(pp, 2 if v_shape else chunks, v_shape=v_shape)
    senders: dict[int, set[int]] = {}
    receivers: dict[int, set[int]] = {}
    for boundary in range(len(rank_of) - 1):
        if rank_of[boundary] != rank_of[boundary + 1]:
            index = p2p_group_index(boundary, pp, v_shape=v_shape)
            assert 0 <= index < num_p2p_groups(pp, v_shape=v_shape)
            senders.setdefault(index, set()).add(rank_of[boundary])
            receivers.setdefault(index, set()).add(rank_of[boundary + 1])
    assert not any(senders[index] & receivers[index] for index in senders)


class Message:
    """What a communication action of torch's schedule is about."""

    def __init__(self, action: Any) -> None:
        kind = action.computation_type
        self.is_gradient = kind in (KIND.SEND_B, KIND.RECV_B)
        self.is_send = kind in (KIND.SEND_F, KIND.SEND_B)
        sender = action.stage_index + (0 if self.is_send else 1 if self.is_gradient else -1)
        self.boundary = sender - self.is_gradient
        self.name = (self.is_gradient, sender, action.microbatch_index)


def actions_of(pp: int, chunks: int, micro_batches: int) -> dict[int, list[Any]]:
    """What every rank queues, from torch's own planning."""
    plan: Any = object.__new__(schedules.ScheduleInterleaved1F1B)
    plan.n_local_stages, plan.pp_group_size, plan._n_microbatches = chunks, pp, micro_batches
    plan.number_of_rounds = max(1, micro_batches // pp)
    plan.microbatches_per_round = micro_batches // plan.number_of_rounds
    compute = {rank: plan._calculate_single_rank_operations(rank) for rank in range(pp)}
    compute = {rank: [action for action in actions if action is not None] for rank, actions in compute.items()}
    return schedules._add_send_recv(compute, lambda stage: stage % pp, pp * chunks)


class Simulation:
    """Ranks that compute in order, and queues of messages that work in order: a message takes both its ends, once both
    are at its turn, and starts after what was queued before it on its rank."""

    def __init__(self, actions: dict[int, list[Any]], num_stages: int, queue_of: Callable[[Message], Any]) -> None:
        self.num_stages = num_stages
        self.ends: dict[int, list[float]] = {rank: [0.0] for rank in actions}  # of the computations done so far
        self.arrived: dict[Any, float] = {}
        self.todo: dict[int, list[Any]] = {rank: [] for rank in actions}
        self.queues: dict[Any, list[tuple[Message, int]]] = {}
        for rank, queued in actions.items():
            for action in queued:
                if action.computation_type in (KIND.FORWARD, KIND.FULL_BACKWARD):
                    self.todo[rank].append(action)
                else:
                    message = Message(action)
                    self.queues.setdefault((rank, queue_of(message)), []).append((message, len(self.todo[rank])))
        self.free = dict.fromkeys(self.queues, 0.0)

    def compute(self) -> bool:
        """What can be computed; whether anything was."""
        moved = False
        for rank, todo in self.todo.items():
            for action in todo[len(self.ends[rank]) - 1 :]:
                is_backward = action.computation_type == KIND.FULL_BACKWARD
                source = action.stage_index + (1 if is_backward else -1)
                needs = (is_backward, source, action.microbatch_index)
                if 0 <= source < self.num_stages and needs not in self.arrived:
                    break
                begins = max(self.ends[rank][-1], self.arrived.get(needs, 0.0))
                self.ends[rank].append(begins + (2.0 if is_backward else 1.0))
                moved = True
        return moved

    def travel(self) -> bool:
        """The messages whose both ends are at their turn; whether there were any."""
        at_hand: dict[Any, list[tuple[Any, float]]] = {}
        for key, queue in self.queues.items():
            if queue and len(self.ends[key[0]]) > queue[0][1]:
                start = max(self.free[key], self.ends[key[0]][queue[0][1]])
                at_hand.setdefault(queue[0][0].name, []).append((key, start))
        ready = {name: both for name, both in at_hand.items() if len(both) == 2}
        for name, both in ready.items():
            self.arrived[name] = max(start for _, start in both) + TRAVEL
            for key, _ in both:
                self.queues[key].pop(0)
                self.free[key] = self.arrived[name]
        return bool(ready)


def time_of(actions: dict[int, list[Any]], num_stages: int, queue_of: Callable[[Message], Any]) -> float:
    """When the last rank is done."""
    simulation = Simulation(actions, num_stages, queue_of)
    while simulation.compute() | simulation.travel():
        pass
    assert not any(simulation.queues.values()), "the ranks wait for each other"
    return max(done[-1] for done in simulation.ends.values())


@pytest.mark.parametrize("pp, chunks, micro_batches", [(2, 2, 8), (3, 2, 12), (4, 2, 16), (4, 4, 16), (8, 2, 32)])
def test_interleaved_schedule_reaches_its_ideal_over_its_groups(pp: int, chunks: int, micro_batches: int) -> None:
    actions = actions_of(pp, chunks, micro_batches)
    ideal = 3.0 * (chunks * micro_batches + pp - 1)

    def group_of(message: Message) -> Any:
        return message.is_gradient, p2p_group_index(message.boundary, pp, v_shape=False)

    assert ideal / time_of(actions, pp * chunks, group_of) > 0.99
    if pp >= 4:  # why there are several; if torch's order no longer needs them, one will do
        assert ideal / time_of(actions, pp * chunks, lambda _: None) < 0.92
