"""With muP, activations change as much at every width, and the best rate of a small model stays the best one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ConfigError, RunConfig
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights
from megatron.optimus.training.coordinate_check import scaled, slope
from megatron.optimus.training.engine import build_optimizer

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 --vocab-size 128 --params-dtype fp32 "
    "--device cpu --micro-batch-size 2 --seq-length 24 --min-lr 0 "
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-layer-freq [0,1] "
MUP = "--parametrization mup --base-hidden-size 32 "


def test_a_wider_model_has_more_heads_of_the_same_width() -> None:
    config = load((BASE + EXPERTS + "--num-query-groups 1").split()).config.model
    wide = scaled(config, width=96)
    assert (wide.num_attention_heads, wide.num_query_groups, wide.head_dim) == (6, 3, config.head_dim)
    assert (wide.ffn_hidden_size, wide.moe_ffn_hidden_size, wide.num_layers) == (192, 96, 2)
    with pytest.raises(ConfigError, match=r"width 40: num_attention_heads=2 x 40 / hidden_size=32 .*multiples of 16"):
        scaled(config, width=40)


def test_slope_is_the_exponent_of_a_power_law() -> None:
    assert slope([2, 4, 16], [3 * size**-0.5 for size in (2, 4, 16)]) == pytest.approx(-0.5)
    assert slope([2, 4], [0.0, 0.0]) == 0.0


# ---- transfer of the rate

RATES = [4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2]


def sequences(steps: int) -> Tensor:
    """[steps, 8, 25] tokens of a random Markov chain."""
    draw = torch.Generator().manual_seed(2)
    chances_VV = torch.softmax(2.5 * torch.randn(64, 64, generator=draw), dim=-1)
    tokens = [torch.randint(64, (steps * 8,), generator=draw)]
    for _ in range(24):
        tokens.append(torch.multinomial(chances_VV[tokens[-1]], 1, generator=draw)[:, 0])
    return torch.stack(tokens, dim=1).view(steps, 8, -1)


def final_loss(config: RunConfig, steps: int = 30) -> float:
    """Mean loss of the last steps of a short run with warm-up and decay."""
    with torch.device("meta"):
        model = Decoder(config.model)
    initialize_weights(model, seed=1, device=torch.device("cpu"), dtype=torch.float32)
    optimizer = build_optimizer(model, config.optimizer)
    peaks, losses = [group["lr"] for group in optimizer.param_groups], []
    for step, tokens_BS in enumerate(sequences(steps)):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * min((step + 1) / 5, 1 - step / steps)
        loss = model(tokens_BS[:, :-1], tokens_BS[:, 1:].contiguous()).loss_sum / tokens_BS[:, 1:].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-4:]) / 4


def best_rate(words: str, width: int) -> float:
    losses = []
    for rate in RATES:
        config = load((BASE + f"--adam-eps 1e-9 --num-layers 1 --vocab-size 64 --lr {rate} " + words).split()).config
        config.model = scaled(config.model, width=width)
        losses.append(final_loss(config))
    print(words, width, [f"{loss:.3f}" for loss in losses])
    return RATES[losses.index(min(losses))]


def test_the_best_rate_stays_with_mup_and_falls_with_standard_parametrization() -> None:
    base = best_rate("", 32)
    assert RATES[0] < base < RATES[-1]
    assert [best_rate(MUP, width) for width in (64, 128)] == [base, base]
    middle, wide = (best_rate("", width) for width in (64, 128))
    assert wide < middle < base
