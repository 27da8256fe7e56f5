"""``engine.offload_states`` and ``reload_states``: the device's memory of idle states goes to the host and comes back.

The memory behind a flat buffer is given back and later allocated again behind the same tensors, so that every view into
it (buckets, shards, ``main_grad``) stays what it is. The model's parameters alone point at their host copies meanwhile:
a program may read them there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor

from deepspeed_ext.zero.family import Family

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads")  # DeepSpeed's names; its fifth is stage 3's


class HostStates:
    """What rests on the host. ``gradients``: called before an offload, ends exchanges and gives gradients' buffers."""

    def __init__(self, families: Sequence[Family], gradients: Callable[[], list[Tensor]]) -> None:
        self._families = families
        self._gradients = gradients
        self._away: dict[str, list[tuple[Tensor, Tensor]]] = {}  # by kind: a tensor of each storage, its bytes

    def require(self, what: str, *kinds: str) -> None:
        """Raises RuntimeError if one of ``kinds``, without any: of all, is on the host."""
        missing = [kind for kind in self._away if not kinds or kind in kinds]
        if missing:
            raise RuntimeError(
                f"{what} needs {', '.join(missing)}, which offload_states() took to the host; call "
                "engine.reload_states() first"
            )

    @torch.no_grad()
    def offload(self, include: Container[OffloadStateTypeEnum] | None, pin_memory: bool) -> None:
        """Copies what is not there yet to the host and frees it on the device. Waits for the device. Local."""
        gradients = self._gradients()
        wanted = [kind for kind in KINDS if include is None or OffloadStateTypeEnum(kind) in include]
        for kind in wanted:
            if kind not in self._away:
                tensors = gradients if kind == "lp_grads" else self._tensors(kind)
                self._away[kind] = [(tensor, _copy(tensor, pin_memory)) for tensor in _one_of_each_storage(tensors)]
        _wait()
        for kind in wanted:
            if kind == "lp_params":
                self._point_params({id(tensor): copy for tensor, copy in self._away[kind]})
            for tensor, _ in self._away[kind]:
                tensor.untyped_storage().resize_(0)
        get_accelerator().empty_cache()

    @torch.no_grad()
    def reload(self) -> None:
        """Brings everything back to where it was. Local."""
        for kind, copies in self._away.items():
            for tensor, copy in copies:
                tensor.untyped_storage().resize_(copy.numel())
                _bytes_of(tensor).copy_(copy, non_blocking=True)
            if kind == "lp_params":
                self._point_params({})
        _wait()  # the copies' memory is given back now
        self._away.clear()

    def _tensors(self, kind: str) -> list[Tensor]:
        if kind == "optim_states":
            shards = [bucket.shard for family in self._families for bucket in family.buckets]
            return [state for shard in shards for state in shard.state.values()]
        return [family.masters if kind == "hp_params" else family.param_buffer for family in self._families]

    def _point_params(self, host: dict[int, Tensor]) -> None:
        """Makes the module's parameters views of their flat buffer, or of its copy in ``host``."""
        for family in self._families:
            flat = family.param_buffer
            if id(flat) in host:
                flat = host[id(flat)].view(flat.dtype)
            for name, param in family.params.items():
                param.data = flat[family.place(name)].view(param.shape)


def _one_of_each_storage(tensors: Iterable[Tensor]) -> list[Tensor]:
    found = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.numel()}
    return list(found.values())


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _copy(tensor: Tensor, pin_memory: bool) -> Tensor:
    source = _bytes_of(tensor)
    copy = torch.empty(source.shape, dtype=torch.uint8)
    if pin_memory and source.device.type != "cpu":
        copy = get_accelerator().pin_memory(copy)
    return copy.copy_(source, non_blocking=True)


def _wait() -> None:
    get_accelerator().synchronize()
