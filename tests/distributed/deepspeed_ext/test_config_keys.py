"""What the optimizer sends, what it says of keys that it does not serve, and pipelines in DeepSpeed's own engine."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import deepspeed_ext
from tests.helpers import run_distributed

WORLD = 2


# ---- what travels


def _traffic() -> dict[str, list[int]]:
    """Elements of each collective in a step of two micro-batches, where every expert has one replica."""
    from deepspeed_ext.zero import bucket as module

    seen: dict[str, list[int]] = {"reduce_scatter": [], "all_gather": [], "all_reduce": []}

    def counted(name: str, place: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            seen[name].append(arguments[place].numel())
            return function(*arguments, **options)

        return run

    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    config |= {"zero_optimization": {"stage": 1, "reduce_bucket_size": 2048}}  # two buckets, nothing to pad
    engine, *_ = deepspeed_ext.initialize(
        model=layers,
        optimizer=torch.optim.AdamW(layers.parameters()),
        config=config,
        is_expert=lambda name: "ep_size_2" if name.startswith("1.") else None,
    )
    places = ((module, "reduce_scatter", 1), (module, "all_gather", 0), (dist, "all_reduce", 0))
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for (owner, name, place), (_, _, function) in zip(places, originals, strict=True):
        setattr(owner, name, counted(name, place, function))
    try:
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 64)).square().mean())
            engine.step()
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)
    return seen


# ---- warnings, refusals, pipelines


def _scenarios(rank: int, world: int) -> tuple[list[str], list[str], list[float]]:
    deepspeed_ext.init_distributed()
    # Each dense gradient once, scattered; experts of one replica not at all; of all else a scalar or two.
    traffic = _traffic()
    assert traffic["reduce_scatter"] == traffic["all_gather"] == [2048, 2048], traffic
    assert 0 < sum(traffic["all_reduce"]) <= 2, traffic
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Kept(logging.WARNING)
    logging.getLogger("deepspeed_ext").addHandler(handler)
    model = nn.Linear(3, 3)
    plain = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    additions: list[dict[str, Any]] = [
        {"zero_optimization": {"stage": 1}, "gradient_clipping": 0},
        {"zero_optimization": {"stage": 1}},
        {"zero_optimization": {"stage": 1, "round_robin_gradients": True}, "gradient_clipping": 1.0},
    ]
    for added in additions:
        deepspeed_ext.initialize(model=copy.deepcopy(model), config={**plain, **added})
    errors = []
    for added in ({"compile": {"deepcompile": True}}, {"compile": 3}):
        stage = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0}
        try:
            deepspeed_ext.initialize(model=model, config={**plain, **stage, **added})
        except ValueError as error:
            errors.append(str(error))
    logging.getLogger("deepspeed_ext").removeHandler(handler)
    pipeline = deepspeed.pipe.PipelineModule(
        [nn.Linear(3, 3), nn.Linear(3, 1)], num_stages=2, loss_fn=nn.functional.mse_loss
    )
    engine, *_ = deepspeed_ext.initialize(
        model=pipeline, model_parameters=list(pipeline.parameters()), config={**plain, "gradient_accumulation_steps": 2}
    )
    batches = itertools.repeat((torch.ones(1, 3), torch.zeros(1, 1)))
    losses = [float(engine.train_batch(data_iter=batches)) for _ in range(3)]
    deepspeed_ext.shutdown()
    return lines, errors, losses


def test_what_is_ignored_or_refused_is_named() -> None:
    (lines, errors, losses), (quiet, same_errors, same_losses) = run_distributed(_scenarios, WORLD)
    assert not quiet and errors == same_errors and losses == same_losses
    assert len(lines) == 2, lines
    assert "clipped to norm 1: the configuration has no gradient_clipping" in lines[0] and "clip_grad_norm_" in lines[0]
    assert "zero_optimization.round_robin_gradients=True (a bucket is cut evenly among its ranks)" in lines[1]
    assert "compile.deepcompile=true is not supported" in errors[0]
    assert "compile=3 must be an object" in errors[1]
    assert losses[2] < losses[1] < losses[0], "a PipelineModule trains in DeepSpeed's own engine"
