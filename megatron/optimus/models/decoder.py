"""The decoder from which every preset follows: Mula, OLMo and OLMoE. Serial code; parallelism comes from outside.

Shapes: B sequences, S positions, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.optimus.config.family import build_part, family_of
from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.layers.attention import Attention
from megatron.optimus.layers.documents import Documents
from megatron.optimus.layers.loss import LMHead
from megatron.optimus.layers.mlp import MLP
from megatron.optimus.layers.norm import add_norm, build_norm
from megatron.optimus.layers.rope import RopeTable, rope_at, rope_table
from megatron.optimus.moe.layer import MoE
from megatron.optimus.moe.router import RouterLosses


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the MLP is dense or a Mixture of Experts."""

    def __init__(self, config: ModelConfig, *, is_moe: bool) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention: Attention = build_part(family_of(config).attention, config)
        self.mlp_norm = build_norm(config)
        if is_moe:
            self.moe = MoE(config)
        else:
            self.mlp = MLP(config.hidden_size, config.ffn_hidden_size)
        self.is_moe = is_moe

    def forward(
        self, x_BSD: Tensor, rope: RopeTable, documents: Documents | None = None
    ) -> tuple[Tensor, RouterLosses | None]:
        """Returns the layer's output [B, S, D] and, of a MoE layer, the router's losses."""
        x_BSD, normed_BSD = add_norm(self.attention_norm, x_BSD)
        x_BSD, normed_BSD = add_norm(self.mlp_norm, x_BSD, self.attention(normed_BSD, rope, documents))
        if self.is_moe:
            y_BSD, losses = self.moe(normed_BSD)
            return x_BSD + y_BSD, losses
        return x_BSD + self.mlp(normed_BSD), None


@dataclass
class DecoderOutput:
    """What ``Decoder.forward`` returns."""

    logits_BSV: Tensor | None  # dtype of the weights; None with labels: then they never exist as a whole
    loss_sum: Tensor | None  # fp32 scalar: cross-entropy in nats summed over the labels that count; None without any
    router_losses: list[RouterLosses]  # one per MoE layer

    @property
    def aux_loss(self) -> Tensor:
        """Load-balancing loss, mean over MoE layers; zero for a dense model."""
        return self._mean_over_layers([losses.aux_loss for losses in self.router_losses])

    @property
    def z_loss(self) -> Tensor:
        """Router z-loss, mean over MoE layers; zero for a dense model."""
        return self._mean_over_layers([losses.z_loss for losses in self.router_losses])

    def _mean_over_layers(self, losses: list[Tensor]) -> Tensor:
        return torch.stack(losses).mean() if losses else torch.zeros((), device=self._result.device)

    @property
    def _result(self) -> Tensor:
        result = self.logits_BSV if self.loss_sum is None else self.loss_sum
        assert result is not None
        return result


class Decoder(nn.Module):
    """Decoder-only language model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.sequence_shards = 1  # context parallelism: tokens are one of so many parts of their sequences
        # Without values: torch's normal_ of a meta tensor imports torch's compiler, as long as importing torch.
        table_VD = torch.empty(config.vocab_size, config.hidden_size)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table_VD)
        moe_layers = set(config.moe_layers)
        self.layers = nn.ModuleList(Block(config, is_moe=number in moe_layers) for number in range(config.num_layers))
        self.final_norm = build_norm(config)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.z_loss_coeff = config.output_z_loss_coeff
        if not config.untie_embeddings_and_output_weights:
            self.lm_head.weight = self.embedding.weight

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        documents: Documents | None = None,
        positions_BS: Tensor | None = None,
    ) -> DecoderOutput:
        """``documents``: attention stays inside each. ``positions_BS``: those of the tokens, if not 0 to S - 1."""
        rope = rope_table(tokens_BS.shape[1] * self.sequence_shards, self.config, tokens_BS.device)
        if positions_BS is not None:
            rope = rope_at(rope, positions_BS)
        x_BSD = self.embedding(tokens_BS)
        router_losses = []
        for layer in self.layers:
            x_BSD, losses = layer(x_BSD, rope, documents)
            if losses is not None:
                router_losses.append(losses)
        x_BSD = self.final_norm(x_BSD)
        if labels_BS is not None:
            return DecoderOutput(None, self.lm_head(x_BSD, labels_BS), router_losses)
        return DecoderOutput(self.lm_head(x_BSD).view(*tokens_BS.shape, -1), None, router_losses)

    def moe_layers(self) -> list[MoE]:
        """Lists the MoE layers in the order of the model."""
        return [module for module in self.modules() if isinstance(module, MoE)]
