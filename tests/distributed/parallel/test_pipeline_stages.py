"""Pipelines with several chunks on four GPUs whose kernels start in the order in which they were queued.

With CUDA_DEVICE_MAX_CONNECTIONS=1 everything that a rank queues goes through one connection, so that a receive which
waits for its message could hold up the send that another rank waits for. Ranks that wait for each other are killed at
the time limit, and the test fails.
"""

from __future__ import annotations

import pytest
import torch

from megatron.optimus.config.schema import PipelineSchedule
from tests.distributed.curves import curves
from tests.distributed.layouts import refusal
from tests.helpers import run_on_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than four GPUs"),
]
STEPS = 4
WHOLE = "--micro-batch-size 2"  # four replicas
PIPELINE = "--pipeline-model-parallel-size 4 --micro-batch-size 2 --virtual-pipeline-model-parallel-size"


def layouts() -> list[str]:
    """The reference, and the pipelines with several point-to-point groups that this torch can run."""
    found = [WHOLE, f"{PIPELINE} 1", f"{PIPELINE} 2 --pipeline-schedule interleaved-1f1b"]
    for schedule in (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV):
        if refusal(schedule) is None:
            found.append(f"{PIPELINE} 2 --pipeline-schedule {schedule.value}")
    return found


def check_groups(device: str, timeout: float = 180) -> None:
    words = [f"{line} --params-dtype fp32" for line in layouts()]
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    runs = [(line, STEPS) for line in words]
    ranks = run_on_gpus(curves, 4, runs, timeout=timeout, device=device, environment=environment)
    for losses in ranks:
        expected, *others = losses
        assert len(set(expected)) == len(expected), "nothing was trained"
        for line, found in zip(words[1:], others, strict=True):
            assert found == pytest.approx(expected, rel=1e-5), line


def test_p2p_groups_with_one_connection() -> None:
    check_groups("cuda")
