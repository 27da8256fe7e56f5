"""Folders of runs as the trainer writes them, of chosen steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

START = 1_790_000_000.0
NAME = "<script>alert('x')</script>"


def line(step: int, **changes: Any) -> dict[str, Any]:
    """A line of metrics.jsonl; steps take 2 s, of which 0.5 s wait for data."""
    found = {"step": step, "consumed_tokens": 1000 * step, "global_batch_size": 10, "loss": 2 + 8 / step}
    found |= {"aux_loss": 2.0, "z_loss": None, "grad_norm": 1.0, "lr": 1e-3 / step, "wall_time": START + 2.0 * step}
    found |= {"step_time_s": 2.0, "data_wait_s": 0.5, "tokens_per_second_per_device": 125.0, "tflops_per_device": 1e-3}
    found |= {"mfu": None, "expert_load_max_over_mean": 1.5, "router_entropy": 2.0, "dropped_tokens": 0}
    return found | changes


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """A run of 12 steps with a restart before step 9, validation, experts, samples and a checkpoint."""

    def make(name: str = "first", num_steps: int = 12, seed: int = 1) -> Path:
        folder = tmp_path / name
        (folder / "checkpoints" / "step-00000008").mkdir(parents=True)
        lines = [line(step) for step in range(1, num_steps + 1)]
        lines[0] |= {"startup_s/total": 12.0, "startup_s/first_step": 2.0}
        if num_steps > 8:
            lines[3] |= {"valid_loss": 4.5, f"valid_loss/{NAME}": 5.5}
            lines[8] |= {"startup_s/total": 32.0, "startup_s/first_step": 2.0, "lost_steps": 3, "lost_s": 6.0}
            for one in lines[8:]:  # 6 s of lost steps, 30 s of start, 100 s in which nothing ran
                one["wall_time"] += 136.0
            lines[5] |= {"loss": None, "nonfinite": True, "skipped": True}
        write_lines(folder / "metrics.jsonl", lines)
        (folder / "config.yaml").write_text(
            "model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 512, num_experts: 4,"
            " moe_router_topk: 2}\n"
            f'training: {{seed: {seed}, train_iters: 20}}\nlogging: {{wandb_project: "{NAME}"}}\n'
        )
        rows = [{"first_step": s, "step": s + 1, "slots": [[s, 2, 2, 0], [4, 4, 4, 4]]} for s in range(1, num_steps, 2)]
        write_lines(folder / "expert_load_history.jsonl", rows)
        write_lines(folder / "samples.jsonl", [{"step": 4, "prompt": NAME, "text": "a <b>bold</b> text"}])
        manifest = {"step": 8, "files": {"a": 1000, "b": 500}, "layout": {"dp": 2}, "metadata": {"warnings": ["loss"]}}
        (folder / "checkpoints" / "step-00000008" / "manifest.json").write_text(json.dumps(manifest))
        return folder

    return make


def is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9)
