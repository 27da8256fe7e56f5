"""Adds up the peak memory of a rank: what always stays, and what each moment of a step adds to it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.optimus.config.costs import INT64, PartMemory
from megatron.optimus.config.rank_plan import RankPlan
from megatron.optimus.config.schema import Recompute
from megatron.optimus.models.activations import CUDA, Kernels, embedding_part, head_parts, layer_parts, rope_table_bytes
from megatron.optimus.models.parameters import EMBEDDING, HEAD, embedding_and_head_parameters, parameters_of_layer
from megatron.optimus.moe.traffic import dispatcher_traffic
from megatron.optimus.planner.buffer_pool import PoolBytes, buffer_pool, waiting_bytes
from megatron.optimus.planner.optimizer_state import (
    PlannedFlatBuffer,
    StateBytes,
    flat_buffers,
    sent_copies,
    total_state_bytes,
)

# Not counted by hand: cuBLAS takes 32 MiB for each stream it works on, two here (an H200's default).
LIBRARIES = 64 * 2**20
MUON_BATCH = 2**26  # elements that an optimizer of matrices works on at once
OWNER_TEMPORARIES = 8  # of the size of a batch, where states are whole matrices: moments, products, new states


@dataclass(frozen=True)
class Moment:
    """A moment of a step at which much is alive: bytes besides what always stays."""

    name: str
    activations: int  # saved for a backward
    temporaries: int  # temporaries and gradients on their way

    @property
    def total(self) -> int:
        """Bytes besides what always stays."""
        return self.activations + self.temporaries


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    pipeline_rank: int
    states: StateBytes
    pool: int  # stage 2: buffers for gradients that are being reduced
    buffers: int  # batch, tables, stages' inputs and outputs, memory shared with other ranks, libraries
    saved_per_layer: tuple[int, ...]  # activations of one micro-batch in each layer
    parts: tuple[PartMemory, ...]  # of the last layer, then of the ends of the model that are here
    in_flight: int  # micro-batches x chunks
    moments: tuple[Moment, ...]

    @property
    def persistent(self) -> int:
        """Bytes that stay for the whole run."""
        return self.states.total + self.pool + self.buffers

    @property
    def worst(self) -> Moment:
        """The moment of most bytes."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def peak(self) -> int:
        """Most bytes of live tensors at any time, in the device's allocator."""
        return self.persistent + self.worst.total


def memory_of(rank: RankPlan, kernels: Kernels = CUDA) -> Memory:
    """Adds up the memory of one rank in training, the optimizer included.

    Args:
        rank: one pipeline rank of the run.
        kernels: what the device's kernels keep and allocate.

    Returns:
        Bytes: what stays for the whole run, and each moment of a step. The highest sum of both is ``peak``.
    """
    flat, states = flat_buffers(rank), total_state_bytes(rank)
    pool, buffers = buffer_pool(rank), _buffers(rank)
    chunks = [_layers(rank, kernels, kinds) for kinds in rank.moe_flags]
    layers = [parts for chunk in chunks for parts in chunk]
    head = head_parts(rank, kernels) if rank.has_head else []
    moments = _of_a_step(rank, chunks, head)
    moments += _of_a_first_backward(rank, chunks[-1], pool)
    has_flat_states = rank.config.optimizer.optimizer.keeps_flat_states
    others, sent = pool.buffers + buffers, sent_copies(rank, flat)
    moments += _around_the_step(flat, states, others, sent, has_flat_states=has_flat_states)
    return Memory(
        rank.pipeline_rank,
        states,
        pool.buffers,
        buffers,
        tuple(map(_saved, layers)),
        (*(layers[-1] if layers else ()), *head, *([embedding_part(rank)] if rank.has_embedding else [])),
        rank.chunks_in_flight,
        tuple(moments),
    )


def _layers(rank: RankPlan, kernels: Kernels, kinds: list[bool]) -> list[list[PartMemory]]:
    """Lists the parts of each layer of a chunk; recomputation and offloading apply to its first layers."""
    parallel = rank.config.parallel
    chosen = frozenset(parallel.recompute_modules)
    limit = rank.num_layers if parallel.recompute_num_layers is None else parallel.recompute_num_layers
    made: dict[tuple[bool, bool, bool], list[PartMemory]] = {}
    result = []
    for place, is_moe in enumerate(kinds):
        key = (place < limit, place < parallel.cpu_offloading_num_layers, is_moe)
        if key not in made:
            recompute: frozenset[Recompute] = chosen if key[0] else frozenset()
            made[key] = layer_parts(rank, kernels, recompute, is_moe=is_moe, offload=key[1])
        result.append(made[key])
    return result


def _saved(parts: list[PartMemory]) -> int:
    return sum(part.saved for part in parts)


def _of_a_step(rank: RankPlan, chunks: list[list[list[PartMemory]]], head: list[PartMemory]) -> list[Moment]:
    """Moments of forward and backward of the micro-batch with most others alive, in the order of the backward.

    ``chunks``: the parts of each layer of each chunk.
    """
    saved = [sum(map(_saved, chunk)) for chunk in chunks]
    ends, last = _saved(head), chunks[-1]
    alive = everything = (rank.chunks_in_flight - 1) * max(saved) + saved[-1]
    moments = []
    if head:
        norm, loss = head
        moments.append(Moment("loss", everything + ends, loss.forward))
        moments.append(Moment("loss, backward", everything + ends, loss.backward))
        moments.append(Moment("final norm, backward", everything + norm.saved, norm.backward))
    seen: set[int] = set()  # of layers alike the last has most others alive
    for place, parts in enumerate(reversed(last)):
        if id(parts) in seen:
            alive -= _saved(parts)
            continue
        seen.add(id(parts))
        where = f"layer {len(last) - place} of {len(last)}"
        for part in reversed(parts):
            moments.append(Moment(f"{where}, {part.name}, forward", alive, part.forward))
            moments.append(Moment(f"{where}, {part.name}, backward", alive, part.backward))
            alive -= part.saved
    if rank.has_embedding:
        moments.append(Moment("embedding, backward", alive, embedding_part(rank).backward))
    return moments


def _of_a_first_backward(rank: RankPlan, layers: list[list[PartMemory]], pool: PoolBytes) -> list[Moment]:
    """Moments of ZeRO stage 2's first backward, which does not know yet when a bucket is complete.

    All its gradients stay where the backward leaves them until its end. The pool has no buffers before, so its bytes,
    which ``Memory.persistent`` includes, are subtracted. Where every backward waits so (``waits_always``) they are not:
    the later ones find the pool's buffers made. ``layers``: the parts of each layer of the last chunk.
    """
    if not pool.buffers:
        return []
    kinds, saved = rank.moe_flags[-1], list(map(_saved, layers))
    alive = (rank.chunks_in_flight - 1) * sum(saved)
    ends = embedding_and_head_parameters(rank) if rank.has_head else {}
    if HEAD in ends:  # the embedding's gradient comes last; of a tied one the head's part is there from the beginning
        ends.pop(EMBEDDING, None)
    waiting = waiting_bytes(rank, ends.values())
    moments, free = [], 0 if pool.waits_always else pool.buffers
    each = {is_moe: waiting_bytes(rank, parameters_of_layer(rank, is_moe=is_moe).values()) for is_moe in set(kinds)}
    for place, parts in reversed(list(enumerate(layers))):
        most = max(_saved(parts[: number + 1]) + part.backward for number, part in enumerate(parts))
        before = alive + sum(saved[:place])
        name = f"first backward, layer {place + 1} of {len(layers)}"
        moments.append(Moment(name, before, most + waiting - free))
        waiting += each[kinds[place]]
    return [*moments, Moment("first backward, end", alive, pool.first_end - pool.buffers)]


def _around_the_step(
    flat: list[PlannedFlatBuffer], states: StateBytes, others: int, sent: int, *, has_flat_states: bool
) -> list[Moment]:
    """Moments of the start, when weights still lie outside of their flat buffers, and of the optimizer's step.

    Relative to what stays.
    """
    moments = [Moment("start", 0, states.parameters - states.states - others)]
    if sent:
        moments.append(Moment("end of backward, gradients on their way", 0, sent))
    matrices = [buffer for buffer in flat if buffer.is_matrix]
    if matrices:
        work = _muon_workspace if has_flat_states else _owner_workspace
        moments.append(Moment("optimizer", 0, work(matrices)))
    return moments


def _muon_workspace(matrices: list[PlannedFlatBuffer]) -> int:
    """Muon's updates in bf16, the matrices of its iteration (optimizers/muon.py), and those that travel both ways."""
    largest = max(matrices, key=lambda buffer: buffer.shard)
    travelling = 4 * largest.shard if largest.group_size > 1 else 0
    return 2 * largest.shard + 8 * min(MUON_BATCH, largest.bucket) + travelling


def _owner_workspace(matrices: list[PlannedFlatBuffer]) -> int:
    """Updates in fp32 of optimizers/owner_states.py, those that travel both ways, and temporaries of one batch."""
    largest = max(matrices, key=lambda buffer: buffer.shard)
    travelling = 8 * largest.shard if largest.group_size > 1 else 0
    return 4 * largest.shard + OWNER_TEMPORARIES * 4 * min(MUON_BATCH, largest.bucket) + travelling


def _buffers(rank: RankPlan) -> int:
    """Bytes of the batch, tables, stages' inputs and outputs, memory shared with other ranks, and libraries."""
    shared = dispatcher_traffic(rank).shared_bytes(rank) if rank.num_moe_layers else 0
    batch = rank.micro_batches * rank.tokens * 2 * INT64
    travelling = 0
    for stage in rank.stages if rank.layout.pp > 1 else []:
        # torch gives each micro-batch a buffer for what comes in, from before and, in the backward, from behind.
        ends = (stage > 0) + (stage < rank.num_stages - 1)
        kept = rank.micro_batches if stage == rank.num_stages - 1 else rank.chunks_in_flight // len(rank.stages)
        travelling += (ends * rank.micro_batches + kept) * rank.residual_bytes
    return rope_table_bytes(rank) + batch + travelling + shared + LIBRARIES
