"""What is kept of a layer's activations for the backward, and where.

Selective recomputation (bits 1, 2 and 4 of arXiv 2604.00785): the experts, attention, the norms. A part is wrapped
inside its own communication: what enters a tensor-parallel region or comes from other ranks' tokens is kept, routers
stay outside, and collectives inside a part (context parallelism, norms over split heads) keep their results
(``recorded`` in collectives.py). So nothing is communicated or routed twice, and ranks need not recompute in the same
order.

Offloading: what the first layers keep waits in host memory. Copies run in the stream of the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megatron.optimus.config.schema import ParallelConfig, Recompute
from megatron.optimus.models.decoder import Block
from megatron.optimus.platform.collectives import recorded

MIN_OFFLOADED_BYTES = 2**16  # smaller tensors cost more to move than they free


def apply_recomputation(stages: Sequence[Sequence[nn.Module]], config: ParallelConfig) -> None:
    """Makes the chosen parts of the first ``recompute_num_layers`` layers (None: all) of each stage recompute."""
    for block in (block for layers in stages for block in layers[: config.recompute_num_layers]):
        assert isinstance(block, Block)
        for module in _parts(block, set(config.recompute_modules)):
            module.forward = recompute_forward(module.forward)  # type: ignore[method-assign]  # hooks stay outside


def _parts(block: Block, chosen: set[Recompute]) -> list[nn.Module]:
    parts: list[nn.Module] = []
    if Recompute.MOE in chosen and block.is_moe:
        parts.append(block.moe.experts)
        if block.moe.shared_experts is not None:
            parts.append(block.moe.shared_experts.mlp)
    elif Recompute.MOE in chosen:
        parts.append(block.mlp)
    if Recompute.ATTENTION in chosen:
        parts.append(block.attention)
    if Recompute.NORM in chosen:
        parts += [block.attention_norm, block.mlp_norm]
        if Recompute.ATTENTION not in chosen:
            parts += [block.attention.q_norm, block.attention.k_norm]
    return [part for part in parts if not isinstance(part, nn.Identity)]


def recompute_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        # No part draws random numbers, so there is no generator state to restore.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=recorded)

    return run


def apply_offloading(stages: Sequence[Sequence[nn.Module]], config: ParallelConfig) -> None:
    """Lets the first ``cpu_offloading_num_layers`` layers of each stage keep their activations in host memory."""
    for block in (block for layers in stages for block in layers[: config.cpu_offloading_num_layers]):
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
    """Tensors kept for the backward, in host memory; one that several operations keep is copied once."""

    def __init__(self, weights: set[int]) -> None:
        self._weights = weights
        self._copies: dict[tuple[Any, ...], tuple[StorageWeakRef, Tensor]] = {}

    def pack(self, x: Tensor) -> tuple[torch.device, Tensor]:
        storage = x.untyped_storage()
        if storage.data_ptr() in self._weights or x.numel() * x.element_size() < MIN_OFFLOADED_BYTES:
            return x.device, x
        key = (storage.data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype, x._version)
        source, copy = self._copies.get(key, (None, None))
        if source is None or copy is None or source.expired():  # expired: other data lies at that address now
            copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type != "cpu")
            copy.copy_(x, non_blocking=True)
            self._copies[key] = StorageWeakRef(storage), copy
        return x.device, copy

    def unpack(self, packed: tuple[torch.device, Tensor]) -> Tensor:
        device, copy = packed
        return copy.to(device, non_blocking=True)
