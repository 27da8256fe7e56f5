"""One family's flat buffers on one rank: parameters, gradients and fp32 masters, cut into buckets.

Sizes, with P parameters in the family over n ranks, padding aside: params P (the model's dtype; the module's parameters
are views of it), masters P/n fp32, the rule's states. Gradients: stage 1 P in grad_dtype, in which the reduction leaves
its result; stage 2 P/n (the buckets' sums) and what the ring lends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ext.groups import ranks_of
from deepspeed_ext.rules.base import Shard, UpdateRule
from deepspeed_ext.zero.bucket import Bucket
from deepspeed_ext.zero.options import ZeroOptions
from deepspeed_ext.zero.partition import FamilyLayout, Piece

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class FamilyKey:
    """What the parameters of one flat buffer have in common."""

    param_group: int  # index in the wrapped optimizer's param_groups
    expert_group: str | None  # None: dense
    dtype: torch.dtype
    in_norm: bool = True  # False: another rank of the model-parallel group counts these same parameters


class Family:
    """Flat buffers of one family. ``params``: its parameters by name; ``rule`` updates the shards."""

    def __init__(
        self,
        key: FamilyKey,
        params: Mapping[str, nn.Parameter],
        layout: FamilyLayout,
        group: dist.ProcessGroup | None,
        rule: UpdateRule,
        options: ZeroOptions,
    ) -> None:
        self.key = key
        self.group = group
        self.layout = layout
        self.params = dict(params)
        self.rule = rule
        self.rank = ranks_of(group).index(dist.get_rank())
        self.group_size = layout.buckets[0].group_size
        device = next(iter(params.values())).device
        self.param_buffer = torch.zeros(layout.numel, dtype=key.dtype, device=device)
        self.masters = torch.zeros(layout.shard_numel, dtype=torch.float32, device=device)
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
                master=self.masters[first : first + layout.shard_numel],
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

    def contiguous_range(self, name: str) -> slice | None:
        """Where a parameter lies in the flat buffers, None if its pieces do not follow each other there."""
        pieces = self.pieces[name]
        if not pieces:  # a parameter without elements
            return slice(0, 0)
        starts = [self.layout.buckets[index].start + piece.offset - piece.start for index, piece in pieces]
        is_whole = len(set(starts)) == 1
        return slice(starts[0], starts[0] + self.params[name].numel()) if is_whole else None

    @torch.no_grad()
    def _move_params_into_buffer(self) -> None:
        for name, param in self.params.items():
            for index, piece in self.pieces[name]:
                flat = param.detach().reshape(-1)[piece.start : piece.stop]
                self.buckets[index].param[piece.offset : piece.offset + flat.numel()].copy_(flat)
            where = self.contiguous_range(name)
            if where is not None:
                param.data = self.param_buffer[where].view(param.shape)
        scattered = {name for name in self.params if self.contiguous_range(name) is None}
        for bucket in self.buckets:
            pieces = [piece for piece in bucket.layout.pieces if piece.name in scattered]
            if pieces:
                bucket.unpack = partial(self._unpack, bucket, pieces)

    def _unpack(self, bucket: Bucket, pieces: Sequence[Piece]) -> None:
        """Copies a gathered bucket's pieces to the parameters that are not views of the buffer."""
        torch._foreach_copy_(
            [self.params[piece.name].detach().view(-1)[piece.start : piece.stop] for piece in pieces],
            [bucket.param[piece.offset : piece.offset + piece.stop - piece.start] for piece in pieces],
        )

    @torch.no_grad()
    def read_masters_from_params(self) -> None:
        """Sets the masters to the parameters' present values."""
        for bucket in self.buckets:
            for piece in bucket.layout.shard_pieces(self.rank):
                flat = self.params[piece.name].detach().reshape(-1)[piece.start : piece.stop]
                bucket.shard.master[piece.offset : piece.offset + flat.numel()].copy_(flat)

    @torch.no_grad()
    def write_params_from_masters(self) -> None:
        """Casts the masters into this rank's part of the parameter buffer; the other parts are not touched."""
        for bucket in self.buckets:
            bucket.shard.param.copy_(bucket.shard.master)
