"""What a user may choose about the sharded optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed_ext.zero.loss_scale import LossScaleOptions

_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Large enough for full bandwidth (256 MiB of fp32 gradients), small enough that little is left after backward.
DEFAULT_BUCKET_NUMEL = 1 << 26


@dataclass(frozen=True)
class ZeroOptions:
    """Every rank must hold the same values.

    ``stage``: 1 keeps full-size gradients and reduces them once a step; 2 reduces every micro-batch into a shard and
    holds full-size gradients of a few buckets only. ``bucket_numel``: elements per bucket. ``grad_dtype``: in which
    gradients are accumulated; ``comm_dtype``: in which they travel (None: grad_dtype). ``overlap_comm``: reduce while
    backward runs. ``overlap_param_gather``: step() returns before other ranks' new parameters are here; forward waits
    for them module by module. ``max_norm``: clip to this gradient norm, 0 never, after ``clip_after_steps`` applied
    steps. ``average``: divide gradients by the number of data-parallel ranks. ``reduce_each_micro_batch``: stage 1 sums
    in stage 2's order (ranks first, then micro-batches), which makes the two bitwise equal. ``loss_scale``: of fp16
    training, None for no scaling.
    """

    stage: int = 1
    bucket_numel: int = DEFAULT_BUCKET_NUMEL
    grad_dtype: torch.dtype = torch.float32
    comm_dtype: torch.dtype | None = None
    overlap_comm: bool = True
    overlap_param_gather: bool = False
    max_norm: float = 0.0
    clip_after_steps: int = 0
    average: bool = True
    reduce_each_micro_batch: bool = False
    loss_scale: LossScaleOptions | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a value outside its range."""
        if self.stage not in (1, 2):
            raise ValueError(f"stage={self.stage} is not ours; use 1 or 2")
        if self.bucket_numel < 1:
            raise ValueError(f"reduce_bucket_size={self.bucket_numel} must be at least 1 element")
        for name, dtype in (("grad_accum_dtype", self.grad_dtype), ("communication_data_type", self.comm_dtype)):
            if dtype not in (None, *_GRAD_DTYPES):
                raise ValueError(f"{name}={dtype} is not supported; use fp32, bf16 or fp16")
        if self.max_norm < 0 or self.clip_after_steps < 0:
            raise ValueError(
                f"gradient_clipping={self.max_norm} and clip_after_steps={self.clip_after_steps} must not be negative"
            )

    @property
    def communication_dtype(self) -> torch.dtype:
        """The dtype of gradients on the wire."""
        return self.comm_dtype or self.grad_dtype

    @property
    def shard_dtype(self) -> torch.dtype:
        """The dtype of reduced gradients: that of both, fp32 where they differ."""
        return self.grad_dtype if self.grad_dtype == self.communication_dtype else torch.float32

    @property
    def reduces_each_backward(self) -> bool:
        """Whether every micro-batch is reduced, not the last one only."""
        return self.stage == 2 or self.reduce_each_micro_batch
