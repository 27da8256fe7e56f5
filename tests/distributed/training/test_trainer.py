"""A run whose device runs behind the host: the same lines, none lost, and the same stop, on two gloo ranks."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.optimus.checkpoint.verify import compare
from megatron.optimus.config.load import load
from megatron.optimus.context import RunContext
from megatron.optimus.data.errors import DataError
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.training.health import TrainingError
from megatron.optimus.training.metrics import read_metrics
from tests.helpers import run_distributed
from tests.integration.conftest import TINY, write_corpus

KEYS = ("step", "consumed_tokens", "loss", "aux_loss", "z_loss", "grad_norm", "lr", "expert_load_max_over_mean")
KEYS += ("router_entropy", "dropped_tokens", "valid_loss", "nonfinite")
OPTIONS = "--expert-model-parallel-size 2 --moe-router-enable-expert-bias --eval-interval 7 --save-interval 6".split()
BROKEN = {  # steps whose gradients are not finite
    "one": range(6, 7),  # in which a checkpoint is due
    "all from 6": range(6, 99),  # a checkpoint is due in the first of five, an evaluation in the second
    "all from 7": range(7, 99),
}
MISSING_AT, LAST = 9, 13


def _break(trainer: Any, what: str) -> None:
    if what in BROKEN:
        weight = next(iter(trainer.model.parameters()))
        weight.register_hook(lambda grad: grad * float("nan") if trainer.step + 1 in BROKEN[what] else grad)
    elif what == "data":
        read = trainer.data.train.batch

        def batch(consumed: int) -> Any:
            if trainer.step + 1 == MISSING_AT:
                raise DataError("the disk is gone")
            return read(consumed)

        trainer.data.train.batch = batch


class Uploads(list[str]):
    """In place of a mirror: the names of what is to be uploaded."""

    def start(self, path: Path, on_failure: Any) -> None:
        self.append(path.name)

    def close(self) -> None:
        pass


def _run(rank: int, world: int, folder: str, what: str, is_async_device: bool, resumes: bool = False) -> dict[str, Any]:
    from megatron.optimus.training import trainer as training

    run_dir = Path(folder) / f"{what}-{is_async_device}"
    words = [
        *TINY,
        *OPTIONS,
        "--train-iters",
        str(LAST),
        "--run-dir",
        str(run_dir),
        "--data-path",
        f"{folder}/counting",
    ]
    config = load(words).config
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    trainer = training.Trainer(RunContext.of(config, mesh, torch.device("cpu")))
    assert trainer.engine.optimizer._copies == []  # what a save reads is not held while the first step runs
    trainer.is_async_device = is_async_device
    uploads = trainer.checkpoints._mirror = Uploads()  # type: ignore[assignment]
    if not resumes:
        _break(trainer, what)
    file = run_dir / "metrics.jsonl"
    queued: list[int] = []  # lines in the file when a step has been queued
    saved: dict[int, int] = {}  # and when a checkpoint begins
    train_step, save = training.train_step, trainer.checkpoints._save

    biases = [buffer for name, buffer in trainer.model.named_buffers() if "expert_bias" in name]
    moved: list[bool] = []  # the experts' biases, in each step

    def counting(*args: Any, **more: Any) -> Any:
        before = torch.cat(biases).clone()
        report = train_step(*args, **more)
        moved.append(not torch.equal(before, torch.cat(biases)))
        queued.append(len(file.read_text().splitlines()))
        return report

    def saving(kind: str, step: int, consumed_samples: int) -> None:
        saved[step] = len(file.read_text().splitlines())
        save(kind, step, consumed_samples)

    training.train_step, trainer.checkpoints._save = counting, saving  # type: ignore[method-assign]
    error = ""
    try:
        trainer.fit()
    except (TrainingError, DataError) as raised:
        error = str(raised)
        trainer.checkpoints.finish()
    training.train_step = train_step
    trainer.close()
    trainer.engine.destroy()
    lines = [{key: line.get(key) for key in KEYS} for line in read_metrics(file)]
    checkpoints = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    return {
        **{"lines": lines, "queued": queued, "saved": saved, "error": error, "checkpoints": checkpoints},
        "uploaded": list(uploads),
        **{"biases": torch.cat(biases), "moved": moved, "steps": trainer.step},
    }


def _runs(rank: int, world: int, folder: str) -> dict[str, list[dict[str, Any]]]:
    from megatron.optimus.training.engine import init_engine, shutdown_engine

    init_engine(timedelta(seconds=60))
    cases = ("nothing", *BROKEN, "data")
    found = {what: [_run(rank, world, folder, what, late) for late in (False, True)] for what in cases}
    for what in ("all from 6", "all from 7"):  # started again after exit code 4, on a sound device
        _run(rank, world, folder, what, True, resumes=True)
    shutdown_engine()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pending")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    write_corpus(folder / "counting")
    return run_distributed(_runs, 2, str(folder))[0]


@pytest.mark.parametrize(
    ("what", "last"),
    [("nothing", LAST), ("one", LAST), ("all from 6", 10), ("all from 7", 11), ("data", MISSING_AT - 1)],
)
def test_the_same_lines_and_checkpoints(runs: dict[str, list[dict[str, Any]]], what: str, last: int) -> None:
    at_once, late = runs[what]
    assert [line["step"] for line in late["lines"]] == list(range(1, last + 1))
    assert late["lines"] == at_once["lines"]
    assert late["error"] == at_once["error"] and bool(late["error"]) is (last < LAST)
    assert late["checkpoints"] == at_once["checkpoints"]
    assert late["saved"] == at_once["saved"] and all(step == lines for step, lines in late["saved"].items())
    assert torch.equal(late["biases"], at_once["biases"])
    broken = BROKEN.get(what, range(0))
    assert late["moved"] == [step not in broken for step in range(1, late["steps"] + 1)], "a skipped step moves none"


def test_a_step_is_read_when_the_next_one_is_queued(runs: dict[str, list[dict[str, Any]]]) -> None:
    at_once, late = runs["nothing"]
    assert at_once["queued"] == list(range(LAST))
    # when step n is queued there are n - 1 lines where the step before was followed by a checkpoint (6, 12) or an
    # evaluation (7), else n - 2
    settled = {6, 7, 12}
    assert late["queued"] == [0] + [n - 1 if n - 1 in settled else n - 2 for n in range(2, LAST + 1)]


def test_a_stop_for_health_comes_one_step_later(runs: dict[str, list[dict[str, Any]]]) -> None:
    at_once, late = runs["all from 7"]
    assert "gradients were not finite in 5 steps in a row, up to step 11" in late["error"]
    assert at_once["steps"] == 11 and late["steps"] == 12
    assert late["checkpoints"] == ["step-00000006"], "steps 7 to 11 are not saved"
    at_once, late = runs["all from 6"]
    assert at_once["steps"] == late["steps"] == 10, "a save is due from step 6 on: each step is judged before"
    assert late["checkpoints"] == []


def test_a_save_that_is_due_in_a_bad_step_is_done_after_the_next_good_one(runs: Any) -> None:
    """It is uploaded as the one that was due, and the run does not wait for the next interval."""
    for what, steps in (("nothing", [6, 12, LAST]), ("one", [7, 12, LAST])):
        for found in runs[what]:
            assert [*found["saved"]] == steps
            assert found["uploaded"] == [f"step-{step:08}" for step in steps]


@pytest.mark.parametrize("what", ["all from 6", "all from 7"])
def test_a_restart_does_the_updates_that_were_left_out(runs: Any, folder: Path, what: str) -> None:
    """A checkpoint was due in the five bad steps. The run that is started again ends as one without."""
    ends = [folder / f"{name}-True" / "checkpoints" / f"step-{LAST:08}" for name in (what, "nothing")]
    differences = compare(*ends)
    assert {one.kind for one in differences} >= {"master", "exp_avg", "buffer"}
    assert [one for one in differences if not one.is_same] == []
