"""Checks that a checkpoint's samples are those of its steps and batch sizes, before a run reads on from there.

A full checkpoint records since which step and sample its options hold; from there the number of samples follows.
"""

from __future__ import annotations

import logging
from typing import Any

from megatron.optimus.checkpoint import CheckpointError, Manifest
from megatron.optimus.config.duration import BatchSizes

START_FIELD = "data_position_start"  # of a manifest's metadata: [step, samples] since which its batch sizes hold
STEPS_FIELD = "optimizer_step_count"
_OPTIONS = ("global_batch_size", "rampup_batch_size", "seq_length")
_MAX = 1 << 62
_MAX_STAGES = 1_000_000

logger = logging.getLogger("optimus")


def check_position(manifest: Manifest, *, warn: bool) -> None:
    """Raises CheckpointError where step, samples and batch sizes contradict each other.

    Imports and checkpoints of earlier versions do not say since when their batch sizes hold: there it is a warning.

    Args:
        manifest: of the checkpoint.
        warn: whether this rank logs it.
    """
    steps = manifest.metadata.get(STEPS_FIELD, manifest.step)
    if not _is_count(steps):
        raise CheckpointError(f"its {STEPS_FIELD}={steps!r} is not a number of optimizer steps")
    training = manifest.config.get("training")
    if training is None:  # an import, which begins at step 0
        return
    full, ramp, seq_length = (training.get(name) for name in _OPTIONS)
    ramp = [] if ramp is None else ramp
    if not (_is_count(full) and full and _is_count(seq_length) and seq_length and _is_ramp(ramp, full)):
        raise CheckpointError(
            f"its configuration has global_batch_size={full!r}, rampup_batch_size={ramp!r}, seq_length={seq_length!r}, "
            "which no run can have"
        )
    start = manifest.metadata.get(START_FIELD)
    if start is not None and not (isinstance(start, list) and len(start) == 2 and all(map(_is_count, start))):
        raise CheckpointError(f"its {START_FIELD}={start!r} is not [step, samples]")
    step, samples = start or (0, 0)
    expected = BatchSizes(full, tuple(ramp)).after(samples, manifest.step - step)
    if manifest.step >= step and expected == manifest.consumed_samples:
        return
    message = (
        f"its consumed_samples={manifest.consumed_samples} are not the {expected} that follow from step "
        f"{manifest.step} and global_batch_size={full}"
    )
    if start is not None:
        raise CheckpointError(f"{message}: the manifest was changed; use another checkpoint, or --finetune from step 0")
    if warn:
        logger.warning("%s; that is right only for an import, or if the batch size changed during that run", message)


def position_start(manifest: Manifest, training: dict[str, Any], step: int, samples: int) -> list[int]:
    """Returns [step, samples] since which a resumed run's batch sizes hold.

    Args:
        manifest: of the checkpoint it resumes from.
        training: the run's options of that section.
        step: steps done.
        samples: consumed, of the run's sequence length.
    """
    before = manifest.config.get("training", {})
    start = manifest.metadata.get(START_FIELD)
    if start is None or any(before.get(name) != training[name] for name in _OPTIONS):
        return [step, samples]
    return list(start)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX


def _is_ramp(ramp: Any, full: int) -> bool:
    if ramp == []:
        return True
    if not (isinstance(ramp, list) and len(ramp) == 3 and all(_is_count(value) and value for value in ramp)):
        return False
    return ramp[0] < full and (full - ramp[0]) // ramp[1] <= _MAX_STAGES
