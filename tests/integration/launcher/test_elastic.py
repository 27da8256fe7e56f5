"""A run under ``optimus launch --min-nodes`` that loses nodes, goes on with fewer and grows back."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from megatron.optimus.checkpoint.verify import compare
from megatron.optimus.launcher.nodes import FILE_NAME
from tests.helpers import start_program
from tests.integration.conftest import TINY
from tests.integration.imitated_cluster import ImitatedCluster

HOSTS, LAST = ["x0", "x1", "x2", "x3"], 50
RUN = f"--train-iters {LAST} --eval-interval 0 --expert-model-parallel-size 4".split()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    done = start_program(
        "megatron.optimus.pretrain", [*TINY, *RUN, "--data-path", str(tokens), "--run-dir", str(run)], 4, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return run


def assert_equal_within_rounding(run: Path, undisturbed: Path) -> None:
    """Losses of all steps, and the final weights and moments."""
    lines, expected = (
        [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()] for one in (run, undisturbed)
    )
    assert [line["step"] for line in lines] == list(range(1, LAST + 1))
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in expected], rel=1e-6), name
    assert [line["consumed_tokens"] for line in lines] == [line["consumed_tokens"] for line in expected]
    pair = [one / "checkpoints" / f"step-{LAST:08}" for one in (run, undisturbed)]
    differences = [one for one in compare(*pair) if one.kind != "rng"]  # a row for each rank
    assert {one.kind for one in differences} >= {"master", "exp_avg", "exp_avg_sq"}
    assert [one for one in differences if one.reason or one.only_in or (one.max_abs or 0.0) > 1e-6] == []


def test_it_goes_on_with_two_of_four_nodes_grows_back_and_shrinks_again(
    tmp_path: Path, tokens: Path, undisturbed: Path
) -> None:
    """First a node is lost, then one that has come back is used, then two are lost that held the only copies of each
    other's state."""
    run = tmp_path / "run"
    words = [*TINY, *RUN, *"--save-interval 0 --memory-checkpoint-interval 3 --min-nodes 2 --max-restarts 2".split()]
    with ImitatedCluster(tmp_path / "job", HOSTS, run) as job:
        job.launch(*words, "--data-path", str(tokens))
        job.wait_until(lambda: len(job.steps()) >= 9)
        job.lose("x1")
        job.wait_until(lambda: len(job.attempts) == 2 and len(job.steps()) >= 14)
        first = next(step for step in job.steps() if "startup_s/total" in step and step["step"] > 1)
        job.signal_all(signal.SIGSTOP)
        bad = run / FILE_NAME
        assert list(json.loads(bad.read_text())) == ["x1"]
        bad.write_text("{}")
        job.wait_until(lambda: "more nodes can be used: the ranks are asked to save" in job.log.read_text())
        job.signal_all(signal.SIGCONT)
        job.wait_until(lambda: [len(hosts) for hosts in job.attempts] == [4, 2, 4])
        saved = max((run / "checkpoints").glob("step-*"))
        assert job.attempts[2] == ["x0", "x2", "x3", "x1"]
        job.wait_until(lambda: int(job.steps()[-1]["step"]) >= int(saved.name.removeprefix("step-")) + 6)
        job.lose("x2")
        job.lose("x3")
        assert job.process.wait(timeout=60) == 0, job.log.read_text()
    text = job.log.read_text()
    assert job.attempts[:2] == [HOSTS, ["x0", "x2"]] and job.attempts[3:] == [["x0", "x1"]]
    assert "lost nodes: x1 (its agent is gone); it goes on with 2 of 4 nodes" in text
    assert "expert_model_parallel_size 4 -> 2" in text and "expert_model_parallel_size 2 -> 4" in text
    assert "that 4 ranks left in host memory is written to disk" in text and first["lost_steps"] <= 5
    assert text.count(f"resumed from {saved}: step ") == 2  # by four ranks, and by the last two
    assert_equal_within_rounding(run, undisturbed)
