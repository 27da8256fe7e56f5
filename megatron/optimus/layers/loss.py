"""The output projection fused with the next-token loss: the logits of all tokens never exist at once.

The loss needs two numbers of each token's logits, their log-sum-exp and the logit of the label. The forward computes
them in fp32 for one chunk of tokens at a time, and with them the gradients, while the chunk's softmax exists; the
backward multiplies these by the gradient of the sum. No more than one chunk's logits are held, whatever T x V.

A z-loss (arXiv 2204.02311), coefficient times the squared log-sum-exp, keeps the log-sum-exp near 0. It changes
gradients only: the value stays the cross-entropy, by which runs are compared.

The vocabulary may be split over ranks. Then each rank has the log-sum-exp over its own rows, and the ranks exchange two
numbers per token.

Shapes: T tokens, D model width, V vocabulary rows on this rank, C tokens of a chunk, P ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.optimus import ops
from megatron.optimus.layers import NO_LABEL
from megatron.optimus.platform.device import is_rocm
from megatron.optimus.platform.process_groups import all_gather_single

DRAWS = 2**24  # a label that is to be drawn is given as a random number below this
_DRAWN_BLOCK = 256  # rows of the vocabulary whose probabilities are added up first
CHUNK_ELEMENTS = 2**27  # logits held at once in fp32: 512 MiB, large enough for efficient matrix products


class LMHead(nn.Linear):
    """Projection to the vocabulary; with labels it returns the loss instead of the logits."""

    z_loss_coeff = 0.0
    draws_labels = False  # labels are random numbers by which the model's predictions are drawn

    def forward(self, x_BSD: Tensor, labels_BS: Tensor | None = None) -> Tensor:
        """Logits [B, S, V] in x's dtype; with labels (int64 or NO_LABEL) ``linear_cross_entropy_sum`` of them."""
        if labels_BS is None:
            return F.linear(x_BSD, self.weight)
        return linear_cross_entropy_sum(
            x_BSD.flatten(0, -2),
            self.weight,
            labels_BS.flatten(),
            z_loss_coeff=self.z_loss_coeff,
            draws_labels=self.draws_labels,
        )


def linear_cross_entropy_sum(
    x_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    first_row: int = 0,
    z_loss_coeff: float = 0.0,
    draws_labels: bool = False,
) -> Tensor:
    """Sum over tokens of -log softmax(x @ weight.T)[label].

    The sum, not the mean, because only the caller knows how many tokens the global batch has. A backward with
    ``create_graph=True`` raises RuntimeError: there is no second derivative.

    Args:
        x_TD: hidden states.
        weight_VD: the vocabulary's rows on this rank.
        labels_T: int64 row numbers of the whole vocabulary, or NO_LABEL.
        group: ranks over which the vocabulary is split; all have the same x and labels.
        first_row: number of this rank's first row in the whole vocabulary.
        z_loss_coeff: weight in the gradients of the squared log-sum-exps of the tokens that have a label.
        draws_labels: the labels are random numbers from 0 to DRAWS - 1, or NO_LABEL: each token's label is drawn by its
            number from softmax(x @ weight.T).

    Returns:
        The sum in nats, fp32 scalar, the same on all ranks of the group. The gradient of x is this rank's part of the
        sum over ranks.
    """
    with_grad = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(x_TD, weight_VD, labels_T, group, first_row, with_grad, z_loss_coeff, draws_labels)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        group: dist.ProcessGroup | None,
        first_row: int,
        with_grad: bool,
        z_loss_coeff: float,
        draws_labels: bool,
    ) -> Tensor:
        dx_TD = torch.empty_like(x_TD) if with_grad and ctx.needs_input_grad[0] else None
        # fp32, because the contributions of the chunks are added up in it.
        dw_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if with_grad and ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=torch.float32, device=x_TD.device)
        elements = CHUNK_ELEMENTS * (2 if ops.keeps_16_bits(x_TD) else 1) // (4 if draws_labels else 1)
        step = max(1, elements // weight_VD.shape[0])
        for start in range(0, x_TD.shape[0], step):
            x_CD, labels_C = x_TD[start : start + step], labels_T[start : start + step]
            logits_CV = F.linear(x_CD, weight_VD)
            if draws_labels:
                labels_C = draw_labels(logits_CV, labels_C, group)
            valid_C, rows_C, columns_C = _find_labels(labels_C, first_row, weight_VD.shape[0], group is not None)
            label_logits_C = torch.where(rows_C, logits_CV.gather(1, columns_C[:, None])[:, 0].float(), 0.0)
            lse_C, label_logits_C = _over_ranks(ops.log_sum_exp(logits_CV), label_logits_C, group)
            total += torch.where(valid_C, lse_C - label_logits_C, 0.0).sum()
            if dx_TD is None and dw_VD is None:
                continue
            grad_CV = ops.cross_entropy_gradient_(logits_CV, lse_C, columns_C, rows_C, valid_C, z_loss_coeff)
            if dx_TD is not None:
                torch.mm(grad_CV, weight_VD, out=dx_TD[start : start + step])
            if dw_VD is not None:
                _add_product_(dw_VD, grad_CV.t(), x_CD)
        ctx.save_for_backward(dx_TD, dw_VD)
        ctx.dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # What is saved are gradients: a second derivative would lack all that the logits contribute.
            raise RuntimeError(
                "the fused loss has no second derivative: with create_graph=True take the loss of the logits "
                "(LMHead without labels, then torch.nn.functional.cross_entropy)"
            )
        dx_TD, dw_VD = ctx.saved_tensors
        dx_TD = None if dx_TD is None else dx_TD * grad
        if dw_VD is not None:  # rounded while it is stored, in one pass over it
            dw_VD = torch.mul(dw_VD, grad, out=torch.empty_like(dw_VD, dtype=ctx.dtype))
        return dx_TD, dw_VD, None, None, None, None, None, None


def draw_labels(logits_CV: Tensor, numbers_C: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Draws a row of the vocabulary for each token from the softmax of its logits, by inverting the distribution.

    Sums of blocks come first, then those within one block: a running sum over all rows has no deterministic kernel on a
    GPU.

    Args:
        logits_CV: of this rank's rows.
        numbers_C: int64 from 0 to DRAWS - 1, or NO_LABEL.
        group: ranks over which the vocabulary is split, in the order of their rows.

    Returns:
        int64 [C], rows of the whole vocabulary, or NO_LABEL; the same on all ranks of the group.
    """
    rows, size = logits_CV.shape[1], _DRAWN_BLOCK
    lse_C, _ = _over_ranks(ops.log_sum_exp(logits_CV), torch.zeros_like(numbers_C, dtype=torch.float32), group)
    wanted_C1 = ((numbers_C.float() + 0.5) / DRAWS)[:, None]
    p_CV = F.pad(torch.exp(logits_CV.float() - lse_C[:, None]), (0, -rows % size))
    p_CNb = p_CV.view(len(p_CV), -1, size)
    sums_CN = p_CNb.sum(dim=2)
    ends_CN = sums_CN @ torch.ones(sums_CN.shape[1], sums_CN.shape[1], device=p_CV.device).triu()
    num_ranks = 1
    if group is not None:
        num_ranks, mine = dist.get_world_size(group), ends_CN[:, -1].contiguous()
        all_PC = mine.new_empty(num_ranks, len(mine))
        all_gather_single(all_PC.view(-1), mine, group=group)
        wanted_C1 = wanted_C1 - all_PC[: dist.get_rank(group)].sum(dim=0)[:, None]
    blocks_C1 = (ends_CN <= wanted_C1).sum(dim=1, keepdim=True).clamp(max=ends_CN.shape[1] - 1)
    before_C1 = (ends_CN - sums_CN).gather(1, blocks_C1)
    within_Cb = p_CNb.gather(1, blocks_C1[:, :, None].expand(-1, 1, size))[:, 0]
    ends_Cb = before_C1 + within_Cb @ torch.ones(size, size, device=p_CV.device).triu()
    drawn_C = blocks_C1[:, 0] * size + (ends_Cb <= wanted_C1).sum(dim=1)
    drawn_C = torch.where(ends_CN[:, -1] <= wanted_C1[:, 0], rows, drawn_C).clamp(max=rows)  # on a later rank
    if group is not None:
        dist.all_reduce(drawn_C, group=group)
    return torch.where(numbers_C != NO_LABEL, drawn_C.clamp(max=num_ranks * rows - 1), NO_LABEL)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b to ``total`` (fp32). On a GPU the kernel of a 16-bit product adds it itself, without rounding it."""
    if a.is_cuda and a.element_size() == 2 and not is_rocm():
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def _find_labels(labels_C: Tensor, first_row: int, num_rows: int, is_split: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens have a label, which of these have its row on this rank, and that row (0 elsewhere): [C] each."""
    valid_C = labels_C != NO_LABEL
    columns_C = labels_C - first_row
    # A whole vocabulary has every label: one beyond it must fail, not be treated as another rank's.
    here_C = valid_C & (columns_C >= 0) & (columns_C < num_rows) if is_split else valid_C
    return valid_C, here_C, torch.where(here_C, columns_C, 0)


def _over_ranks(lse_C: Tensor, label_logits_C: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over the rows of all ranks, and the label's logit from the rank that has its row."""
    if group is None:
        return lse_C, label_logits_C
    mine = torch.stack((lse_C, label_logits_C))
    all_P2C = mine.new_empty(dist.get_world_size(group), *mine.shape)
    all_gather_single(all_P2C.view(-1, mine.shape[1]), mine, group=group)
    return torch.logsumexp(all_P2C[:, 0], dim=0), all_P2C[:, 1].sum(dim=0)
