"""Activation recomputation and offloading of activations to host memory.

Selective recomputation (bits 1, 2 and 4 of arXiv 2604.00785) covers the experts, attention and the norms. A module is
recomputed inside its communication: the input of a tensor-parallel region and tokens from other ranks are kept, routers
are not recomputed, and collectives inside a module (context parallelism, norms over split heads) keep their results
(``recording_contexts`` in platform/collectives.py). So nothing is communicated or routed twice, and ranks need not
recompute in the same order.

Offloading keeps the saved activations of the first layers in host memory. Copies run in the stream of the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from megatron.optimus.config.schema import ConfigError, ParallelConfig, Recompute
from megatron.optimus.models.decoder import Block
from megatron.optimus.platform.collectives import recording_contexts
from megatron.optimus.platform.device import pins_memory

MIN_OFFLOADED_BYTES = 2**16  # smaller tensors cost more to move than they free


def apply_recomputation(stages: Sequence[Sequence[nn.Module]], config: ParallelConfig) -> None:
    """Recomputes ``recompute_modules`` in the first ``recompute_num_layers`` layers (None: all) of each stage.

    Args:
        stages: the layers of each pipeline stage of this rank.
        config: the options named above.
    """
    for block in (block for layers in stages for block in layers[: config.recompute_num_layers]):
        assert isinstance(block, Block)
        for module in _chosen_modules(block, set(config.recompute_modules)):
            module.forward = recompute_forward(module.forward)  # type: ignore[method-assign]  # hooks stay outside


def _chosen_modules(block: Block, chosen: set[Recompute]) -> list[nn.Module]:
    modules: list[nn.Module] = []
    if Recompute.MOE in chosen and block.is_moe:
        modules.append(block.moe.experts)
        if block.moe.shared_experts is not None:
            modules.append(block.moe.shared_experts.mlp)
    elif Recompute.MOE in chosen:
        modules.append(block.mlp)
    if Recompute.ATTENTION in chosen:
        modules.append(block.attention)
    if Recompute.NORM in chosen:
        modules += [block.attention_norm, block.mlp_norm]
        if Recompute.ATTENTION not in chosen:
            modules += [block.attention.q_norm, block.attention.k_norm]
    return [module for module in modules if not isinstance(module, nn.Identity)]


def recompute_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A module's forward that saves its inputs alone and runs again in the backward."""

    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        # No module draws random numbers, so there is no generator state to restore.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=recording_contexts)

    return run


def apply_offloading(stages: Sequence[Sequence[nn.Module]], config: ParallelConfig) -> None:
    """Keeps the activations of the first ``cpu_offloading_num_layers`` layers of each stage in host memory.

    Args:
        stages: the layers of each pipeline stage of this rank.
        config: the option named above.

    Raises:
        ConfigError: with tensor parallelism on a torch before 2.10. On 2.8 its gradients were wrong there (relative
            error of 1e-3 at the second step, cause not known).
    """
    tp, count = config.tensor_model_parallel_size, config.cpu_offloading_num_layers
    if count and tp > 1 and TorchVersion(torch.__version__) < "2.10":
        raise ConfigError(
            f"cpu_offloading_num_layers={count} with tensor_model_parallel_size={tp} needs torch 2.10, this is "
            f"{torch.__version__}; use 0, or --recompute-modules"
        )
    for block in (block for layers in stages for block in layers[:count]):
        block.forward = _offloaded(block)  # type: ignore[method-assign]


def _offloaded(block: nn.Module) -> Callable[..., Any]:
    forward = block.forward

    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
        host = _HostCopies(weights)
        with saved_tensors_hooks(host.pack, host.unpack):
            return forward(*args)

    return run


class _HostCopies:
    """Copies in host memory of tensors saved for the backward; one that several operations save is copied once."""

    def __init__(self, weights: set[int]) -> None:
        self._weights = weights
        self._copies: dict[tuple[Any, ...], tuple[StorageWeakRef, Tensor]] = {}

    def pack(self, x: Tensor) -> tuple[torch.device, Tensor]:
        storage = x.untyped_storage()
        if storage.data_ptr() in self._weights or x.numel() * x.element_size() < MIN_OFFLOADED_BYTES:
            return x.device, x
        key = (storage.data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype, x._version)
        source, copy = self._copies.get(key, (None, None))
        if source is None or copy is None or source.expired():  # expired: other data is at that address now
            copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=pins_memory(x.device))
            copy.copy_(x, non_blocking=pins_memory(x.device))
            self._copies[key] = StorageWeakRef(storage), copy
        return x.device, copy

    def unpack(self, packed: tuple[torch.device, Tensor]) -> Tensor:
        device, copy = packed
        return copy.to(device, non_blocking=pins_memory(device))
