"""Next-token loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron.optimus.layers.labels import NO_LABEL


def cross_entropy_sum(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Sum over tokens of -log softmax(logits)[label], in nats and fp32 whatever the dtype of the logits.

    Positions with ``NO_LABEL`` add nothing, neither to the sum nor to any gradient.

    The sum, not the mean: only the caller knows how many tokens the global batch has.
    """
    return F.cross_entropy(logits_TV.float(), labels_T, reduction="sum", ignore_index=NO_LABEL)
