"""DeepSpeed's ``safe_get_full_*`` and ``safe_set_full_*``: whole masters, states and gradients of one parameter.

``deepspeed.utils.tensor_fragment`` looks for ``_hp_mapping`` and four methods on the parameter itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ext.zero.bucket import Bucket
from deepspeed_ext.zero.family import Family
from deepspeed_ext.zero.partition import Piece

_METHODS = ("get_full_hp_param", "set_full_hp_param", "get_full_hp_grad", "set_full_hp_grad")


class _WholeParam:
    """``divisor``: of summed gradients; ``has_gradients``: whether they have been reduced since the last step;
    ``require(what)`` raises while states are on the host, and waits for parameters that are on their way."""

    def __init__(
        self,
        family: Family,
        name: str,
        divisor: float,
        has_gradients: Callable[[], bool],
        require: Callable[[str], None],
    ) -> None:
        self._family, self._name = family, name
        self._divisor, self._has_gradients, self._require = divisor, has_gradients, require

    def get_full_hp_param(self, optim_state_key: str | None = None) -> Tensor:
        """The fp32 master, or the state of that name, of the parameter's shape. Collective over the family's group."""
        return self._gather(lambda bucket: self._state(bucket, optim_state_key))

    @torch.no_grad()
    def set_full_hp_param(self, value: Tensor, optim_state_key: str | None = None) -> None:
        """Sets what this rank owns of it; weights follow with the next step, or ``sync_params_from_master``, in fp32 at
        once: they are the masters."""
        flat = value.reshape(-1)
        if optim_state_key is None and not self._family.has_masters:
            self._require("access to sharded values")
            self._family.params[self._name].copy_(value.view_as(self._family.params[self._name]))
            return
        for bucket, piece, place in self._own():
            state = self._state(bucket, optim_state_key)
            state[place] = flat[piece.start : piece.stop].to(state)
            if optim_state_key is not None:
                self._family.rule.write_state(bucket.shard, optim_state_key, state)

    def get_full_hp_grad(self) -> Tensor | None:
        """The mean gradient in fp32, multiplied by the loss scale; None before it is reduced, and after the step.
        Collective over the family's group."""
        if not self._has_gradients():
            return None
        return self._gather(Bucket.finish_gradient) / self._divisor

    @torch.no_grad()
    def set_full_hp_grad(self, value: Tensor) -> None:
        """Sets what this rank owns of the mean gradient. Raises RuntimeError where ``get_full_hp_grad`` gives None."""
        if not self._has_gradients():
            raise RuntimeError(f"{self._name!r} has no reduced gradient to set: call this after the last backward")
        flat = value.reshape(-1)
        for bucket, piece, place in self._own():
            gradient = bucket.finish_gradient()
            gradient[place] = (flat[piece.start : piece.stop] * self._divisor).to(gradient)

    def _own(self) -> Iterator[tuple[Bucket, Piece, slice]]:
        """This rank's pieces, and where they are in the bucket's shard."""
        self._require("access to sharded values")
        for index, _ in self._family.pieces[self._name]:
            bucket = self._family.buckets[index]
            for piece in bucket.layout.shard_pieces(self._family.rank):
                if piece.name == self._name:
                    yield bucket, piece, slice(piece.offset, piece.offset + piece.stop - piece.start)

    @torch.no_grad()
    def _gather(self, read: Callable[[Bucket], Tensor]) -> Tensor:
        param = self._family.params[self._name]
        flat = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
        for bucket, piece, place in self._own():
            flat[piece.start : piece.stop] = read(bucket)[place].to(flat)
        if self._family.group_size > 1:
            dist.all_reduce(flat, group=self._family.group)
        return flat.view(param.shape)

    def _state(self, bucket: Bucket, kind: str | None) -> Tensor:
        if kind is None:
            return bucket.shard.master
        known = self._family.rule.state_kinds
        if kind not in known:
            raise ValueError(f"the optimizer keeps no state {kind!r} of {self._name!r}; it has {', '.join(known)}")
        return self._family.rule.read_state(bucket.shard, kind)


def attach(
    families: Sequence[Family], divisor: float, has_gradients: Callable[[], bool], require: Callable[[str], None]
) -> None:
    """Gives every parameter what DeepSpeed's functions look for."""
    for family in families:
        for name, param in family.params.items():
            whole = _WholeParam(family, name, divisor, has_gradients, require)
            param._hp_mapping = None  # type: ignore[attr-defined]
            for method in _METHODS:
                setattr(param, method, getattr(whole, method))


def is_attached(param: nn.Parameter) -> bool:
    """Whether an optimizer of ours has it."""
    return isinstance(getattr(getattr(param, _METHODS[0], None), "__self__", None), _WholeParam)


def detach(params: Sequence[nn.Parameter]) -> None:
    """Takes it away again."""
    for param in params:
        for name in ("_hp_mapping", *_METHODS):
            if hasattr(param, name):
                delattr(param, name)
