"""Peak memory of a rank: what always stays, and what each moment of a step adds to it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.optimus.config.schema import Recompute, TokenDispatcherType
from megatron.optimus.planner.activations import (
    CUDA,
    INT32,
    INT64,
    Kernels,
    Part,
    embedding_part,
    head_parts,
    layer_parts,
)
from megatron.optimus.planner.lending import Lending, lending, waiting_bytes
from megatron.optimus.planner.parameters import (
    Family,
    StateBytes,
    decoded_states,
    end_parameters,
    families,
    layer_parameters,
    sent_copies,
    state_bytes,
)
from megatron.optimus.planner.ring import FP32
from megatron.optimus.planner.share import Share

# Not counted by hand: cuBLAS takes 32 MiB for each stream it works on, two here (an H200's default).
LIBRARIES = 64 * 2**20
MUON_BATCH = 2**26  # elements that Muon orthogonalises at once


@dataclass(frozen=True)
class Moment:
    """A time at which much is alive: bytes besides what always stays."""

    name: str
    activations: int  # saved for a backward
    working: int  # temporaries and gradients on their way

    @property
    def total(self) -> int:
        return self.activations + self.working


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank of one pipeline rank."""

    pipeline_rank: int
    states: StateBytes
    lent: int  # stage 2: buffers for gradients that are being reduced
    buffers: int  # batch, tables, stages' inputs and outputs, memory shared with other ranks, libraries
    saved_per_layer: tuple[int, ...]  # activations of one micro-batch in each layer
    parts: tuple[Part, ...]  # of the last layer, then of the ends of the model that are here
    in_flight: int  # micro-batches x chunks
    moments: tuple[Moment, ...]

    @property
    def always(self) -> int:
        return self.states.total + self.lent + self.buffers

    @property
    def worst(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def peak(self) -> int:
        """Most bytes of live tensors at any time, in the device's allocator."""
        return self.always + self.worst.total


def memory_of(share: Share, kernels: Kernels = CUDA) -> Memory:
    """Of one rank in training with the whole optimizer."""
    members = families(share)
    each = [state_bytes(share, family) for family in members]
    states = StateBytes(*(sum(getattr(one, name) for one in each) for name in StateBytes.__dataclass_fields__))
    lends = lending(share)
    buffers = _buffers(share)
    layers = [parts for chunk in share.kinds for parts in _layers(share, kernels, chunk)]
    head = head_parts(share, kernels) if share.has_head else []
    moments = _of_a_step(share, layers, head)
    moments += _of_a_first_backward(share, layers, lends)
    moments += _around_the_step(members, states, lends.lent + buffers, sent_copies(share, members))
    if decoded := decoded_states(share, members):
        moments.append(Moment("save", 0, decoded))
    return Memory(
        share.pipeline_rank,
        states,
        lends.lent,
        buffers,
        tuple(sum(part.saved for part in parts) for parts in layers),
        (*(layers[-1] if layers else ()), *head, *([embedding_part(share)] if share.has_embedding else [])),
        share.chunks_in_flight,
        tuple(moments),
    )


def _layers(share: Share, kernels: Kernels, kinds: list[bool]) -> list[list[Part]]:
    """The parts of each layer of a chunk; recomputation and offloading take its first ones."""
    parallel = share.config.parallel
    chosen = frozenset(parallel.recompute_modules)
    limit = share.num_layers if parallel.recompute_num_layers is None else parallel.recompute_num_layers
    made: dict[tuple[bool, bool, bool], list[Part]] = {}
    result = []
    for place, is_moe in enumerate(kinds):
        key = (place < limit, place < parallel.cpu_offloading_num_layers, is_moe)
        if key not in made:
            recompute: frozenset[Recompute] = chosen if key[0] else frozenset()
            made[key] = layer_parts(share, kernels, recompute, is_moe=is_moe, offload=key[1])
        result.append(made[key])
    return result


def _of_a_step(share: Share, layers: list[list[Part]], head: list[Part]) -> list[Moment]:
    """Forward and backward of the micro-batch with most others alive: the last layer first, as backward goes."""
    saved = [sum(part.saved for part in parts) for parts in layers]
    chunks = [sum(saved[first : first + len(chunk)]) for first, chunk in _places(share)]
    ends = sum(part.saved for part in head)
    others = (share.chunks_in_flight - 1) * max(chunks, default=0)
    everything = others + (chunks[-1] if share.layout.pp > 1 and chunks else sum(saved))
    moments = []
    if head:
        norm, loss = head
        moments.append(Moment("loss", everything + ends, loss.forward))
        moments.append(Moment("loss, backward", everything + ends, loss.backward))
        moments.append(Moment("final norm, backward", everything + norm.saved, norm.backward))
    alive = everything
    last = layers[-len(share.chunks[-1]) :] if share.layout.pp > 1 else layers
    seen: set[int] = set()  # of layers alike the last has most others alive
    for place, parts in enumerate(reversed(last)):
        if id(parts) in seen:
            alive -= sum(part.saved for part in parts)
            continue
        seen.add(id(parts))
        where = f"layer {len(last) - place} of {len(last)}"
        for part in reversed(parts):
            moments.append(Moment(f"{where}, {part.name}, forward", alive, part.forward))
            moments.append(Moment(f"{where}, {part.name}, backward", alive, part.backward))
            alive -= part.saved
    if share.has_embedding:
        moments.append(Moment("embedding, backward", alive, embedding_part(share).backward))
    return moments


def _of_a_first_backward(share: Share, layers: list[list[Part]], lends: Lending) -> list[Moment]:
    """Stage 2, where a backward does not know yet when a bucket is complete: all its gradients wait for its end, and
    nothing has been lent before, unless all backwards are so. Relative to what stays."""
    if not lends.lent:
        return []
    chunk, kinds = share.chunks[-1], share.kinds[-1]
    own = layers[-len(chunk) :]
    alive = (share.chunks_in_flight - 1) * sum(part.saved for parts in own for part in parts)
    ends = end_parameters(share) if share.has_head else {}
    if "head" in ends:  # the embedding's gradient comes last; of a tied one the head's part is there from the beginning
        ends.pop("embedding", None)
    waiting = waiting_bytes(share, ends.values())
    moments, free = [], 0 if lends.waits_always else lends.lent
    each = {is_moe: waiting_bytes(share, layer_parameters(share, is_moe=is_moe).values()) for is_moe in set(kinds)}
    saved = [sum(part.saved for part in parts) for parts in own]
    for place in reversed(range(len(own))):
        most = max(
            sum(part.saved for part in own[place][: number + 1]) + part.backward
            for number, part in enumerate(own[place])
        )
        before = alive + sum(saved[:place])
        name = f"first backward, layer {place + 1} of {len(own)}"
        moments.append(Moment(name, before, most + waiting - free))
        waiting += each[kinds[place]]
    return [*moments, Moment("first backward, end", alive, lends.first_end - lends.lent)]


def _places(share: Share) -> list[tuple[int, range]]:
    """(number of the first layer on this rank, layers) of each chunk."""
    places, first = [], 0
    for chunk in share.chunks:
        places.append((first, chunk))
        first += len(chunk)
    return places


def _around_the_step(members: list[Family], states: StateBytes, others: int, sent: int) -> list[Moment]:
    """The start, when weights still lie outside of their flat buffers, and the optimizer. Relative to what stays."""
    moments = [Moment("start", 0, states.parameters - states.states - others)]
    if sent:
        moments.append(Moment("end of backward, gradients on their way", 0, sent))
    matrices = [family for family in members if family.is_matrix]
    if matrices:
        moments.append(Moment("optimizer", 0, _muon_workspace(matrices)))
    return moments


def _muon_workspace(matrices: list[Family]) -> int:
    """Updates in bf16, the iteration's matrices (optimizers/muon.py), and matrices that travel both ways."""
    largest = max(matrices, key=lambda family: family.shard)
    travelling = 4 * largest.shard if largest.group_size > 1 else 0
    return 2 * largest.shard + 8 * min(MUON_BATCH, largest.bucket) + travelling


def _buffers(share: Share) -> int:
    model, training, layout = share.model, share.config.training, share.layout
    tables = 2 * training.seq_length * model.head_dim * FP32
    batch = share.micro_batches * share.tokens * 2 * INT64
    hidden = share.tokens_outside * model.hidden_size * share.element
    travelling = 0
    for stage in share.stages if layout.pp > 1 else []:
        # torch gives each micro-batch a buffer for what comes in, from before and, in the backward, from behind.
        ends = (stage > 0) + (stage < share.num_stages - 1)
        kept = share.micro_batches if stage == share.num_stages - 1 else share.chunks_in_flight // len(share.stages)
        travelling += (ends * share.micro_batches + kept) * hidden
    return tables + batch + travelling + _shared_with_peers(share) + LIBRARIES


def _shared_with_peers(share: Share) -> int:
    """What moe/dispatch/symmetric.py allocates: own tokens, the answers of all others, choices and their gradients."""
    is_used = share.config.parallel.moe_token_dispatcher_type is TokenDispatcherType.SYMMETRIC
    if not is_used or not share.num_moe_layers or share.expert_ranks == 1:
        return 0
    choices = share.tokens_outside * share.model.moe_router_topk
    return share.rows * share.model.hidden_size * share.element + choices * (INT32 + 2 * FP32)
