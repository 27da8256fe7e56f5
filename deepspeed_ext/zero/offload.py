"""Moves idle states from the device to the host and back, for ``engine.offload_states`` and ``reload_states``.

The memory behind a flat buffer is freed and later allocated again behind the same tensors, so that every view of it
(buckets, shards, ``main_grad``) stays valid. Meanwhile the model's parameters, which a program may read, are views of
their host copies.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor

from deepspeed_ext.zero.flat_buffer import FlatBuffer

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads")  # DeepSpeed's names; its fifth is stage 3's


class HostStates:
    """What is on the host.

    Args:
        flat_buffers: all of the optimizer's.
        gradients: is called before an offload; waits for reductions and returns all memory that holds gradients.
    """

    def __init__(self, flat_buffers: Sequence[FlatBuffer], gradients: Callable[[], list[Tensor]]) -> None:
        self._flat_buffers = flat_buffers
        self._gradients = gradients
        self._on_host: dict[str, list[tuple[Tensor, Tensor]]] = {}  # by kind: a tensor of each storage, its bytes

    def require(self, what: str, *kinds: str) -> None:
        """Raises RuntimeError if one of ``kinds`` (without any: of all kinds) is on the host; ``what`` needs them."""
        missing = [kind for kind in self._on_host if not kinds or kind in kinds]
        if missing:
            raise RuntimeError(
                f"{what} needs {', '.join(missing)}, which offload_states() took to the host; call "
                "engine.reload_states() first"
            )

    @torch.no_grad()
    def offload(self, include: Container[OffloadStateTypeEnum] | None, pin_memory: bool) -> None:
        """Copies what is not there yet to the host and frees it on the device. Waits for the device. Local.

        Args:
            include: the kinds to offload; None: all.
            pin_memory: whether the host copies are in pinned memory.
        """
        gradients = self._gradients()
        wanted = [kind for kind in KINDS if include is None or OffloadStateTypeEnum(kind) in include]
        for kind in wanted:
            if kind not in self._on_host:
                tensors = gradients if kind == "lp_grads" else self._tensors(kind)
                self._on_host[kind] = [(tensor, _copy(tensor, pin_memory)) for tensor in _one_of_each_storage(tensors)]
        _wait()
        for kind in wanted:
            if kind == "lp_params":
                self._view_params_in({id(tensor): copy for tensor, copy in self._on_host[kind]})
            for tensor, _ in self._on_host[kind]:
                tensor.untyped_storage().resize_(0)
        get_accelerator().empty_cache()

    @torch.no_grad()
    def reload(self) -> None:
        """Copies everything back to where it was. Waits for the device. Local."""
        for kind, copies in self._on_host.items():
            for tensor, copy in copies:
                tensor.untyped_storage().resize_(copy.numel())
                _bytes_of(tensor).copy_(copy, non_blocking=True)
            if kind == "lp_params":
                self._view_params_in({})
        _wait()  # the copies' memory is freed now
        self._on_host.clear()

    def _tensors(self, kind: str) -> list[Tensor]:
        if kind == "optim_states":
            return [state for flat_buffer in self._flat_buffers for state in flat_buffer.state_tensors()]
        return [
            flat_buffer.masters if kind == "hp_params" else flat_buffer.param_buffer
            for flat_buffer in self._flat_buffers
        ]

    def _view_params_in(self, host: dict[int, Tensor]) -> None:
        """Makes the module's parameters views of their flat buffer, or of its copy in ``host``."""
        for flat_buffer in self._flat_buffers:
            flat = flat_buffer.param_buffer
            if id(flat) in host:
                flat = host[id(flat)].view(flat.dtype)
            for name, param in flat_buffer.params.items():
                param.data = flat[flat_buffer.slice_of(name)].view(param.shape)


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
