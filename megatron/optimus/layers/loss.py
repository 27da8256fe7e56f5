"""Next-token loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def cross_entropy_sum(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Sum over tokens of -log softmax(logits)[label], in nats and fp32 whatever the dtype of the logits.

    The sum, not the mean: only the caller knows how many tokens the global batch has.
    """
    return F.cross_entropy(logits_TV.float(), labels_T, reduction="sum")
