"""The token dispatcher over symmetric memory: GPUs of one node read and write each other's memory by loads and stores.

Row p T + t of the rows of a rank is token t of rank p, as with all-gather, but only rows for which one of this rank's
experts is chosen travel, and the others stay unwritten. That needs no counts, no wait of the host, no copies into an
order for sending and no atomics. Outputs are summed once, in fp32 and in the order of ranks, on the rank of the token.

An exchange is a write, one barrier of the group on the device, and a read. It has one of two directions.
- Dispatch (the forward of dispatch, and the backward of combine): each rank writes its own rows into its own buffer,
  and after the barrier reads those that it needs from the buffers of all others.
- Combine (the forward of combine, and the backward of dispatch): each rank writes its outputs into the buffer of the
  rank that owns the token, into a region of its own there, and after the barrier reads its own buffer. A kernel writes
  the outputs that are needed. Gradients are plain copies of whole blocks of rows, which the copy engines make beside
  the last product of the experts' backward.

Why one barrier is enough: what an exchange reads may be overwritten when all ranks have read it. A rank enters the
barrier of the next exchange after the reads of this one, in the order of its stream, so whoever has passed that barrier
knows that all have read. The two directions have regions of their own and alternate: dispatch and combine in the
forward, and again in the backward. So a write of one direction always follows a barrier of the other, which followed
the reads. Where one direction comes twice in a row (a backward that was asked for some of the gradients only), an
additional barrier goes before it.

Nothing is kept in the buffer between exchanges: layers and micro-batches in flight share it.

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

from megatron.optimus.config.schema import ConfigError, TokenDispatcherType
from megatron.optimus.moe.dispatch.base import (
    ExpertRows,
    MessageShape,
    OverlappedWork,
    TokenDispatcher,
    no_work,
    register,
)
from megatron.optimus.moe.dispatch.overlap import WEIGHTS, AsyncDispatch, Wait, X, begin_dispatch, finish_dispatch
from megatron.optimus.moe.dispatch.ownership import Ownership
from megatron.optimus.ops import Routing
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.ranks import Ranks

REMEDY = "use allgather or alltoall"
_ALIGNMENT = 256  # bytes, of each region


class Direction(enum.Enum):
    """Which of the two exchanges of a layer runs."""

    DISPATCH = "dispatch"
    COMBINE = "combine"


class BufferShape(NamedTuple):
    """Size of one rank's tokens; buffers of one shape serve all layers that send such tokens."""

    num_tokens: int
    width: int
    topk: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _BufferRegion:
    """A tensor in the buffer, at the same offset (bytes) on every rank."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, buffer: Tensor) -> Tensor:
        """This region of a uint8 buffer as its tensor."""
        end = self.offset + math.prod(self.shape) * self.dtype.itemsize
        return buffer[self.offset : end].view(self.dtype).view(self.shape)


def buffer_regions(shape: BufferShape, num_ranks: int) -> tuple[dict[str, _BufferRegion], int]:
    """The regions of a rank's buffer by name, and its bytes: little more than P T D elements."""
    tokens, width, topk, dtype = shape
    regions, end = {}, 0
    for name, size, kind in (
        ("rows", (tokens, width), dtype),
        ("indices", (tokens, topk), torch.int32),
        ("weights", (tokens, topk), torch.float32),
        ("outputs", (num_ranks - 1, tokens, width), dtype),  # of the other ranks, in order
        ("dweights", (tokens, topk), torch.float32),
    ):
        regions[name] = _BufferRegion(end, size, kind)
        end += -(-math.prod(size) * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
    return regions, max(end, _ALIGNMENT)


class SymmetricBuffer:
    """The memory of a rank that its peers read and write, and the addresses of theirs. All exchanges use one stream."""

    def __init__(
        self,
        memory: Tensor,
        addresses: Sequence[int],
        rank: int,
        shape: BufferShape,
        barrier: Callable[[], None],
        keep_alive: object = None,
        memories: Sequence[Tensor] = (),
    ) -> None:
        """Describes memory that is already mapped.

        Args:
            memory: this rank's, uint8, as many bytes as ``buffer_regions`` says.
            addresses: where each rank's memory begins in this process, in rank order.
            rank: this rank in the group.
            shape: of the tokens.
            barrier: queues a wait for all ranks in the current stream.
            keep_alive: what must live as long as the buffer.
            memories: every rank's memory as this process maps it.
        """
        self.rank, self.num_ranks, self.shape = rank, len(addresses), shape
        self.keep_alive = keep_alive
        self.barrier = barrier  # between the writes and the reads of an exchange
        self._last: Direction | None = None
        self.pending: Callable[[], Any] | None = None  # makes the current stream wait for an exchange in another one
        regions, _ = buffer_regions(shape, len(addresses))
        self._local: dict[str, Tensor] = {}
        self._pointers_P: dict[str, Tensor] = {}
        for name, region in regions.items():
            self._local[name] = region.view(memory)
            starts = [address + region.offset for address in addresses]
            self._pointers_P[name] = torch.tensor(starts, dtype=torch.int64, device=memory.device)
        self.outputs_of_ranks = [regions["outputs"].view(of_rank) for of_rank in memories]

    def local(self, name: str) -> Tensor:
        """A region of this rank's memory."""
        return self._local[name]

    def pointers_P(self, name: str) -> Tensor:
        """Addresses of a region on every rank: int64 [P]."""
        return self._pointers_P[name]

    def begin(self, direction: Direction) -> None:
        """Must precede the writes of an exchange: waits for those that read what they overwrite."""
        if self.pending is not None:
            self.pending()
        if self._last is direction:
            self.barrier()
        self._last = direction


# One for each group and shape, for all layers; freed with the last dispatcher that has used it.
_buffers: WeakKeyDictionary[dist.ProcessGroup, WeakValueDictionary[BufferShape, SymmetricBuffer]] = WeakKeyDictionary()


def shared_buffer(group: dist.ProcessGroup, shape: BufferShape, device: torch.device) -> SymmetricBuffer:
    """The group's buffer for exchanges of this shape, allocated where a rank has none. Collective.

    Raises:
        ConfigError: on every rank, where ranks differ in shape or one lacks the memory.
    """
    ranks, made = Ranks(group, device), _buffers.setdefault(group, WeakValueDictionary())
    buffer = made.get(shape)
    mine = [repr(tuple(shape)), buffer is not None]
    everyone = [json.loads(part) for part in ranks.all_gather_bytes(json.dumps(mine).encode())]
    if len({text for text, _ in everyone}) > 1:
        raise ConfigError(
            "moe_token_dispatcher_type=symmetric: the ranks of an expert group have different (tokens, width, experts "
            f"per token, dtype): {', '.join(text for text, _ in everyone)}; give every rank as many tokens, or use "
            "alltoall"
        )
    # Whether a buffer that nobody uses any more is still there depends on each rank's garbage collector.
    if buffer is None or not all(has for _, has in everyone):
        buffer = made[shape] = _allocate(group, ranks, shape, device)
    return buffer


def _allocate(group: dist.ProcessGroup, ranks: Ranks, shape: BufferShape, device: torch.device) -> SymmetricBuffer:
    from torch.distributed import _symmetric_memory as symmetric

    num_bytes = buffer_regions(shape, ranks.size)[1]
    memory = ranks.run_on_all_ranks(
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
    return SymmetricBuffer(memory, addresses, ranks.rank, shape, barrier, (memory, handle), memories)


def _timeout_ms(group: dist.ProcessGroup, device: torch.device) -> int:
    """The timeout of the group's collectives; 0, which is none, for a group whose backend names none."""
    timeout = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
    return 0 if timeout is None else int(1000 * timeout.total_seconds())


@dataclass
class _SymmetricExchange:
    """The state of one dispatch that its combine and the exchanges of their gradients need."""

    buffer: SymmetricBuffer
    indices_TK: Tensor  # own choices, by the experts' numbers in the model
    owner_E: Tensor
    indices_RK: Tensor  # all ranks' choices, by the experts' numbers on this rank, or -1
    needed_R: Tensor

    def dispatch(self, x_TD: Tensor) -> Tensor:
        """Each rank's rows [T, D] to the rows of all ranks [R, D], of which the needed ones are written."""
        self.buffer.begin(Direction.DISPATCH)
        self.buffer.local("rows").copy_(x_TD)
        self.buffer.barrier()
        return _pull(self.buffer, self.needed_R)

    def combine(self, y_RD: Tensor) -> Tensor:
        """Each rank's outputs [R, D], of which the needed ones are read, to the sum for each own token [T, D]."""
        from megatron.optimus.ops.triton import symmetric_memory

        y_RD = self._checked(y_RD)
        self.buffer.begin(Direction.COMBINE)
        symmetric_memory.push_rows(y_RD, self.needed_R, self.buffer.pointers_P("outputs"), self.buffer.rank)
        self.buffer.barrier()
        return self._sum(y_RD)

    def start_combine(self, dx_RD: Tensor, dweights_RK: Tensor) -> Callable[[], Sequence[Tensor]]:
        """``combine`` of gradients beside what is queued later.

        Returns:
            A wait for the gradients of own x [T, D] and own weights [T, K].
        """
        from megatron.optimus.ops.triton import symmetric_memory

        buffer, dx_RD, dweights_RK = self.buffer, self._checked(dx_RD), dweights_RK.contiguous()
        buffer.begin(Direction.COMBINE)
        symmetric_memory.push_weight_gradients(dweights_RK, self.indices_RK, buffer.pointers_P("dweights"), buffer.rank)

        def rest() -> list[Tensor]:
            self._copy_to_peers(dx_RD)
            buffer.barrier()
            return [self._sum(dx_RD), buffer.local("dweights").clone()]

        end = devices.on_side_stream(dx_RD.device, rest)

        def finish() -> Sequence[Tensor]:
            buffer.pending = None
            return end()

        buffer.pending = finish
        return finish

    def _checked(self, y_RD: Tensor) -> Tensor:
        shape, dtype = (self.needed_R.shape[0], self.buffer.shape.width), self.buffer.shape.dtype
        if y_RD.shape != shape or y_RD.dtype != dtype:  # would be written to other places of the peers' memory
            raise ValueError(f"experts gave {y_RD.dtype} {tuple(y_RD.shape)}; expected {dtype} {shape}")
        return y_RD.contiguous()

    def _copy_to_peers(self, y_RD: Tensor) -> None:
        """Copies every rank's block of rows to where ``combine`` sends the needed ones, the next rank's first."""
        buffer = self.buffer
        blocks = y_RD.chunk(buffer.num_ranks)
        for step in range(1, buffer.num_ranks):
            peer = (buffer.rank + step) % buffer.num_ranks
            index = buffer.rank - (peer < buffer.rank)  # among the ranks without the peer
            buffer.outputs_of_ranks[peer][index].copy_(blocks[peer])

    def _sum(self, y_RD: Tensor) -> Tensor:
        from megatron.optimus.ops.triton import symmetric_memory

        outputs, rank, num_ranks = self.buffer.local("outputs"), self.buffer.rank, self.buffer.num_ranks
        return symmetric_memory.sum_outputs(y_RD, outputs, self.indices_TK, self.owner_E, rank, num_ranks)


class _AsyncSymmetric(AsyncDispatch):
    uses_copy_engines = True

    def __init__(self, exchange: _SymmetricExchange) -> None:
        super().__init__()
        self.exchange = exchange

    def start_grad_combine(self, dx_RD: Tensor, dweights_RK: Tensor) -> tuple[Wait, Wait]:
        end = self.exchange.start_combine(dx_RD, dweights_RK)
        return lambda: end()[X], lambda: end()[WEIGHTS]


def _pull(buffer: SymmetricBuffer, needed_R: Tensor) -> Tensor:
    from megatron.optimus.ops.triton import symmetric_memory

    return symmetric_memory.pull_rows(
        buffer.pointers_P("rows"), needed_R, buffer.rank, buffer.shape.width, buffer.shape.dtype
    )


def _dispatch_tokens(
    buffer: SymmetricBuffer, x_TD: Tensor, weights_TK: Tensor, indices_TK: Tensor, owner_E: Tensor, local_E: Tensor
) -> tuple[Tensor, Tensor, _SymmetricExchange]:
    """``_SymmetricExchange.dispatch`` of tokens whose choices the other ranks do not know yet."""
    from megatron.optimus.ops.triton import symmetric_memory

    buffer.begin(Direction.DISPATCH)
    for name, own in (("rows", x_TD), ("weights", weights_TK), ("indices", indices_TK)):
        buffer.local(name).copy_(own)
    buffer.barrier()
    indices_RK, weights_RK, needed_R = symmetric_memory.read_choices(
        buffer.pointers_P("indices"), buffer.pointers_P("weights"), owner_E, local_E, buffer.rank, *indices_TK.shape
    )
    exchange = _SymmetricExchange(buffer, indices_TK.contiguous(), owner_E, indices_RK, needed_R)
    return _pull(buffer, needed_R), weights_RK, exchange


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, exchange: _SymmetricExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.combine(y_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return ctx.exchange.dispatch(grads[0]), None


@register(TokenDispatcherType.SYMMETRIC)
class SymmetricDispatcher(TokenDispatcher):
    """Sends each token once to every rank that owns one of its experts, into the row that all-gather would give it.

    Rows for which none of this rank's experts is chosen (all their indices are -1) hold whatever was in their memory,
    in x, its gradient, and the gradient of y; they are never read. All ranks have the same number of tokens.
    """

    runs_everywhere = False

    def __init__(self, group: dist.ProcessGroup, ownership: Ownership) -> None:
        self.group = group
        self.ownership = ownership
        self.rank = dist.get_rank(group)
        self._used: dict[BufferShape, SymmetricBuffer] = {}

    @classmethod
    def unsupported_reason(cls, mesh: Mesh, device: torch.device) -> str | None:
        group = mesh.group("experts")
        assert group is not None
        return peer_access_problem(group, mesh.size("etp"), device)

    def prepare(self, shape: MessageShape, device: torch.device) -> None:
        self.reserve(BufferShape(shape.num_tokens, shape.width, shape.topk, shape.dtype), device)

    def reserve(self, shape: BufferShape, device: torch.device) -> SymmetricBuffer:
        """The buffer for exchanges of this shape. Collective where the shape is new; raises as ``shared_buffer``."""
        if shape not in self._used:
            self._used[shape] = shared_buffer(self.group, shape, device)
        return self._used[shape]

    def dispatch(
        self, x_TD: Tensor, routing: Routing, in_flight: None, overlapped: OverlappedWork = no_work
    ) -> ExpertRows:
        owner_E, local_E = self.ownership.owner_and_local_id(x_TD.device)
        num_tokens, width = x_TD.shape
        shape = BufferShape(num_tokens, width, routing.indices_TK.shape[1], x_TD.dtype)
        buffer = self.reserve(shape, x_TD.device)
        own = x_TD.detach(), routing.weights_TK.detach(), routing.indices_TK
        x_RD, weights_RK, exchange = _dispatch_tokens(buffer, *own, owner_E, local_E)
        pending = _AsyncSymmetric(exchange)
        links = begin_dispatch(x_TD, pending, X), begin_dispatch(routing.weights_TK, pending, WEIGHTS)
        overlapped()
        return finish_dispatch(links, pending, ExpertRows(x_RD, weights_RK, exchange.indices_RK, exchange))

    def combine(self, y_RD: Tensor, handle: _SymmetricExchange) -> Tensor:
        y_TD: Tensor = _Combine.apply(y_RD, handle)
        return y_TD


def peer_access_problem(group: dist.ProcessGroup, num_shards: int, device: torch.device) -> str | None:
    """Why the ranks of the group cannot use each other's memory, as far as this rank sees; None where they can.

    Collective over the group.
    """
    mine = [socket.gethostname(), device.index, _local_problem(num_shards, device)]
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


def _local_problem(num_shards: int, device: torch.device) -> str | None:
    if num_shards > 1:
        return f"expert_tensor_parallel_size={num_shards}, and it needs whole experts"
    if device.type != "cuda" or devices.is_rocm():
        return f"it needs GPUs of CUDA, and this run is on {'ROCm' if device.type == 'cuda' else device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed ('pip install triton')"
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return f"torch {torch.__version__} has no symmetric memory"
    return None
