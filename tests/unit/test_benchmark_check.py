"""Which outputs benchmarks/moe_layer.py takes for those of a right implementation, and which options it refuses."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

T, D, INNER, E, K = 1024, 64, 32, 96, 8


@pytest.fixture(scope="module")
def benchmark_script() -> Any:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    try:
        return importlib.import_module("moe_layer")
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def logits_TE() -> Tensor:
    return torch.randn(T, E, generator=torch.Generator().manual_seed(0))


def layer(logits_TE: Tensor, dropped: int | None = None) -> Tensor:
    """Outputs [T, D] of a layer; one expert may have none."""
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(T, D, generator=generator)
    up_EDF = torch.randn(E, D, INNER, generator=generator) / D**0.5
    down_EFD = torch.randn(E, INNER, D, generator=generator) / INNER**0.5
    weights_TK, indices_TK = logits_TE.softmax(-1).topk(K)
    weights_TE = torch.zeros(T, E).scatter(1, indices_TK, weights_TK / weights_TK.sum(-1, keepdim=True))
    if dropped is not None:
        weights_TE[:, dropped] = 0
    outputs_ETD = F.silu(x_TD @ up_EDF) @ down_EFD
    return torch.einsum("te,etd->td", weights_TE, outputs_ETD)


def test_a_router_that_rounds_to_bf16_is_right(benchmark_script: Any, logits_TE: Tensor) -> None:
    share = benchmark_script.share_of_differing_tokens(layer(logits_TE.bfloat16().float()), layer(logits_TE), "ours")
    chosen, exact = (logits.topk(K).indices.sort(-1).values for logits in (logits_TE.bfloat16().float(), logits_TE))
    assert share == pytest.approx((chosen != exact).any(-1).float().mean().item(), abs=1e-6)
    assert 0 < share < 0.05
    assert benchmark_script.share_of_differing_tokens(layer(logits_TE), layer(logits_TE), "ours") == 0


def test_wrong_implementations_are_caught(benchmark_script: Any, logits_TE: Tensor) -> None:
    expected = layer(logits_TE)
    one_lost, nan = expected.clone(), expected.clone()
    one_lost[5] = 0
    nan[7, 3] = torch.nan
    wrong = {
        "tokens differ": [layer(logits_TE, dropped=3), 1.05 * expected, expected.roll(1, 0)],
        "tokens have nothing in common": [one_lost, nan],
    }
    for message, outputs in wrong.items():
        for y in outputs:
            with pytest.raises(ValueError, match=message):
                benchmark_script.share_of_differing_tokens(y, expected, "ours")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tokens 0", "--tokens: 0 is not 1 or more"),
        ("--repetitions -1", "--repetitions: -1 is not 1 or more"),
        ("--zipf -1", "--zipf: -1 is not 0 or more"),
        ("--sustained nan", "--sustained: nan is not 0 or more"),
        ("--device cpu --held 3", "--held 3: at most 0 multiprocessors, half of those of this device"),
        ("--out no/such/folder/x", "there is no folder no/such/folder"),
        ("--merge no.json", "--merge no.json: no such file"),
        ("--device cpu --instructions mmx", "--instructions mmx: instruction set 'mmx' is not there"),
    ],
)
def test_bad_options_end_before_anything_is_measured(
    benchmark_script: Any, words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["moe_layer.py", *words.split()])
    monkeypatch.setattr(benchmark_script, "run", lambda args: pytest.fail("measures"))
    monkeypatch.setattr(benchmark_script, "require_device", lambda parser, device: None)
    with pytest.raises(SystemExit, match="2"):
        benchmark_script.main()
    assert message in capsys.readouterr().err
