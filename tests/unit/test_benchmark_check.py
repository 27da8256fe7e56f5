"""Which outputs benchmarks/moe_layer.py takes for those of a right implementation, which options it refuses, and what
it leaves behind."""

from __future__ import annotations

import importlib
import json
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
        ("--minutes -1", "--minutes: -1 is not 0 or more"),
        ("--minutes nan", "--minutes: nan is not 0 or more"),
        ("--device cpu --profile --out x", "--profile writes no file: leave out --out x"),
        ("--out v1.2.json", "v1.2.json: .json and .png are added to it; give v1.2"),
        ("--out results.png", "results.png: .json and .png are added to it; give results"),
        ("--out .", "--out: . is a folder"),
        ("--out no/such/folder/x", "there is no folder no/such/folder"),
        ("--merge no.json", "--merge no.json: no such file"),
        ("--device cpu --instructions mmx", "--instructions mmx: instruction set 'mmx' is not there"),
    ],
)
def test_bad_options_end_before_anything_is_measured(
    benchmark_script: Any, words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["moe_layer.py", *words.split()])
    monkeypatch.setattr(benchmark_script, "run", lambda args, result: pytest.fail("measures"))
    monkeypatch.setattr(benchmark_script, "require_device", lambda parser, device: None)
    with pytest.raises(SystemExit, match="2"):
        benchmark_script.main()
    assert message in capsys.readouterr().err


ON_CPU = "--device cpu --shapes mula-tiny/ep2 --tokens 8 --repetitions 1"
ROW = dict(shape="mula-tiny", tokens=8, zipf=0.0, implementation="a", forward_backward_ms=1, forward_backward_tflops=1)
H200 = {"device": "H200", "torch": "2.11", "measurements": [ROW]}


@pytest.mark.parametrize("words", ["--merge {}.json", "--device cpu --out {}"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"device": "H2', "cannot be read as JSON"),
        (b"\x89PNG", "cannot be read as JSON"),
        (b"[]", "it has no device, torch, measurements"),
        (b'{"device": "H200", "torch": "2.11", "commit": "abc"}', "it has no measurements"),
        (b'{"device": "H200", "torch": "2.11", "measurements": [{}]}', "not every measurement has"),
    ],
)
def test_files_of_others_are_refused_and_left_alone(
    benchmark_script: Any,
    words: str,
    content: bytes,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "x.json").write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["moe_layer.py", *words.format(tmp_path / "x").split()])
    monkeypatch.setattr(benchmark_script, "run", lambda args, result: pytest.fail("measures"))
    with pytest.raises(SystemExit, match="2"):
        benchmark_script.main()
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "x.json").read_bytes() == content


def test_machines_are_not_mixed(
    benchmark_script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps(H200))
    second.write_text(json.dumps(H200 | {"device": "H100"}))
    monkeypatch.setattr(benchmark_script, "run", lambda args, result: pytest.fail("measures"))
    for words in (f"--merge {first} {second}", f"--device cpu --out {tmp_path}/a"):
        monkeypatch.setattr(sys, "argv", ["moe_layer.py", *words.split()])
        with pytest.raises(SystemExit, match="2"):
            benchmark_script.main()
        assert "different machines or versions of torch" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("words", ["", "--minutes 0"])
def test_a_run_without_a_result_is_an_error(
    benchmark_script: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["moe_layer.py", *f"{ON_CPU} {words} --out {tmp_path}/x".split()])
    monkeypatch.setattr(benchmark_script, "build_layers", lambda *_: {})  # all are left out
    with pytest.raises(SystemExit) as ended:
        benchmark_script.main()
    assert str(ended.value.code).startswith("nothing was measured: ")  # Python prints a text and ends with 1
    assert not list(tmp_path.iterdir())


def test_measurements_are_added_with_their_commit(
    benchmark_script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark_script, "machine", lambda device: {"device": "H200", "torch": "2.11"})
    monkeypatch.setattr(benchmark_script, "commit", lambda: "abc")
    monkeypatch.setattr(benchmark_script, "measure", lambda *_: [ROW])
    monkeypatch.setattr(benchmark_script, "plot", lambda rows, path: path.touch())
    monkeypatch.setattr(sys, "argv", ["moe_layer.py", *f"{ON_CPU} --out {tmp_path}/v1.2".split()])
    (tmp_path / "v1.2.json").write_text(json.dumps(H200))
    benchmark_script.main()
    assert {path.name for path in tmp_path.iterdir()} == {"v1.2.json", "v1.2.png"}
    written = json.loads((tmp_path / "v1.2.json").read_text())
    assert written == H200 | {"measurements": [ROW, ROW | {"commit": "abc"}]}


@pytest.mark.parametrize(
    ("words", "skewed"),
    [
        ("", ["optimus"]),
        ("--skewed-peers", ["optimus-cpu", "optimus-reference"]),
        ("--skewed-peers liger", ["liger"]),
    ],
)
def test_peers_of_skewed_routing(
    benchmark_script: Any, words: str, skewed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(benchmark_script, "run", lambda args, result: given.append(args))
    monkeypatch.setattr(
        sys, "argv", ["moe_layer.py", *f"{ON_CPU} --peers optimus-cpu optimus-reference {words}".split()]
    )
    benchmark_script.main()
    assert given[0].skewed_peers == skewed


def test_operators_of_a_cpu_are_listed(
    benchmark_script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["moe_layer.py", *ON_CPU.split(), "--profile"])
    benchmark_script.main()
    out = capsys.readouterr().out
    assert "mula-tiny/ep2, 8 tokens" in out
    assert "calls  aten::" in out
