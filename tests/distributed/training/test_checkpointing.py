"""A folder of checkpoints that is full, broken, not writable or gone, on real ranks that go on training."""

import errno
import logging
import os
import shutil
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron.optimus.checkpoint import CheckpointError, latest, load_manifest, saver
from megatron.optimus.config.load import load as config_of
from megatron.optimus.context import RunContext
from megatron.optimus.platform import files, seeding
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.ranks import Ranks
from megatron.optimus.training.metrics import read_metrics
from tests.helpers import run_distributed
from tests.integration.conftest import TINY, write_corpus

FULL_BYTES = 64 << 10  # left on the disk: far less than a checkpoint takes


def broken(function, number):
    """Has a function of ``files`` fail as the file system would, until the patch is undone."""
    patch = pytest.MonkeyPatch()

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    patch.setattr(files, function, fail)
    return patch.undo


def is_full(root):
    """Fills the disk of ``root``, which is a small one of its own where this user may mount one."""
    if not os.path.ismount(root):
        return broken("write_at", errno.ENOSPC)
    ballast = root / "ballast"
    with open(ballast, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(root).free - FULL_BYTES)
    return ballast.unlink


def is_gone(root):
    """The folder with all checkpoints and the run's lock is deleted, and something else has its name."""
    shutil.rmtree(root / "checkpoints")
    (root / "checkpoints").write_text("")
    return (root / "checkpoints").unlink


def _train(rank, world, folder, root, faults, iters, minutes="1", options=()):
    """Trains with saves every second step. After ``faults[step]`` the disk has that fault until the next save is due.

    Returns the steps done, or the error; the alerts' texts of rank 0.
    """
    from megatron.optimus.training.checkpointing import fetch_from_mirror
    from megatron.optimus.training.engine import init_engine, shutdown_engine
    from megatron.optimus.training.trainer import Trainer

    saver.FIRST_PAUSE_S = 0.05
    init_engine(timedelta(seconds=60))
    words = [*TINY, "--data-path", f"{folder}/counting", "--save", f"{root}/checkpoints", "--train-iters", "12"]
    words += ["--run-dir", f"{folder}/run-{root.name}", "--eval-interval", "0", "--max-unsaved-minutes", minutes]
    config = config_of([*words, "--exit-interval", str(iters), *options]).config
    fetch_from_mirror(config, Ranks(None, "cpu"))
    seeding.seed_all(config.training.seed)
    trainer = Trainer(RunContext.of(config, Mesh(config.parallel, rank=rank, world_size=world), torch.device("cpu")))
    checkpoints, after_step, undo = trainer.checkpoints, trainer.checkpoints.after_step, []
    alerts, lines = [], []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("optimus").addHandler(handler)

    class Sent:
        def send(self, *alert, is_logged):
            assert is_logged and (rank > 0 or alert[2] in lines[-1])  # alerts are one a minute, lines are not
            alerts.append(alert)

    checkpoints.alerts = Sent()

    def with_faults(step, consumed_samples, *, is_exiting):
        if step % 2 == 0:
            while undo:
                undo.pop()()
            trainer.run.ranks.first_failure(None)
            if (fault := faults.get(step)) is not None and rank == fault[0]:
                undo.append(fault[1](*fault[2]))
            trainer.run.ranks.first_failure(None)
        after_step(step, consumed_samples, is_exiting=is_exiting)
        time.sleep(0.1)  # a step of these is too short for a save to end beside it

    checkpoints.after_step = with_faults
    try:
        trainer.fit()
        answer = trainer.step
    except CheckpointError as error:
        answer = str(error)
    trainer.close()
    trainer.engine.destroy()
    shutdown_engine()
    return answer, alerts


@pytest.fixture
def small_disk(tmp_path):
    """A folder with a file system of its own, of 8 MiB, where this user may mount one."""
    root = tmp_path / "disk"
    root.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(root)], check=False, capture_output=True
    )
    yield root
    if mounted.returncode == 0:
        subprocess.run(["umount", "-l", str(root)], check=True)


def stored(path):
    """Names and hashes of everything in a checkpoint."""
    manifest = load_manifest(path)
    return {key: [piece.xxh3_128 for piece in entry.pieces] for key, entry in manifest.tensors.items()}


def test_training_goes_on_while_the_folder_fails(tmp_path, small_disk):
    """Five faults in a run of 12 steps; what it saves and goes on from is bit-identical to the undisturbed run's."""
    write_corpus(tmp_path / "counting")
    calm = tmp_path / "calm"
    mirror = f"file://{tmp_path}/mirror"
    options = ["--checkpoint-mirror", mirror, "--checkpoint-mirror-interval", "5"]
    run_distributed(_train, 2, str(tmp_path), calm, {}, 12, "1", options)
    faults = {
        2: (1, broken, ("write_at", errno.EIO)),
        4: (0, is_full, (small_disk,)),
        6: (0, broken, ("make_directory", errno.EACCES)),
        8: (0, is_gone, (small_disk,)),
    }
    answers = run_distributed(_train, 2, str(tmp_path), small_disk, faults, 10)
    assert [answer for answer, _ in answers] == [10, 10]
    told = {step: text for _, step, text in reversed(answers[0][1])}
    assert sorted(told) == [2, 4, 6, 8] and {kind for kind, _, _ in answers[0][1]} == {"save_failed"}
    assert "failed on rank 1" in told[2] and "Input/output error" in told[2] and "training goes on" in told[2]
    assert "No space left on device" in told[4] and "Permission denied" in told[6]
    assert "Not a directory" in told[8] or "File exists" in told[8]
    assert [path.name for path in (small_disk / "checkpoints").glob("step-*")] == ["step-00000010"]
    [(step, _), _] = run_distributed(_train, 2, str(tmp_path), small_disk, {}, 12)
    assert step == 12
    assert latest(small_disk / "checkpoints").name == latest(calm / "checkpoints").name == "step-00000012"
    assert stored(latest(small_disk / "checkpoints")) == stored(latest(calm / "checkpoints"))
    losses = [
        [line["loss"] for line in read_metrics(tmp_path / f"run-{root.name}" / "metrics.jsonl")]
        for root in (small_disk, calm)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 12

    # The undisturbed run loses its disk, and the last upload was not finished: it goes on from the one before.
    expected = stored(latest(calm / "checkpoints"))
    shutil.rmtree(calm)
    (tmp_path / "mirror" / "step-00000012" / "manifest.json").unlink()
    assert sorted(path.name for path in (tmp_path / "mirror").iterdir()) == ["step-00000010", "step-00000012"]
    run_distributed(_train, 2, str(tmp_path), calm, {}, 12, "1", options)
    assert stored(latest(calm / "checkpoints")) == expected
    resumed = read_metrics(tmp_path / "run-calm" / "metrics.jsonl")
    assert [line["loss"] for line in resumed] == losses[1]


@pytest.mark.parametrize("minutes, tries", [("0", 0), ("0.01", 1)])
def test_a_run_that_cannot_save_ends_with_one_error(tmp_path, minutes, tries):
    """At once, or when saves have failed for so long; on the rank that has the reason and on all others."""
    write_corpus(tmp_path / "counting")
    faults = {step: (1, broken, ("write_at", errno.EIO)) for step in range(2, 12, 2)}
    answers = run_distributed(_train, 2, str(tmp_path), tmp_path / "out", faults, 12, minutes)
    for answer, alerts in answers:
        assert "failed on rank 1: " in answer and "Input/output error" in answer
        assert ("nothing could be saved for" in answer) == (tries > 0) and len(alerts) >= tries
    assert not list(Path(tmp_path / "out" / "checkpoints").glob("*step-*"))
