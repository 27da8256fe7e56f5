"""The transport over symmetric memory: GPUs of a node read and write each other's memory, without a collective library.

Row p T + t of what a rank's experts get is token t of rank p, as with all-gather, but only rows that one of these
experts is chosen for travel, and the others stay unwritten: no counts, no wait of the host, no copies into an order for
sending, no atomics. Outputs are summed once, in fp32 and in the order of the ranks, where their token lives.

An exchange is: write, one barrier of the group on the device, read. It has one of two directions.
- Dispatch (the forward of dispatch, and the backward of combine): each rank writes its own rows into its own memory,
  and after the barrier reads those that it needs from all others'.
- Combine (the forward of combine, and the backward of dispatch): each rank writes its outputs into the memory of the
  rank that owns the token, at a place of its own there, and after the barrier reads what the others wrote into its own.
  Outputs are written by a kernel, those needed alone. Gradients travel beside the last product of the experts'
  backward, as plain copies of whole blocks of rows: the copy engines make them, and no multiprocessor.

Why one barrier is enough. What an exchange reads may be written again when all ranks have read it. A rank enters the
barrier of the next exchange after the reads of this one, in the order of its stream, so whoever has passed that barrier
knows that all have read. The two directions have memory of their own, and they take turns: dispatch and combine in the
forward, and again in the backward. So a write of one direction always comes after a barrier of the other, which came
after the reads. Where one is taken twice in a row (a backward that was asked for some of the gradients only), a barrier
more goes before it.

Nothing is kept in that memory between exchanges: layers and micro-batches in flight share it.

Shapes: T tokens of each rank, P ranks, R = P T rows, K experts per token, D model width, E experts.
"""

from __future__ import annotations

import enum
import importlib.util
import json
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.moe.dispatch.base import ExpertRows, OverlappedWork, no_work
from megatron.optimus.moe.dispatch.overlap import WEIGHTS, AsyncDispatch, Wait, X, begin_dispatch, finish_dispatch
from megatron.optimus.moe.dispatch.ownership import Ownership
from megatron.optimus.ops import Routing
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.ranks import Ranks

REMEDY = "use allgather or alltoall"
_ALIGNMENT = 256  # bytes, of each part of the memory


class Direction(enum.Enum):
    DISPATCH = "dispatch"
    COMBINE = "combine"


class Shape(NamedTuple):
    """Of one rank's tokens."""

    num_tokens: int
    width: int
    topk: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Part:
    """A tensor in the memory, at the same place on every rank."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _parts(shape: Shape, num_ranks: int) -> tuple[dict[str, _Part], int]:
    """What the memory of a rank holds, and its bytes: little more than P T D elements."""
    tokens, width, topk, dtype = shape
    parts, end = {}, 0
    for name, size, kind in (
        ("rows", (tokens, width), dtype),
        ("indices", (tokens, topk), torch.int32),
        ("weights", (tokens, topk), torch.float32),
        ("outputs", (num_ranks - 1, tokens, width), dtype),  # of the other ranks, in order
        ("dweights", (tokens, topk), torch.float32),
    ):
        parts[name] = _Part(end, size, kind)
        end += -(-math.prod(size) * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
    return parts, max(end, _ALIGNMENT)


class Staging:
    """A rank's memory that its peers read and write, and the way to theirs. All exchanges run in one stream."""

    def __init__(
        self,
        memory: Tensor,
        addresses: Sequence[int],
        rank: int,
        shape: Shape,
        barrier: Callable[[], None],
        keep: object = None,
        memories: Sequence[Tensor] = (),
    ) -> None:
        """``memory``: uint8, as many bytes as ``_parts`` says. ``addresses``: where each rank's begins, in rank order.
        ``barrier``: queues a wait for all ranks in the current stream. ``keep``: what must live as long.
        ``memories``: every rank's, as this one sees them."""
        self.rank, self.num_ranks, self.shape = rank, len(addresses), shape
        self.keep = keep
        self._barrier = barrier
        self._last: Direction | None = None
        self.under_way: Callable[[], Any] | None = None  # makes the current stream wait for an exchange in another one
        parts, _ = _parts(shape, len(addresses))
        self._own: dict[str, Tensor] = {}
        self._at_P: dict[str, Tensor] = {}
        for name, part in parts.items():
            end = part.offset + math.prod(part.shape) * part.dtype.itemsize
            self._own[name] = memory[part.offset : end].view(part.dtype).view(part.shape)
            places = [address + part.offset for address in addresses]
            self._at_P[name] = torch.tensor(places, dtype=torch.int64, device=memory.device)
        outputs = parts["outputs"]
        end = outputs.offset + math.prod(outputs.shape) * outputs.dtype.itemsize
        self.outputs_of = [there[outputs.offset : end].view(outputs.dtype).view(outputs.shape) for there in memories]

    def own(self, name: str) -> Tensor:
        """A part of this rank's memory."""
        return self._own[name]

    def at_P(self, name: str) -> Tensor:
        """Where the part begins on every rank: int64 [P]."""
        return self._at_P[name]

    def begin(self, direction: Direction) -> None:
        """Before the writes of an exchange."""
        if self.under_way is not None:
            self.under_way()
        if self._last is direction:
            self._barrier()
        self._last = direction

    def barrier(self) -> None:
        """Between its writes and its reads."""
        self._barrier()


# One for each group and shape, for all layers; gone with the last dispatcher that has used it.
_stagings: WeakKeyDictionary[dist.ProcessGroup, WeakValueDictionary[Shape, Staging]] = WeakKeyDictionary()


def _staging_of(group: dist.ProcessGroup, shape: Shape, device: torch.device) -> Staging:
    """The group's memory for exchanges of this shape. Collective: every rank calls it when its dispatcher meets a shape
    for the first time.

    Raises ConfigError on every rank where ranks differ in shape, or one has not the memory.
    """
    ranks, made = Ranks(group, device), _stagings.setdefault(group, WeakValueDictionary())
    staging = made.get(shape)
    mine = [repr(tuple(shape)), staging is not None]
    everyone = [json.loads(part) for part in ranks.all_gather_bytes(json.dumps(mine).encode())]
    if len({text for text, _ in everyone}) > 1:
        raise ConfigError(
            "moe_token_dispatcher_type=symmetric: the ranks of an expert group have different (tokens, width, experts "
            f"per token, dtype): {', '.join(text for text, _ in everyone)}; give every rank as many tokens, or use "
            "alltoall"
        )
    # Of memory that nobody uses any more, what is still there depends on each rank's garbage collector.
    if staging is None or not all(has for _, has in everyone):
        staging = made[shape] = _make(group, ranks, shape, device)
    return staging


def _make(group: dist.ProcessGroup, ranks: Ranks, shape: Shape, device: torch.device) -> Staging:
    from torch.distributed import _symmetric_memory as symmetric

    num_bytes = _parts(shape, ranks.size)[1]
    memory = ranks.together(
        lambda: symmetric.empty(num_bytes, dtype=torch.uint8, device=device),
        f"moe_token_dispatcher_type=symmetric ({REMEDY}): allocating {num_bytes / 2**20:.0f} MiB of shared memory",
        ConfigError,
    )
    handle = symmetric.rendezvous(memory, group)
    offset = memory.data_ptr() - handle.buffer_ptrs[ranks.rank]  # the tensor may lie inside a larger allocation
    offsets = [int(text) for text in ranks.all_gather_bytes(str(offset).encode())]
    addresses = [int(start) + offset for start, offset in zip(handle.buffer_ptrs, offsets, strict=True)]
    timeout_ms = _timeout_ms(group, device)

    def barrier() -> None:
        handle.barrier(channel=0, timeout_ms=timeout_ms)

    memories = [
        handle.get_buffer(rank, (num_bytes,), torch.uint8, storage_offset=offset) for rank, offset in enumerate(offsets)
    ]
    return Staging(memory, addresses, ranks.rank, shape, barrier, (memory, handle), memories)


def _timeout_ms(group: dist.ProcessGroup, device: torch.device) -> int:
    """That of the group's collectives; 0, which is none, for one whose backend names none."""
    timeout = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
    return 0 if timeout is None else int(1000 * timeout.total_seconds())


@dataclass
class _Exchange:
    """What the combine of some rows, and the exchanges of their gradients, have to know."""

    staging: Staging
    indices_TK: Tensor  # own choices, the experts' numbers of the model
    owner_E: Tensor
    indices_RK: Tensor  # all ranks' choices, numbers of this rank or -1
    needed_R: Tensor

    def dispatch(self, x_TD: Tensor) -> Tensor:
        """[T, D] of each rank -> [R, D], of which the needed rows are written."""
        self.staging.begin(Direction.DISPATCH)
        self.staging.own("rows").copy_(x_TD)
        self.staging.barrier()
        return _pull(self.staging, self.needed_R)

    def combine(self, y_RD: Tensor) -> Tensor:
        """[R, D] of each rank, of which the needed rows are read -> for each own token their sum [T, D]."""
        from megatron.optimus.ops.triton import peers

        y_RD = self._fitting(y_RD)
        self.staging.begin(Direction.COMBINE)
        peers.push_rows(y_RD, self.needed_R, self.staging.at_P("outputs"), self.staging.rank)
        self.staging.barrier()
        return self._sum(y_RD)

    def start_combine(self, dx_RD: Tensor, dweights_RK: Tensor) -> Callable[[], Sequence[Tensor]]:
        """``combine`` beside what is queued later, and the gradients of the own weights [T, K] from those of the rows'
        [R, K]."""
        from megatron.optimus.ops.triton import peers

        staging, dx_RD, dweights_RK = self.staging, self._fitting(dx_RD), dweights_RK.contiguous()
        staging.begin(Direction.COMBINE)
        peers.push_weight_gradients(dweights_RK, self.indices_RK, staging.at_P("dweights"), staging.rank)

        def rest() -> list[Tensor]:
            self._copy(dx_RD)
            staging.barrier()
            return [self._sum(dx_RD), staging.own("dweights").clone()]

        end = devices.on_side_stream(dx_RD.device, rest)

        def finish() -> Sequence[Tensor]:
            staging.under_way = None
            return end()

        staging.under_way = finish
        return finish

    def _fitting(self, y_RD: Tensor) -> Tensor:
        shape, dtype = (self.needed_R.shape[0], self.staging.shape.width), self.staging.shape.dtype
        if y_RD.shape != shape or y_RD.dtype != dtype:  # would be written to other places of the peers' memory
            raise ValueError(f"experts gave {y_RD.dtype} {tuple(y_RD.shape)}; expected {dtype} {shape}")
        return y_RD.contiguous()

    def _copy(self, y_RD: Tensor) -> None:
        """Every rank's rows to where ``combine`` sends those needed, the next rank's first."""
        staging = self.staging
        blocks = y_RD.chunk(staging.num_ranks)
        for step in range(1, staging.num_ranks):
            peer = (staging.rank + step) % staging.num_ranks
            place = staging.rank - (peer < staging.rank)  # among the ranks without the peer
            staging.outputs_of[peer][place].copy_(blocks[peer])

    def _sum(self, y_RD: Tensor) -> Tensor:
        from megatron.optimus.ops.triton import peers

        outputs, rank, num_ranks = self.staging.own("outputs"), self.staging.rank, self.staging.num_ranks
        return peers.sum_outputs(y_RD, outputs, self.indices_TK, self.owner_E, rank, num_ranks)


class _AsyncSymmetric(AsyncDispatch):
    by_copies = True

    def __init__(self, exchange: _Exchange) -> None:
        super().__init__()
        self.exchange = exchange

    def start_grad_combine(self, dx_RD: Tensor, dweights_RK: Tensor) -> tuple[Wait, Wait]:
        end = self.exchange.start_combine(dx_RD, dweights_RK)
        return lambda: end()[X], lambda: end()[WEIGHTS]


def _pull(staging: Staging, needed_R: Tensor) -> Tensor:
    from megatron.optimus.ops.triton import peers

    return peers.pull_rows(staging.at_P("rows"), needed_R, staging.rank, staging.shape.width, staging.shape.dtype)


def _dispatch_tokens(
    staging: Staging, x_TD: Tensor, weights_TK: Tensor, indices_TK: Tensor, owner_E: Tensor, local_E: Tensor
) -> tuple[Tensor, Tensor, _Exchange]:
    """``_Exchange.dispatch`` of tokens whose choices the other ranks do not know yet."""
    from megatron.optimus.ops.triton import peers

    staging.begin(Direction.DISPATCH)
    for name, own in (("rows", x_TD), ("weights", weights_TK), ("indices", indices_TK)):
        staging.own(name).copy_(own)
    staging.barrier()
    indices_RK, weights_RK, needed_R = peers.read_choices(
        staging.at_P("indices"), staging.at_P("weights"), owner_E, local_E, staging.rank, *indices_TK.shape
    )
    exchange = _Exchange(staging, indices_TK.contiguous(), owner_E, indices_RK, needed_R)
    return _pull(staging, needed_R), weights_RK, exchange


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.combine(y_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return ctx.exchange.dispatch(grads[0]), None


class SymmetricDispatcher:
    """Each token goes once to every rank that owns one of its experts, into the row that all-gather would give it.

    Rows that none of this rank's experts is chosen for (all their indices are -1) hold whatever lay in their memory, in
    x, its gradient, and the gradient of y; they are never read. All ranks have as many tokens.
    """

    def __init__(self, group: dist.ProcessGroup, ownership: Ownership) -> None:
        self.group = group
        self.ownership = ownership
        self.rank = dist.get_rank(group)
        self._used: dict[Shape, Staging] = {}

    def reserve(self, shape: Shape, device: torch.device) -> Staging:
        """The memory for exchanges of this shape. Collective where the shape is new; raises as ``_staging_of``."""
        if shape not in self._used:
            self._used[shape] = _staging_of(self.group, shape, device)
        return self._used[shape]

    def start(self, x_TD: Tensor) -> None:
        return None

    def dispatch(
        self, x_TD: Tensor, routing: Routing, started: None, overlapped: OverlappedWork = no_work
    ) -> ExpertRows:
        tables = self.ownership.tables(x_TD.device)
        num_tokens, width = x_TD.shape
        shape = Shape(num_tokens, width, routing.indices_TK.shape[1], x_TD.dtype)
        staging = self.reserve(shape, x_TD.device)
        own = x_TD.detach(), routing.weights_TK.detach(), routing.indices_TK
        x_RD, weights_RK, exchange = _dispatch_tokens(staging, *own, *tables)
        pending = _AsyncSymmetric(exchange)
        links = begin_dispatch(x_TD, pending, X), begin_dispatch(routing.weights_TK, pending, WEIGHTS)
        overlapped()
        return finish_dispatch(links, pending, ExpertRows(x_RD, weights_RK, exchange.indices_RK, exchange))

    def combine(self, y_RD: Tensor, handle: _Exchange) -> Tensor:
        y_TD: Tensor = _Combine.apply(y_RD, handle)
        return y_TD


def symmetric_problem(group: dist.ProcessGroup, num_shards: int, device: torch.device) -> str | None:
    """Why the ranks of the group cannot use each other's memory, as far as this rank sees; None where they can.

    Collective over the group. Ranks may see different things: they have to agree on what follows from it.
    """
    mine = [socket.gethostname(), device.index, _own_problem(num_shards, device)]
    everyone = [json.loads(data) for data in Ranks(group, device).all_gather_bytes(json.dumps(mine).encode())]
    problem = next((problem for _, _, problem in everyone if problem is not None), None)
    if problem is None and len({host for host, _, _ in everyone}) > 1:
        hosts = ", ".join(sorted({host for host, _, _ in everyone}))
        problem = f"the {len(everyone)} ranks that share the experts are on several nodes ({hosts})"
    indices = [index for _, index, _ in everyone]
    if problem is None and len(set(indices)) < len(indices):  # nodes of the same name, or one GPU for two ranks
        problem = f"each rank needs a GPU of its own on {everyone[0][0]}, and their numbers are {indices}"
    if problem is None:
        unreached = devices.without_peer_access(device, sorted(indices))
        if unreached:
            problem = f"{device} cannot map the memory of devices {', '.join(map(str, unreached))} of its node"
    return None if problem is None else f"{problem}; {REMEDY}"


def _own_problem(num_shards: int, device: torch.device) -> str | None:
    if num_shards > 1:
        return f"expert_tensor_parallel_size={num_shards}, and it needs whole experts"
    if device.type != "cuda":
        return f"it needs GPUs of CUDA, and this run is on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed ('pip install triton')"
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return f"torch {torch.__version__} has no symmetric memory"
    return None
