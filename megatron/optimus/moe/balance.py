"""What keeps experts evenly used: load-balancing loss, router z-loss, and the bias of aux-loss-free balancing.

Shapes: T tokens, E experts. Counts are slots per expert; with top-K routing they sum to T*K.
"""

from __future__ import annotations

import torch
from torch import Tensor


def load_balancing_loss(scores_TE: Tensor, counts_E: Tensor, num_tokens: Tensor | int) -> Tensor:
    """E * sum_e f_e * P_e (arXiv 2101.03961, the scale of Hugging Face's OLMoE: K when perfectly balanced).

    f_e = counts_E / num_tokens is the share of tokens that chose e, taken as a constant; ``counts_E`` and
    ``num_tokens`` may describe more tokens than ``scores_TE`` (the whole global batch). P_e is the mean score of e over
    the T tokens at hand; scores that do not sum to one (sigmoid) are normalised per token first.
    """
    share_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
    fraction_E = counts_E.to(scores_TE.dtype) / num_tokens
    return scores_TE.shape[-1] * torch.dot(fraction_E, share_TE.mean(dim=0))


def router_z_loss(logits_TE: Tensor) -> Tensor:
    """mean over tokens of logsumexp(logits)^2 (arXiv 2202.08906): keeps router logits small."""
    return torch.logsumexp(logits_TE, dim=-1).square().mean()


def updated_expert_bias(bias_E: Tensor, counts_E: Tensor, rate: float | Tensor) -> Tensor:
    """One step of aux-loss-free balancing (arXiv 2408.15664): the bias of underused experts rises, others' falls."""
    load_E = counts_E.to(bias_E.dtype)
    return bias_E + rate * torch.sign(load_E.mean() - load_E)


def mean_entropy(scores_TE: Tensor) -> Tensor:
    """Mean over tokens of the entropy of the router's distribution, in nats; ln(E) is indifference, 0 certainty."""
    share_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
    return torch.special.entr(share_TE).sum(dim=-1).mean()
