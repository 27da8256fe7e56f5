"""What benchmarks/layout_speed.py makes of the times that it measures."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import layout_speed
import layout_speed_peers as peers
import layout_speed_programs as programs
import layout_speed_sections as sections
import provenance

from megatron.optimus.layers.rope import rope_table
from megatron.optimus.models.decoder import Decoder

CPU = torch.device("cpu")


def arguments(**changes: Any) -> argparse.Namespace:
    given: dict[str, Any] = dict(preset="mula-1b", device="cuda", dtype="bf16", layers=16, seq_length=4096)
    given |= dict(pp_micro_batch_size=2, micro_batches=None, micro_batch_size=4, cp_seq_length=8192, cp_layers=4)
    return argparse.Namespace(**(given | changes))


def test_ideal_of_a_pipeline_is_the_step_without_one_and_the_bubble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "slowest", lambda value: value)
    # 16 micro-batches over 4 ranks: 4 on each without a pipeline, in 0.8 s of a step of 1.0 s.
    monkeypatch.setattr(programs, "forward_backward_time", lambda program, device, repeats: 0.8)
    section = sections.pp_section(arguments(), 4)
    names = list(section.variants)
    found = section.further(dict.fromkeys(names), dict.fromkeys(names, 1.0) | {"1f1b": 1.25}, CPU)
    # A micro-batch takes 0.2 s through all layers, 0.05 s through a stage: three of them are the bubble of 1F1B.
    assert found["1f1b"]["ideal_ms"] == pytest.approx(1150.0)
    assert found["1f1b"]["percent"] == pytest.approx(92.0)
    assert found["interleaved-1f1b, 2 chunks"]["bubble_ms"] == pytest.approx(75.0)


def test_ideal_of_context_parallelism_is_the_rest_and_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "slowest", lambda value: value)
    monkeypatch.setattr(
        programs, "attention_alone", lambda words, device, ranks, repeats, by_ring: 0.15 if by_ring else 0.1
    )
    section = sections.cp_section(arguments(), 2)
    built = {"ulysses": programs.Program(lambda: 0.0, 1, about={"num_layers": 4})}
    found = section.further(built, {"ulysses": 0.66, "ring": 0.9, "rest: attention does nothing": 0.2}, CPU)
    assert found["ulysses"]["percent"] == pytest.approx(10.0)
    assert found["ring"]["percent"] == pytest.approx(50.0)
    assert found["ring"]["kernels_alone_ms_each_layer"] == pytest.approx(150.0)


def test_nothing_in_place_of_attention_still_has_gradients_of_all_three() -> None:
    q, k, v = (torch.randn(1, heads, 3, 2, requires_grad=True) for heads in (4, 2, 2))
    out = programs.NoAttention.apply(q, k, v)
    assert torch.equal(out, q)
    grad = torch.randn_like(out)
    out.backward(grad)
    assert torch.equal(q.grad, grad) and torch.equal(k.grad, grad[:, :2]) and torch.equal(v.grad, grad[:, :2])


def test_table_names_what_failed() -> None:
    good = dict(step_ms=10.0, step_ms_each_turn=[9.0, 11.0], tokens_per_second_per_gpu=2000.0, losses=[3.0, 2.5])
    rows = [dict(variant="a", what="cost", percent=12.0, **good), dict(variant="b", error="Traceback\nValueError: no")]
    lines = layout_speed.table_of("tp", dict(seconds=3.0, results=rows))
    assert "| a | 10.0 | 9.0 to 11.0 | 2,000 | +12.0% cost | 2.500 |" in lines
    assert "| b | failed: ValueError: no | | | | |" in lines
    assert layout_speed.table_of("tp", dict(seconds=3.0, error="not done"))[-1] == "not done"


def test_results_name_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.commit(tmp_path) == "unknown"
    git("init", "-q")
    file = tmp_path / "file"
    file.write_text("a")
    git("add", "file")
    git("commit", "-qm", "first")
    git("tag", "-am", "a tag", "v1")
    head = git("rev-parse", "HEAD").strip()
    assert len(head) == 40 and provenance.commit(tmp_path) == head
    file.write_text("b")
    assert provenance.commit(tmp_path) == f"{head}-dirty"
    monkeypatch.setenv("PATH", "")
    assert provenance.commit(tmp_path) == "unknown"

    monkeypatch.setattr(layout_speed, "follow", lambda *args: [])
    monkeypatch.setattr(layout_speed, "commit", lambda: "here")
    report = layout_speed.measure(argparse.Namespace(ranks=1, device="cpu", sections=[], seconds=1.0, out=None))
    assert (report["commit"], report["torch"]) == ("here", torch.__version__)


@pytest.mark.parametrize("preset", ["mula-1b", "mula-tiny"])
def test_layers_of_the_pipeline_of_deepspeed_are_those_of_our_model(preset: str) -> None:
    words = ["--preset", preset, "--num-layers", "2", "--seq-length", "8", "--device", "cpu", "--params-dtype", "fp32"]
    words += ["--hidden-size", "64", "--ffn-hidden-size", "128", "--num-attention-heads", "4", "--vocab-size", "256"]
    config = programs.run_config(words, CPU)
    model = Decoder(config.model)
    torch.manual_seed(0)
    for param in model.parameters():  # experts' weights are whatever lay in memory
        torch.nn.init.normal_(param, std=0.2)
    layers = [peers.Embed(config), *(peers.OneBlock(config, number) for number in range(2)), peers.Tail(config)]
    for layer, ours in zip(layers, [model.embedding, *model.layers, model.final_norm], strict=True):
        next(layer.children()).load_state_dict(ours.state_dict())
    tokens_BS = torch.arange(8)[None]
    x = tokens_BS
    for layer in layers:
        x = layer(x)
    hidden = model.embedding(tokens_BS)
    rope = rope_table(8, config.model, CPU)
    for block in model.layers:
        hidden = block(hidden, rope)[0]
    torch.testing.assert_close(x, model.final_norm(hidden))
