"""Flipped bits end a run, name the rank, and the next start ends as if there had been none; on gloo ranks."""

from __future__ import annotations

import json
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from deepspeed_ext.zero.bucket import Bucket, all_gather
from tests.campaigns import bit_flips
from tests.helpers import run_distributed
from tests.integration.conftest import TINY, write_corpus

OPTIONS = "--train-iters 10 --eval-interval 0 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
CHECKS = "--integrity-interval 1 --integrity-gradient-interval 2"
AUTO_CHECKS = "--integrity-interval auto --integrity-gradient-interval auto"


class _LateGather:
    """An all-gather of parameters that is done when somebody waits for it, and not before."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def wait(self) -> None:
        all_gather(self._bucket.param, self._bucket.shard.param, group=self._bucket.group)


def _start_gather(bucket: Bucket) -> None:
    bucket._gathering = _LateGather(bucket)  # type: ignore[assignment]


def _campaign(rank: int, world: int, folder: str, options: str) -> dict[str, Any]:
    with patch.object(Bucket, "start_gather", _start_gather):
        return bit_flips.run_layout(rank, world, folder, options, flips=12, clean=4, seed=7)


def test_short_campaign(tmp_path: Path) -> None:
    """Every kind of flip on three ranks, where the bad one can always be told; and steps without any.

    New parameters arrive as late as they can, which nothing may take for a flip.
    """
    write_corpus(tmp_path / "tokens")
    world, options = bit_flips.LAYOUTS["3 ranks, fp32"]
    found, *others = run_distributed(_campaign, world, str(tmp_path), options)
    assert others == [found] * 2
    assert found["clean_steps"] == 4 and found["false_alarms"] == 0
    assert found["table"].keys() == {*bit_flips.STORED, *bit_flips.COMPUTED}
    for kind, row in found["table"].items():
        assert row["flips"] == 2 and row["false_alarms"] == 0, kind
        assert row["found"] == row["named"] == row["changed"] >= (2 if kind in bit_flips.STORED else 1), (kind, row)


def _fit(rank: int, world: int, folder: str, name: str, words: str, *, late: bool, flips_in: int = 0) -> str:
    from megatron.optimus.config.load import load
    from megatron.optimus.context import RunContext
    from megatron.optimus.platform.mesh import Mesh
    from megatron.optimus.training.health import IntegrityError
    from megatron.optimus.training.trainer import Trainer

    options = [*TINY, *OPTIONS.split(), *words.split()]
    config = load([*options, "--run-dir", f"{folder}/{name}", "--data-path", f"{folder}/counting"]).config
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    trainer = Trainer(RunContext.of(config, mesh, torch.device("cpu")))
    trainer.is_async_device = late
    record, text = trainer.integrity.after_update, ""

    def flipping(step: int) -> None:
        record(step)
        if step == flips_in and rank == 1:
            states = trainer.engine.optimizer.flat_buffers[-1].buckets[0].shard.state
            bit_flips.flip(states["exp_avg_sq"], 3, 1)

    trainer.integrity.after_update = flipping  # type: ignore[method-assign]
    try:
        trainer.fit()
    except IntegrityError as error:
        text = f"step {trainer.step}: {error}"
    trainer.close()
    trainer.engine.destroy()
    return text


def _recover(rank: int, world: int, folder: str) -> dict[str, Any]:
    from megatron.optimus.training.engine import init_engine, shutdown_engine
    from megatron.optimus.training.integrity import Integrity

    init_engine(timedelta(seconds=60))
    _fit(rank, world, folder, "unchecked", "", late=True)
    found: dict[str, Any] = {}
    for late in (False, True):
        name = f"late {late}"
        with patch.object(Bucket, "start_gather", _start_gather) if late else nullcontext():
            found[name] = [_fit(rank, world, folder, name, CHECKS, late=late, flips_in=6)]
            found[name].append(sorted(path.name for path in Path(folder, name, "checkpoints").glob("step-*")))
            found[name].append(_fit(rank, world, folder, name, CHECKS, late=late))
    # The checksums that step 6 would be compared with are not taken, as step 5 is left out.
    skipping = "--integrity-interval 3 --iterations-to-skip 5"
    found["skipping"] = _fit(rank, world, folder, "skipping", skipping, late=True)
    found["auto"] = _fit(rank, world, folder, "auto", AUTO_CHECKS, late=True, flips_in=5)
    right = Integrity._gradient
    with patch.object(Integrity, "_gradient", lambda self, batch: right(self, batch) + (rank == 1)):
        found["auto gradients"] = _fit(rank, world, folder, "wrong", AUTO_CHECKS, late=True)
    shutdown_engine()
    return found


def _end(folder: Path) -> tuple[Any, list[Any]]:
    manifest = json.loads((folder / "checkpoints" / "step-00000010" / "manifest.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return manifest["tensors"], [
        [line[key] for key in ("step", "loss", "grad_norm", "router_entropy")] for line in lines
    ]


def test_recovery_is_from_before_the_flip(tmp_path: Path) -> None:
    """A moment of rank 1 flips after the update of step 6, which is saved; step 7 finds it, and 6 is not gone on from.

    The run that goes on ends as one that never flipped or compared anything, bit for bit, also where each part of the
    parameters is gathered no earlier than somebody waits for it. Four ranks: each expert has
    two copies, so gradients are compared too.
    """
    write_corpus(tmp_path / "counting")
    found = run_distributed(_recover, 4, str(tmp_path))
    assert {one["skipping"] for one in found} == {""}
    [text] = {one["auto"] for one in found}  # which compares steps 3 and 6 before it chooses
    assert "silent data corruption in step 6: exp_avg_sq" in text and "first on rank 1 of node" in text
    [text] = {one["auto gradients"] for one in found}
    assert (
        text.startswith("step 2: silent data corruption in step 3: ranks ") and "computed different gradients" in text
    )
    for late, step in ((False, 7), (True, 8)):  # a device that is behind the host has queued one more
        texts = {one[f"late {late}"][0] for one in found}
        [text] = texts
        assert text.startswith(f"step {step}: silent data corruption in step 7: exp_avg_sq (parameters from "), text
        assert "changed between two updates, first on rank 1 of node " in text
        assert found[0][f"late {late}"][1:] == [["step-00000004"], ""]
        assert _end(tmp_path / f"late {late}") == _end(tmp_path / "unchecked")
