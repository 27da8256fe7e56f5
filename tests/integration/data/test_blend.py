"""A blended run through the training program: planned, trained, resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.conftest import Program


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_blend_trains_and_resumes_as_if_unbroken(tmp_path: Path, tokens: Path, train: Program) -> None:
    for name in ("web", "code"):
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{tokens}{suffix}", tmp_path / f"{name}{suffix}")
    blend = tmp_path / "blend.yaml"
    blend.write_text(
        "corpora:\n  web: {paths: [web], weight: 3}\n  code: {paths: [code], weight: 1}\n"
        "stages:\n  - {start_samples: 20, weights: {web: 1, code: 1}}\n"
    )
    options = ["--data-path", "--data-file-list", blend]
    rows = []
    for run, parts in (("whole", [6]), ("broken", [4, 6])):
        for stop in parts:
            exits = ["--exit-interval", stop] if stop < 6 else []
            result = train(tmp_path / run, *options, "--train-iters", 6, *exits)
            assert result.returncode == 0, result.stderr[-2000:]
            assert "corpus web: 1 file," in result.stdout and "epochs" in result.stdout
        rows.append(metrics(tmp_path / run))
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]] and len(rows[0]) == 6
    switch = ["--add-extra-token-to-sequence", "true", "--load", tmp_path / "whole/checkpoints/step-00000004"]
    switched = train(tmp_path / "switched", *options, "--train-iters", 6, *switch)
    assert "changed since that checkpoint: data.add_extra_token_to_sequence False -> True" in switched.stdout
    same, other = rows[0][4], metrics(tmp_path / "switched")[0]
    # the same samples through the same weights; one label more each
    assert (same["step"], same["router_entropy"]) == (other["step"], other["router_entropy"]) and same["step"] == 5
    assert same["loss"] == pytest.approx(other["loss"], rel=0.02) and same["loss"] != other["loss"]
    dry = train(tmp_path / "dry", *options, "--max-data-epochs", 0.01)
    assert dry.returncode == 2 and "runs dry" in dry.stderr
