"""One family's flat buffers on one rank: parameters, gradients and fp32 masters, cut into buckets.

Sizes, with P parameters in the family over n ranks, padding aside: params P (the model's dtype; the module's parameters
are views of it), masters P/n fp32, the rule's states. fp32 parameters are their own masters: each shard's master is its
part of the parameter buffer. Gradients: stage 1 P in grad_dtype, in which the reduction leaves its result; stage 2 P/n
(the buckets' sums) and what the ring lends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ext.groups import ranks_of
from deepspeed_ext.optimizers.base import MatrixOptimizer, Shard, ShardOptimizer, WholeMatrices
from deepspeed_ext.zero.bucket import Bucket
from deepspeed_ext.zero.matrix_exchange import MatrixExchange
from deepspeed_ext.zero.options import ZeroOptions
from deepspeed_ext.zero.partition import FamilyLayout, Piece

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FamilyKey:
    """What the parameters of one flat buffer have in common."""

    param_group: int  # index in the wrapped optimizer's param_groups
    expert_group: str | None  # None: dense
    dtype: torch.dtype
    # The same on all tensor-parallel ranks. Such parameters must not share buckets with parts of cut ones: what all
    # ranks repeat has to be summed in the same order everywhere, or the copies drift apart.
    is_tensor_replica: bool = False
    is_pipe_replica: bool = False  # of a parameter that another pipeline stage counts in the norm
    # Another pipeline stage has a copy, which stays one only if both sum in the same order: in buckets of their own.
    is_pipe_tied: bool = False


class Family:
    """Flat buffers of one family. ``params``: its parameters by name; ``rule`` updates the shards."""

    def __init__(
        self,
        key: FamilyKey,
        params: Mapping[str, nn.Parameter],
        layout: FamilyLayout,
        group: dist.ProcessGroup | None,
        rule: ShardOptimizer,
        options: ZeroOptions,
    ) -> None:
        self.key = key
        self.group = group
        self.layout = layout
        self.params = dict(params)
        self.rule = rule
        self.in_norm = True  # False: another rank of the model-parallel group counts these same parameters
        self.rank = ranks_of(group).index(dist.get_rank())
        self.group_size = layout.buckets[0].group_size
        self.exchange: WholeMatrices | None = None
        if isinstance(rule, MatrixOptimizer):
            matrices = {name: (param.shape, getattr(param, "stacked_matrices", 1)) for name, param in params.items()}
            self.exchange = MatrixExchange(layout, matrices, self.rank, group)
        device = next(iter(params.values())).device
        self.param_buffer = torch.zeros(layout.numel, dtype=key.dtype, device=device)
        self.has_masters = key.dtype != torch.float32  # beside the parameters
        self.masters = torch.zeros(layout.shard_numel if self.has_masters else 0, dtype=torch.float32, device=device)
        self.grad_buffer: Tensor | None = None
        if options.stage == 1 or self.group_size == 1:
            self.grad_buffer = torch.zeros(layout.numel, dtype=options.grad_dtype, device=device)
        self.pieces: dict[str, list[tuple[int, Piece]]] = {name: [] for name in params}
        for index, bucket in enumerate(layout.buckets):
            for piece in bucket.pieces:
                self.pieces[piece.name].append((index, piece))
        self.buckets = self._make_buckets(options)
        self._move_params_into_buffer()
        self.read_masters_from_params()

    def _make_buckets(self, options: ZeroOptions) -> list[Bucket]:
        buckets, first = [], 0
        for layout in self.layout.buckets:
            whole = slice(layout.start, layout.start + layout.numel)
            param = self.param_buffer[whole]
            own = slice(self.rank * layout.shard_numel, (self.rank + 1) * layout.shard_numel)
            shard = Shard(
                master=self.masters[first : first + layout.shard_numel] if self.has_masters else param[own],
                grad=self.masters.new_empty(0),  # set when the bucket has been reduced
                param=param[own],
            )
            storage = self.grad_buffer[whole] if self.grad_buffer is not None else None
            buckets.append(Bucket(layout, self.group, self.rank, shard, param, storage, options))
            first += layout.shard_numel
        return buckets

    def new_states(self, options: Mapping[str, Any]) -> None:
        """Creates the rule's states; ``options`` is the optimizer's parameter group."""
        for bucket in self.buckets:
            bucket.shard.state = self.rule.new_state(bucket.shard, options)

    def place(self, name: str) -> slice:
        """Where a parameter lies in the flat buffers."""
        if not self.pieces[name]:  # a parameter without elements
            return slice(0, 0)
        index, piece = self.pieces[name][0]
        start = self.layout.buckets[index].start + piece.offset
        return slice(start, start + self.params[name].numel())

    @torch.no_grad()
    def _move_params_into_buffer(self) -> None:
        for name, param in self.params.items():
            view = self.param_buffer[self.place(name)].view(param.shape)
            view.copy_(param)
            param.data = view

    @torch.no_grad()
    def read_masters_from_params(self) -> None:
        """Sets the masters to the parameters' present values."""
        for bucket in self.buckets if self.has_masters else ():
            bucket.shard.master.copy_(bucket.shard.param)

    @torch.no_grad()
    def write_params_from_masters(self) -> None:
        """Casts the masters into this rank's part of the parameter buffer; the other parts are not touched."""
        for bucket in self.buckets if self.has_masters else ():
            bucket.shard.param.copy_(bucket.shard.master)

    def memory_bytes(self) -> dict[str, int]:
        """As ``EPZeroOptimizer.memory_bytes``."""
        full = 0 if self.grad_buffer is None else self.grad_buffer.nbytes
        states = sum(tensor.nbytes for bucket in self.buckets for tensor in bucket.shard.state.values())
        unowned = sum(
            bucket.shard_numel - sum(piece.stop - piece.start for piece in bucket.shard_pieces(self.rank))
            for bucket in self.layout.buckets
        )
        kept = self.masters.nbytes + states
        each = self.param_buffer.element_size() + (0 if self.grad_buffer is None else self.grad_buffer.element_size())
        return {
            "parameters": self.param_buffer.nbytes,
            "gradients": full + sum(bucket.gradient_bytes() for bucket in self.buckets),
            "masters": self.masters.nbytes,
            "states": states,
            "padding": self.layout.padding * each + unowned * (kept // self.layout.shard_numel),
        }
