"""Options of the sharded optimizer and of the fp16 loss scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Dtypes of gradients and of their reduction. Another one also needs a name in ds_config._DTYPES and a collective
# backend that reduces it; the update kernels (optimizers/kernels) convert every gradient to fp32.
_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Large enough for full bandwidth (256 MiB of fp32 gradients), small enough that little is left after backward.
DEFAULT_BUCKET_NUMEL = 1 << 26


@dataclass(frozen=True)
class LossScaleOptions:
    """The loss scale of fp16 training. All but ``initial`` and ``is_dynamic`` apply to a dynamic scale only.

    Attributes:
        initial: the first scale.
        is_dynamic: whether overflows change it.
        window: steps without overflow after which the scale doubles.
        hysteresis: number of the overflow that first halves the scale; later ones do too. A doubling resets the count.
        refills_hysteresis: every step without overflow resets that count.
        minimum: the smallest scale.

    Raises:
        ValueError: a value is out of range.
    """

    initial: float = 2.0**16
    is_dynamic: bool = True
    window: int = 1000
    hysteresis: int = 2
    refills_hysteresis: bool = False
    minimum: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.initial < float("inf") or not 0 < self.minimum < float("inf"):
            raise ValueError(f"loss scale {self.initial} and min_loss_scale {self.minimum} must be positive and finite")
        if self.window < 1 or self.hysteresis < 1:
            raise ValueError(
                f"loss_scale_window={self.window} and hysteresis={self.hysteresis} must be at least 1; "
                "hysteresis=1 lowers the scale at every overflow"
            )


@dataclass(frozen=True)
class ZeroOptions:
    """The sharded optimizer's options, of which every rank must hold the same values.

    Attributes:
        stage: 1 keeps full-size gradients and reduces them once a step; 2 reduces every micro-batch into a shard and
            holds full-size gradients of a few buckets only.
        bucket_numel: elements of a bucket.
        grad_dtype: dtype in which this rank accumulates gradients.
        comm_dtype: dtype of the buffers that are reduce-scattered; None: ``grad_dtype``.
        overlap_comm: reduce buckets while backward runs.
        overlap_param_gather: ``step()`` returns before other ranks' new parameters have arrived; forward waits for them
            module by module. On one GPU alone with an element-wise optimizer the updates themselves run beside the
            forward, on a stream of their own (update_stream.py).
        max_norm: clip to this gradient norm; 0: never.
        clip_after_steps: number of applied steps before clipping begins.
        check_grad_overflow: skip steps whose gradient norm is not finite; False takes them, as DeepSpeed's
            ``bf16.check_grad_overflow`` says, and what is not finite goes into the weights.
        average: divide gradients by the number of data-parallel ranks.
        reduce_each_micro_batch: stage 1 sums in stage 2's order (ranks first, then micro-batches), which makes the two
            bitwise equal.
        measure_gradient_noise: estimate the gradient's noise in every step (gradient_noise.py).
        loss_scale: of fp16 training; None: no scaling.

    Raises:
        ValueError: a value is out of range.
    """

    stage: int = 1
    bucket_numel: int = DEFAULT_BUCKET_NUMEL
    grad_dtype: torch.dtype = torch.float32
    comm_dtype: torch.dtype | None = None
    overlap_comm: bool = True
    overlap_param_gather: bool = False
    max_norm: float = 0.0
    clip_after_steps: int = 0
    check_grad_overflow: bool = True
    average: bool = True
    reduce_each_micro_batch: bool = False
    measure_gradient_noise: bool = False
    loss_scale: LossScaleOptions | None = None

    def __post_init__(self) -> None:
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
        """The dtype in which gradients travel."""
        return self.comm_dtype or self.grad_dtype

    @property
    def shard_dtype(self) -> torch.dtype:
        """The dtype of reduced gradients: ``grad_dtype`` if it equals the communication dtype, else fp32."""
        return self.grad_dtype if self.grad_dtype == self.communication_dtype else torch.float32

    @property
    def reduces_each_backward(self) -> bool:
        """Whether every micro-batch is reduced, not the last one only."""
        return self.stage == 2 or self.reduce_each_micro_batch
