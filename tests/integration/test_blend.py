"""A blended run through the training program: planned, trained, resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from .conftest import Program


def test_blend_trains_and_resumes_as_if_unbroken(tmp_path: Path, tokens: Path, pretrain: Program) -> None:
    for name in ("web", "code"):
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{tokens}{suffix}", tmp_path / f"{name}{suffix}")
    blend = tmp_path / "blend.yaml"
    blend.write_text(
        "corpora:\n  web: {paths: [web], weight: 3}\n  code: {paths: [code], weight: 1}\n"
        "stages:\n  - {start_samples: 20, weights: {web: 1, code: 1}}\n"
    )
    options = ["--data-path", "--data-file-list", blend]
    losses = []
    for run, parts in (("whole", [6]), ("broken", [4, 6])):
        for stop in parts:
            exits = ["--exit-interval", stop] if stop < 6 else []
            result = pretrain(tmp_path / run, *options, "--train-iters", 6, *exits)
            assert result.returncode == 0, result.stderr[-2000:]
            assert "corpus web: 1 files" in result.stdout and "epochs" in result.stdout
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        losses.append({(row := json.loads(line))["step"]: row["loss"] for line in lines})
    assert losses[0] == losses[1] and len(losses[0]) == 6
    dry = pretrain(tmp_path / "dry", *options, "--max-data-epochs", 0.01)
    assert dry.returncode == 2 and "runs dry" in dry.stderr
