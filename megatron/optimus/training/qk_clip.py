"""QK-clip, the second half of MuonClip (arXiv 2507.20534): bounds attention logits by the weights that make them.

A logit is the scaled product of a query and a key that the query sees. Of a head whose largest logit S of a step
exceeds the threshold T, the rows of the query and the key projection are multiplied by sqrt(T / S) each after the
update, so that the same tokens would give T. Key heads that several query heads share get the root of their smallest
factor, and each query head what is left of its own: heads below the threshold compute what they did before.

The kernels of attention do not give their largest score, and the log-sum-exp that some give is above it by up to the
logarithm of the number of keys. So it is computed: a second product of queries and keys (ops/attention_logits.py), in
the steps that ``qk_clip_interval`` chooses.

Shapes: B sequences, Q queries of this rank, K keys, H query heads and G key heads of this rank, L layers, d head width.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.optimus.context import RunContext
from megatron.optimus.layers.attention import Attention, CoreAttention
from megatron.optimus.layers.documents import Documents
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.ops import largest_logits
from megatron.optimus.parallel.context import own_positions
from megatron.optimus.platform.collectives import all_gather_without_grad, is_replaying
from megatron.optimus.platform.metrics import Recorder
from megatron.optimus.training.engine import Engine


class _MeasuredAttention:
    """An attention's ``core_attention`` that also notes the largest logits while a step is measured."""

    def __init__(self, core_attention: CoreAttention, clip: QKClip, layer: int) -> None:
        self.core_attention, self.clip, self.layer = core_attention, clip, layer

    def __call__(self, q_BHSd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, documents: Documents | None) -> Tensor:
        if self.clip.is_measuring and not is_replaying():
            self.clip.measure(self.layer, q_BHSd, k_BGSd, documents)
        return self.core_attention(q_BHSd, k_BGSd, v_BGSd, documents)


class QKClip:
    """Measures the logits of this rank's heads in a step, and has its update scale the heads above the threshold."""

    def __init__(self, run: RunContext, model: Decoder, engine: Engine) -> None:
        """Puts the measurement into the model's layers. The engine must have been built with the model."""
        self.run, self.engine = run, engine
        self.options = run.config.optimizer
        self.attentions = [module for module in model.modules() if isinstance(module, Attention)]
        model_config, tp = run.config.model, run.mesh.size("tp")
        self.head_dim, self.num_groups = model_config.head_dim, model_config.num_kv_heads // tp
        num_heads = model_config.num_attention_heads // tp
        self.largest_LH = torch.empty(len(self.attentions), num_heads, device=run.device)
        self.is_measuring = False
        length, cp = run.config.training.seq_length, run.mesh.group("cp")
        positions = own_positions(length, run.config.parallel, run.mesh)
        own = torch.arange(length) if positions is None else positions
        self.positions_S = self.positions_K = own.to(run.device)
        if cp is not None:
            self.positions_K = all_gather_without_grad(self.positions_S, cp)
        for layer, attention in enumerate(self.attentions):
            attention.core_attention = _MeasuredAttention(attention.core_attention, self, layer)

    def begin_step(self, step: int) -> None:
        """Prepares for the passes of a step, numbered from 0."""
        self.is_measuring = step % self.options.qk_clip_interval == 0
        self.largest_LH.fill_(-torch.inf)

    @torch.no_grad()
    def measure(self, layer: int, q_BHSd: Tensor, k_BGSd: Tensor, documents: Documents | None) -> None:
        """Takes the logits of a micro-batch into account. Collective over the ranks that share its sequences."""
        cp = self.run.mesh.group("cp")
        if cp is not None:  # keys of all ranks, [K, B, G, d] one rank after the other
            k_BGSd = all_gather_without_grad(k_BGSd.permute(2, 0, 1, 3).contiguous(), cp).permute(1, 2, 0, 3)
        numbers: list[Tensor | None] = [None, None]
        if documents is not None:
            rows = torch.arange(len(q_BHSd), device=q_BHSd.device)[:, None] * self.run.config.training.seq_length
            ends_N = documents.cu_seqlens_N1[1:]
            numbers = [
                torch.searchsorted(ends_N, (rows + at).int(), right=True) for at in (self.positions_S, self.positions_K)
            ]
        found_H = largest_logits(q_BHSd, k_BGSd, self.positions_S, self.positions_K, *numbers)
        torch.maximum(self.largest_LH[layer], found_H, out=self.largest_LH[layer])

    @torch.no_grad()
    def before_update(self, recorder: Recorder) -> None:
        """Ends the measurement and asks the update of this step to scale the heads. Collective.

        Args:
            recorder: gets ``max_attention_logit`` and ``qk_clipped_heads``.
        """
        if not self.is_measuring or not self.attentions:
            return
        self.is_measuring = False
        group = self.run.mesh.group("dense")
        if group is not None:  # other tokens, the same heads
            dist.all_reduce(self.largest_LH, op=dist.ReduceOp.MAX, group=group)
        threshold = self.options.qk_clip_threshold
        # Not where it is infinite: such a step is skipped, and its factor would be 0.
        is_clipped_LH = (self.largest_LH > threshold) & self.largest_LH.isfinite()
        query_LH, key_LG = clip_factors(self.largest_LH, is_clipped_LH, threshold, self.num_groups)
        scales: dict[nn.Parameter, Tensor] = {}
        for layer, attention in enumerate(self.attentions):
            for projection, factors in ((attention.q_proj, query_LH[layer]), (attention.k_proj, key_LG[layer])):
                rows = factors.repeat_interleave(self.head_dim)
                scales |= {parameter: rows for parameter in projection.parameters()}
        self.engine.optimizer.scale_rows_after_update(scales)
        is_first = group is None or dist.get_rank(group) == 0
        recorder.add("max_attention_logit", self.largest_LH.max(), "max", 1.0)
        recorder.add("qk_clipped_heads", is_clipped_LH.sum() if is_first else 0.0, "sum", 1.0)


def clip_factors(largest_LH: Tensor, is_clipped_LH: Tensor, threshold: float, num_groups: int) -> tuple[Tensor, Tensor]:
    """Computes the factors of query heads [L, H] and of key heads [L, G]; a head's logits get their product."""
    product_LH = torch.where(is_clipped_LH, threshold / largest_LH, 1.0)
    key_LG = product_LH.unflatten(1, (num_groups, -1)).amin(2).sqrt()
    return product_LH / key_LG.repeat_interleave(largest_LH.shape[1] // num_groups, dim=1), key_LG
