"""DeepSpeed's AutoTP on our decoder, by our layer specs, against one torch process."""

from __future__ import annotations

import pytest
import torch

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.parallel.autotp import autotp_section
from tests.distributed.test_deepspeed_engine import _check, _config, _expected, _on_gpus, _train_each, two_gpus
from tests.helpers import run_distributed


def test_autotp_equals_one_process() -> None:
    cases = [("dense", 1), ("moe", 3), ("shared", 1), ("head norm", 1)]
    runs = [
        (shape, {"zero_optimization": {"stage": stage}, "tensor_parallel": autotp_section(_config(shape), 2)})
        for shape, stage in cases
    ]
    by_rank = run_distributed(_train_each, 4, runs, 2)
    for index, (shape, stage) in enumerate(cases):
        _check(shape, f"AutoTP 2, stage {stage}", [results[index] for results in by_rank], 2)
    whole = sum(param.numel() for param in _expected("dense", 2)[2].values())
    assert by_rank[0][0]["held"] < 0.75 * whole, "nothing was cut"


def autotp_on_gpus(device: str = "cuda", world: int = 2) -> None:
    cases = [
        (
            shape,
            f"AutoTP 2, stage {stage}",
            {"zero_optimization": {"stage": stage}, "tensor_parallel": autotp_section(_config(shape), 2)},
        )
        for shape, stage in (("dense", 1), ("moe", 1), ("head norm", 1))
    ]
    _on_gpus(2, cases, device, world)


@pytest.mark.gpu
@two_gpus
def test_autotp_on_gpus_equals_one_process() -> None:
    """Two replicas where there are four GPUs."""
    autotp_on_gpus(world=4 if torch.cuda.device_count() >= 4 else 2)


def test_autotp_size_must_divide() -> None:
    with pytest.raises(ConfigError, match="autotp_size=4 must divide num_query_groups=2"):
        autotp_section(_config("moe"), 4)
