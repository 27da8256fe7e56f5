"""Tensor parallelism: attention heads, MLP columns and vocabulary rows are split over the ranks of a group.

Attention and MLP begin with column-parallel projections (heads, inner width) and end with a row-parallel one, whose
results are partial sums (arXiv 1909.08053). With sequence parallelism (arXiv 2205.05198) the tokens outside such
regions are split too: entering a region gathers them, leaving it reduce-scatters them. That moves as many bytes as the
one all-reduce it replaces, and norms, residuals, routers and experts work on 1/t of the tokens. The tokens of a
micro-batch are split as one row of B*S tokens, so no copy is needed; between regions tensors are [1, T/t, D].

Gradients: every rank of the group computes the same loss. The part of a split parameter gets its whole gradient on its
rank. A parameter that every rank has whole but applies to its own tokens, or own heads, gets a partial gradient; it is
marked ``sequence_parallel`` as in Megatron, and ``register_gradient_sums`` sums these over ranks. The auxiliary losses
of a router are means over its rank's tokens, so each rank's weighs 1/t.

Shapes: B sequences, S positions, T = B*S tokens, D model width, V vocabulary rows, t ranks of the group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.optimus.config.family import ParameterSpec, family_of
from megatron.optimus.config.schema import ParallelConfig
from megatron.optimus.layers.attention import Attention
from megatron.optimus.layers.loss import linear_cross_entropy_sum
from megatron.optimus.layers.mlp import MLP
from megatron.optimus.layers.norm import RMSNorm
from megatron.optimus.models.decoder import Block, Decoder
from megatron.optimus.models.partition import split_parameter
from megatron.optimus.moe.router import Router, RouterLosses
from megatron.optimus.ops import Routing
from megatron.optimus.platform.collectives import (
    all_gather_blocks,
    all_gather_rows,
    all_gather_without_grad,
    compute_once,
    copy_to_ranks,
    gather_columns,
    is_recording,
    is_replaying,
    reduce_scatter_rows,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    start_ring_shift,
    sum_over_ranks,
    sum_over_ranks_both_ways,
)
from megatron.optimus.platform.mesh import Mesh


@dataclass
class TensorGroup:
    """A tensor-parallel group as its rank ``index`` sees it: how tokens enter and leave its regions.

    Attributes:
        group: the ranks that share a layer's matrices.
        index: this rank's index in the group.
        size: ranks of the group.
        sequence_parallel: whether tokens outside the regions are split over the ranks.
        overlap: with sequence parallelism, tokens travel in blocks while other blocks are multiplied.
    """

    group: dist.ProcessGroup
    index: int
    size: int
    sequence_parallel: bool
    overlap: bool = False

    def enter(self, x: Tensor) -> Tensor:
        """Gathers all tokens [1, T, D] from this rank's [1, T/t, D]; without sequence parallelism x has them all."""
        if not self.sequence_parallel:
            return copy_to_ranks(x, self.group)
        return all_gather_rows(x.flatten(0, 1), self.group).unsqueeze(0)

    def column_parallel(self, x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """Enters a region and applies its first layers, of which this rank has some columns of the output.

        Args:
            x: this rank's tokens [1, T/t, D], or all of them [B, S, D] without sequence parallelism.
            layers: this rank's parts.

        Returns:
            For each layer its output for all tokens, [1, T, D_out / t] or [B, S, D_out / t].
        """
        products = _ColumnParallelLinear.apply(x, self, *(layer.weight for layer in layers))
        return tuple(y if layer.bias is None else y + layer.bias for y, layer in zip(products, layers, strict=True))

    def overlapped_row_parallel(self, x: Tensor, layer: nn.Linear) -> Tensor:
        """Applies a region's last layer, of which this rank has some columns of the input, and leaves the region.

        Args:
            x: all tokens [1, T, D_in / t].
            layer: this rank's part.

        Returns:
            This rank's tokens of the sum over ranks, [1, T/t, D].
        """
        if not self.overlap:  # as ``whole_tokens`` has it
            return self.leave(F.linear(x, layer.weight))
        return _OverlappedRowParallelLinear.apply(x, layer.weight, self)

    def leave(self, x: Tensor) -> Tensor:
        """Sums partial results [B, S, D] over ranks: this rank's tokens [1, T/t, D] of the sum, or all of it."""
        if not self.sequence_parallel:
            return sum_over_ranks(x, self.group)
        return reduce_scatter_rows(x.flatten(0, 1), self.group).unsqueeze(0)

    def split(self, module: nn.Module, dim: int, name: str = "weight") -> None:
        """Replaces a parameter of the module by this rank's part along ``dim``."""
        setattr(module, name, split_parameter(getattr(module, name), dim, self.index, self.size))


class _ColumnParallelLinear(torch.autograd.Function):
    """``enter`` and several column-parallel projections in one function, which overlaps communication.

    In the backward the sum of the input gradients over ranks is under way while the weight gradients are computed. With
    sequence parallelism only this rank's tokens are saved and gathered again while the input gradients are computed,
    unless recomputation keeps the gathered ones anyway.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorGroup, *weights: Tensor) -> tuple[Tensor, ...]:
        all_TD = x.flatten(0, 1)
        if ranks.overlap:
            all_TD, outputs = _blockwise_products(all_TD, weights, ranks)
        else:
            if ranks.sequence_parallel:
                all_TD = compute_once(all_gather_without_grad, all_TD, ranks.group)
            outputs = [F.linear(all_TD, weight) for weight in weights]
        ctx.ranks, ctx.shape = ranks, x.shape
        ctx.gathers = ranks.sequence_parallel and not is_recording()
        ctx.save_for_backward(x.flatten(0, 1) if ctx.gathers else all_TD, *weights)
        shape = (1, len(all_TD)) if ranks.sequence_parallel else x.shape[:-1]
        return tuple(output.view(*shape, -1) for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, *weights = ctx.saved_tensors
        ranks: TensorGroup = ctx.ranks
        gathering = start_all_gather(x_TD, ranks.group) if ctx.gathers else None
        grads_TW = [grad.flatten(0, 1) for grad in grads]
        dx_TD = grads_TW[0] @ weights[0]
        for grad_TW, weight in zip(grads_TW[1:], weights[1:], strict=True):
            dx_TD.addmm_(grad_TW, weight)
        all_TD = x_TD if gathering is None else gathering.wait()
        start = start_reduce_scatter if ranks.sequence_parallel else start_all_reduce
        summing = start(dx_TD, ranks.group)
        dweights = [
            grad_TW.t() @ all_TD if wanted else None
            for grad_TW, wanted in zip(grads_TW, ctx.needs_input_grad[2:], strict=True)
        ]
        return summing.wait().view(ctx.shape), None, *dweights


def _blockwise_products(x_TD: Tensor, weights: Sequence[Tensor], ranks: TensorGroup) -> tuple[Tensor, list[Tensor]]:
    """Multiplies each rank's block of rows when it arrives.

    Returns:
        All ranks' rows [t * T, D], and for each weight their products [t * T, D_out]. Without recomputation nobody
        reads the rows, and this rank's own are not written.
    """
    replayed = is_replaying()
    all_TD = compute_once(lambda: all_TD) if replayed else x_TD.new_empty(ranks.size * len(x_TD), x_TD.shape[1])
    outputs = [x_TD.new_empty(len(all_TD), len(weight)) for weight in weights]
    # Recomputation multiplies the same blocks, so that it gives the same bits.
    blocks = (
        enumerate(all_TD.chunk(ranks.size)) if replayed else all_gather_blocks(x_TD.contiguous(), all_TD, ranks.group)
    )
    for index, rows in blocks:
        for output, weight in zip(outputs, weights, strict=True):
            torch.mm(rows, weight.t(), out=output.chunk(ranks.size)[index])
    if is_recording() and not replayed:
        all_TD.chunk(ranks.size)[ranks.index].copy_(x_TD)
        all_TD = compute_once(lambda: all_TD)
    return all_TD, outputs


class _OverlappedRowParallelLinear(torch.autograd.Function):
    """A row-parallel projection and ``leave`` with sequence parallelism: [B, S, W / t] -> [1, T / t, D].

    Each rank multiplies the other ranks' tokens first and sends one block while it multiplies the next, its own last.
    In the backward blocks of gradients travel while others are multiplied, its own first. The partial results of a
    token are summed in fp32 in the order of ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_DW: Tensor, ranks: TensorGroup) -> Tensor:
        ctx.ranks, ctx.shape = ranks, x.shape
        x_TW = x.flatten(0, 1)
        ctx.save_for_backward(x_TW, weight_DW)
        rows = len(x_TW) // ranks.size
        if is_replaying():  # the result leaves the recomputed module, so nothing reads it a second time
            return x.new_empty(1, rows, len(weight_DW))
        blocks, parts = x_TW.chunk(ranks.size), x.new_empty(ranks.size, rows, len(weight_DW))
        arriving = []
        for step in range(1, ranks.size):
            product = blocks[(ranks.index + step) % ranks.size] @ weight_DW.t()
            source = (ranks.index - step) % ranks.size
            arriving.append(start_ring_shift(product, parts[source], step, ranks.group))
        torch.mm(blocks[ranks.index], weight_DW.t(), out=parts[ranks.index])
        for started in arriving:
            started.wait()
        return parts.sum(dim=0, keepdim=True)  # fp32 inside, whatever the dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x_TW, weight_DW = ctx.saved_tensors
        ranks: TensorGroup = ctx.ranks
        grad_RD = grads[0].flatten(0, 1).contiguous()
        all_TD = grad_RD.new_empty(len(x_TW), grad_RD.shape[1])
        dx_TW = torch.empty_like(x_TW)
        for index, rows in all_gather_blocks(grad_RD, all_TD, ranks.group):
            torch.mm(rows, weight_DW, out=dx_TW.chunk(ranks.size)[index])
        all_TD.chunk(ranks.size)[ranks.index].copy_(grad_RD)
        dweight = all_TD.t() @ x_TW if ctx.needs_input_grad[1] else None
        return dx_TW.view(ctx.shape), dweight, None


class TensorParallelRMSNorm(nn.Module):
    """RMSNorm over a width that is split over ranks, with the mean of squares of the whole width."""

    def __init__(self, norm: RMSNorm, ranks: TensorGroup) -> None:
        super().__init__()
        self.width, self.eps = norm.weight.shape[0], norm.eps
        self.weight = norm.weight
        ranks.split(self, 0)
        self.group = ranks.group

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes this rank's columns of x in fp32. Collective over the group."""
        x32 = x.float()
        mean = sum_over_ranks_both_ways(x32.square().sum(dim=-1, keepdim=True), self.group) / self.width
        return (x32 * torch.rsqrt(mean + self.eps) * self.weight.float()).to(x.dtype)


class VocabParallelEmbedding(nn.Module):
    """Embedding of which each rank has some rows of the vocabulary."""

    def __init__(self, weight_VD: Tensor, ranks: TensorGroup) -> None:
        super().__init__()
        self.weight = weight_VD
        self.ranks = ranks

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Looks up tokens [B, S], each on the rank that has its row; sums over ranks as ``TensorGroup.leave``."""
        rows = self.weight.shape[0]
        local_BS = tokens_BS - self.ranks.index * rows
        elsewhere_BS = (local_BS < 0) | (local_BS >= rows)
        x_BSD = F.embedding(local_BS.masked_fill(elsewhere_BS, 0), self.weight)
        return self.ranks.leave(x_BSD.masked_fill(elsewhere_BS[..., None], 0.0))


class VocabParallelLMHead(nn.Module):
    """Output projection and loss of which each rank has some rows of the vocabulary (layers/loss.py)."""

    def __init__(self, weight_VD: Tensor, ranks: TensorGroup, z_loss_coeff: float) -> None:
        super().__init__()
        self.weight = weight_VD
        self.ranks = ranks
        self.z_loss_coeff = z_loss_coeff
        self.draws_labels = False

    def forward(self, x_BSD: Tensor, labels_BS: Tensor | None = None) -> Tensor:
        """The loss; without labels the logits [T, V] of all tokens over the whole vocabulary, on every rank."""
        x_TD = self.ranks.enter(x_BSD).flatten(0, 1)
        if labels_BS is None:
            return gather_columns(F.linear(x_TD, self.weight), self.ranks.group)
        first_row = self.ranks.index * self.weight.shape[0]
        labels_T, group = labels_BS.flatten(), self.ranks.group
        return linear_cross_entropy_sum(
            x_TD,
            self.weight,
            labels_T,
            group=group,
            first_row=first_row,
            z_loss_coeff=self.z_loss_coeff,
            draws_labels=self.draws_labels,
        )


def apply_tensor_parallelism(model: Decoder, config: ParallelConfig, mesh: Mesh) -> None:
    """Splits all but the routed experts. config/checks.py refuses sizes that do not divide."""
    group = mesh.group("tp")
    if group is None:
        return
    ranks = TensorGroup(group, mesh.index("tp"), mesh.size("tp"), config.sequence_parallel, config.tp_comm_overlap)
    is_tied = model.lm_head.weight is model.embedding.weight
    ranks.split(model.embedding, 0)
    if not is_tied:
        ranks.split(model.lm_head, 0)
    head_weight = model.embedding.weight if is_tied else model.lm_head.weight
    model.embedding = VocabParallelEmbedding(model.embedding.weight, ranks)  # type: ignore[assignment]
    model.lm_head = VocabParallelLMHead(head_weight, ranks, model.lm_head.z_loss_coeff)  # type: ignore[assignment]
    for block in model.layers:
        assert isinstance(block, Block)
        _split_attention(block.attention, family_of(model.config).attention_parameters(model.config), ranks)
        if not block.is_moe:
            _split_mlp(block.mlp, ranks)
        elif block.moe.shared_experts is not None:
            _split_mlp(block.moe.shared_experts.mlp, ranks)
    if config.sequence_parallel:
        for name, parameter in model.named_parameters():
            if not hasattr(parameter, "tensor_model_parallel") and ".experts." not in name:
                parameter.sequence_parallel = True  # type: ignore[attr-defined]
        for layer in model.moe_layers():
            layer.router.register_forward_hook(_scale_loss_gradients(1 / ranks.size))


@contextlib.contextmanager
def whole_tokens(model: Decoder) -> Iterator[None]:
    """Gives every rank of a model with sequence parallelism all tokens, for forwards without a backward.

    The steps of a generation have single tokens, which cannot be split.

    Args:
        model: this rank's part, after ``parallelize``.
    """
    if not isinstance(model.embedding, VocabParallelEmbedding):
        yield
        return
    ranks = model.embedding.ranks
    before = ranks.sequence_parallel, ranks.overlap
    ranks.sequence_parallel = ranks.overlap = False
    try:
        yield
    finally:
        ranks.sequence_parallel, ranks.overlap = before


def register_gradient_sums(model: Decoder, mesh: Mesh) -> None:
    """Registers hooks that sum the partial gradients of ``sequence_parallel`` parameters over the group.

    To be called when the weights exist: hooks do not survive their materialisation.

    Args:
        model: this rank's part, after ``parallelize``.
        mesh: this rank's groups.
    """
    group = mesh.group("tp")
    for parameter in model.parameters():
        if group is not None and getattr(parameter, "sequence_parallel", False):
            parameter.register_hook(_summed_over(group))


def _split_attention(attention: Attention, specs: Mapping[str, ParameterSpec], ranks: TensorGroup) -> None:
    """Splits an attention as its family declares, and marks what every rank has whole and applies to its own heads."""
    for name, spec in specs.items():
        path, _, leaf = name.rpartition(".")
        module = attention.get_submodule(path)
        if spec.split_dim is None:
            getattr(module, leaf).sequence_parallel = True
        elif isinstance(module, RMSNorm):
            parent, _, child = path.rpartition(".")
            setattr(attention.get_submodule(parent), child, TensorParallelRMSNorm(module, ranks))
        else:
            ranks.split(module, spec.split_dim, leaf)
    _enclose_in_region(attention, ranks)


def _split_mlp(mlp: MLP, ranks: TensorGroup) -> None:
    for projection, dim in ((mlp.gate_proj, 0), (mlp.up_proj, 0), (mlp.down_proj, 1)):
        ranks.split(projection, dim)
    _enclose_in_region(mlp, ranks)


def _enclose_in_region(module: Attention | MLP, ranks: TensorGroup) -> None:
    """Makes tokens enter a region with this module's first projections and leave it after its last."""

    def leave(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return ranks.leave(output)

    module.project_in = ranks.column_parallel
    if ranks.overlap:
        module.project_out = ranks.overlapped_row_parallel
    else:
        module.register_forward_hook(leave)


def _scale_loss_gradients(weight: float) -> Callable[[Router, Any, tuple[Routing, RouterLosses]], None]:
    """Scales the gradients of a router's losses; their values stay means over this rank's tokens."""

    def hook(router: nn.Module, args: Any, output: tuple[Routing, RouterLosses]) -> None:
        for loss in (output[1].aux_loss, output[1].z_loss):
            if loss.requires_grad:
                loss.register_hook(lambda grad: grad * weight)

    return hook


def _summed_over(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def hook(grad: Tensor) -> Tensor:
        total = grad.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.to(grad.dtype)

    return hook
