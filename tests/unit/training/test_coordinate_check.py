"""With muP, activations change as much at every width, and the best rate of a small model stays the best one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.optimus.commands import coordinate_check as command
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
COMPLETEP = "--parametrization completep --base-hidden-size 32 --base-num-layers 2 "
FLAT, GROWS = 0.25, 0.5


def slopes(out: Path, words: str) -> dict[tuple[str, str], dict[str, float]]:
    """Slopes of the changes by parametrization and axis."""
    assert command.main([*words.split(), "--out", str(out)]) == 0
    return {(row["parametrization"], row["axis"]): row["change_slope"] for row in json.loads(out.read_text())}


@pytest.mark.parametrize("optimizer", ["adam --lr 4e-3", "muon --lr 4e-3 --muon-adjust-lr-fn match_rms_adamw"])
def test_changes_are_flat_over_the_width_and_grow_with_standard_parametrization(optimizer: str, tmp_path: Path) -> None:
    words = f"--widths 32,64,128 --steps 4 --optimizer {optimizer} "
    found = slopes(tmp_path / "out.json", words + BASE + EXPERTS + MUP)
    flat, grown = found["mup", "width"], found["standard", "width"]
    assert flat.keys() == grown.keys() >= {"attention", "MLP", "experts", "router logits", "residual stream", "logits"}
    for name in ("attention", "MLP", "experts", "residual stream", "logits"):
        assert abs(flat[name]) < FLAT and grown[name] > GROWS, (name, flat, grown)
    assert flat["router logits"] < FLAT and grown["router logits"] > 0.4


def test_changes_are_flat_over_the_depth_with_completep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--depths 2,4,8 --steps 4 --optimizer adam --lr 4e-3 --plot " + str(tmp_path / "picture.png ")
    found = slopes(tmp_path / "out.json", words + BASE + COMPLETEP)
    assert abs(found["completep", "depth"]["residual stream"]) < FLAT
    assert found["standard", "depth"]["residual stream"] > GROWS
    assert found["completep", "depth"]["attention"] == pytest.approx(-1, abs=0.25)  # of each of more and more layers
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    assert "completep, change after 4 steps" in printed and "grows" in printed.split("standard, change")[1]


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (BASE, "--widths and --depths are both absent"),
        ("--widths 64 " + BASE, "must be two or more different whole numbers"),
        ("--widths 64,0 " + BASE, "must be two or more different whole numbers"),
        ("--widths 32,40 " + BASE, "use multiples of 16"),
        ("--widths 32,64 --out /no/such/folder/x.json --steps 1 " + BASE, "cannot be written"),
    ],
)
def test_wrong_words_are_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words.split()) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert message in printed[-1] and printed[-1].startswith("error: ")


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
