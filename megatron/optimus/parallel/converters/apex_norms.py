"""The converter of ``--norm-backend apex``: the decoder's norms become apex's FusedRMSNorm and FusedLayerNorm.

Parameters keep their names. Norms of queries and keys stay ours, because tensor parallelism splits them.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron.optimus.config.values import ConfigError
from megatron.optimus.layers.norm import NonparametricLayerNorm, RMSNorm
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.platform.older_stacks import apex_class


def convert(model: Decoder) -> None:
    """Replaces the norms before attention, before the MLP and after the last layer.

    Raises:
        ConfigError: apex is absent, or was built without its CUDA extension.
    """
    for parent in (model, *model.layers):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, (RMSNorm, NonparametricLayerNorm)):
                setattr(parent, name, _fused(norm))


def _fused(norm: RMSNorm | NonparametricLayerNorm) -> nn.Module:
    try:
        with torch.device("meta"):
            if isinstance(norm, NonparametricLayerNorm):
                kind = apex_class("normalization", "FusedLayerNorm")
                return kind(norm.width, eps=norm.eps, elementwise_affine=False)
            fused = apex_class("normalization", "FusedRMSNorm")(norm.weight.shape[0], eps=norm.eps)
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"norm_backend=apex: {error}; leave it out for the norms of Optimus") from error
    fused.weight = norm.weight
    return fused
