"""What other people's programs do to an engine: errors on one rank alone or in the middle of a backward, steps given
up, saves and loads between micro-batches, two engines that see each other's models. Two gloo ranks, stages 1 and 2."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import deepspeed_ext
from deepspeed_ext.optimizers import OPTIMIZERS
from tests.distributed.deepspeed_ext.stock import HAS_TORCH_STYLE
from tests.helpers import run_distributed

WIDTH, LAYERS, WORLD = 24, 6, 2
Engine = Any


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, breaks: bool) -> torch.Tensor:
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None]:
        if ctx.breaks:
            raise ArithmeticError("broken")
        return grads[0], None


class _Chain(nn.Module):
    """``breaks``: its backward ends in the middle. ``sparse``: one weight gets a sparse gradient. ``again``: one that
    has its gradient first gets another at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, breaks: bool = False, sparse: bool = False, again: bool = False) -> torch.Tensor:
        if again:
            x = checkpoint(self.layers[-1], x.requires_grad_(), use_reentrant=True)
        for index, layer in enumerate(self.layers):
            if index == 2:
                x = _Breaks.apply(x, breaks)
            if index == 3 and sparse:
                x = x + F.embedding(torch.tensor([1, 2, 1]), layer.weight, sparse=True)
            else:
                x = torch.tanh(layer(x))
        return x.square().mean()


def _input(number: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def _build(stage: int, model: nn.Module | None = None, accumulation: int = 1, optimizer: Any = None) -> Engine:
    model = model or _Chain()
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": accumulation}
    config |= {"gradient_clipping": 1.0, "zero_optimization": {"stage": stage, "reduce_bucket_size": 1300}}
    optimizer = optimizer or partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
    return deepspeed_ext.initialize(model=model, optimizer=optimizer(model.parameters()), config=config)[0]


def _micro(engine: Engine, rank: int, number: int, in_torch_style: bool = False, **trouble: bool) -> None:
    loss = engine(_input(number, rank), **trouble)
    loss.backward() if in_torch_style and HAS_TORCH_STYLE else engine.backward(loss)


def _train(engine: Engine, rank: int, numbers: Iterable[int]) -> Engine:
    for number in numbers:
        _micro(engine, rank, number)
        engine.step()
    return engine


def _weights(engine: Engine) -> torch.Tensor:
    weights = torch.cat([p.detach().flatten().clone() for p in engine.module.parameters()])
    engine.destroy()
    return weights


def _check_same(engine: Engine, rank: int, accumulation: int = 1) -> None:
    """That nothing has been but six micro-batches."""
    undisturbed = _build(engine.zero_options.stage, accumulation=accumulation)
    assert torch.equal(_weights(engine), _weights(_train(undisturbed, rank, range(6))))


# ---- errors


def _an_error_reaches_every_rank(rank: int, stage: int, trouble: Callable[[Engine], None], words: str) -> None:
    """``trouble``: on the last rank alone, between two steps, in place of a backward."""
    engine = _train(_build(stage), rank, range(3))
    before = [param.detach().clone() for param in engine.module.parameters()]
    began = time.monotonic()
    trouble(engine) if rank == WORLD - 1 else _micro(engine, rank, 3)
    engine.step()
    for param, value in zip(engine.module.parameters(), before, strict=True):
        assert torch.equal(param, value), "the step was skipped on all ranks"
    _micro(engine, rank, 4)
    with pytest.raises(RuntimeError, match=rf"{words}.*\(on 1 rank\(s\), first rank 1; that step was skipped on all"):
        engine.step()
    assert time.monotonic() - began < 30, "nobody waited for a time-out"
    _train(engine, rank, range(5, 7))
    assert engine.was_step_applied() and engine.skipped_steps == 1
    _weights(engine)


def _errors_on_one_rank(rank: int, stage: int) -> None:
    def breaks(engine: Engine, in_torch_style: bool = False) -> None:
        with pytest.raises(ArithmeticError, match="broken"):
            _micro(engine, rank, 3, breaks=True, in_torch_style=in_torch_style)

    for trouble, words in (
        (lambda engine: _micro(engine, rank, 3, sparse=True), r"'layers\.3\.weight' got a torch\.sparse_coo gradient"),
        (lambda engine: None, r"engine\.step\(\) without a backward since the last step"),
        (breaks, r"ended by an exception \(ArithmeticError: broken\)"),
        (lambda engine: breaks(engine, True), r"ended by an exception"),
        (lambda engine: _micro(engine, rank, 3, again=True), r"got gradient number 2 of one backward after its"),
    ):
        _an_error_reaches_every_rank(rank, stage, trouble, words)


def _errors_beside_a_curvature_estimate(rank: int, stage: int) -> None:
    """An update of the curvature between two steps loses no error: neither the step's before, nor its own."""
    for is_of_estimate in (False, True):
        engine = _train(_build(stage, optimizer=OPTIMIZERS["Sophia"]), rank, range(3))
        before = [param.detach().clone() for param in engine.module.parameters()]
        is_last = rank == WORLD - 1
        if not is_of_estimate:
            _micro(engine, rank, 3, sparse=is_last)
            engine.step()
        _micro(engine, rank, 4, sparse=is_of_estimate and is_last)
        engine.optimizer.update_curvature(7)
        if is_of_estimate:
            _train(engine, rank, [5])
        assert all(map(torch.equal, engine.module.parameters(), before)), "the step is skipped on all ranks"
        _micro(engine, rank, 6)
        with pytest.raises(
            RuntimeError, match=r"got a torch\.sparse_coo gradient.*first rank 1; that step was skipped"
        ):
            engine.step()
        _weights(engine)


def _given_up(rank: int, stage: int) -> None:
    """A backward that breaks on every rank, or on one while others have ended theirs; all drop it and go on."""
    for coalesced, in_torch_style in ((False, False), (False, True), (True, False)):
        for broken_ranks in ((0, 1), (1,)):
            engine = _train(_build(stage), rank, range(3))
            try:
                with engine.coalesce_grad_reduction() if coalesced else nullcontext():
                    _micro(engine, rank, 9, breaks=rank in broken_ranks, in_torch_style=in_torch_style)
            except ArithmeticError:
                assert rank in broken_ranks
            engine.zero_grad()
            _check_same(_train(engine, rank, range(3, 6)), rank)


# ---- between micro-batches


def _saved_and_evaluated(rank: int, stage: int, folder: str) -> None:
    engine = _build(stage, accumulation=2)
    for number in range(6):
        _train(engine, rank, [number])
        engine.eval()
        with torch.no_grad():
            engine(_input(50, rank))
        engine.train()
        if number % 2 == 0:
            engine.save_checkpoint(f"{folder}/{stage}", tag="middle")
    _check_same(engine, rank, accumulation=2)


def _loaded(rank: int, stage: int, folder: str) -> None:
    """In the middle of a step, whose gradients belong to other weights, broken off or not."""
    for breaks in (False, True):
        engine = _train(_build(stage, accumulation=2), rank, range(2))
        engine.save_checkpoint(f"{folder}/{stage}", tag="two")
        _train(engine, rank, [7])
        if breaks:
            with pytest.raises(ArithmeticError):
                _micro(engine, rank, 8, breaks=True)
        engine.load_checkpoint(f"{folder}/{stage}", tag="two")
        _check_same(_train(engine, rank, range(2, 6)), rank, accumulation=2)


def _unreadable(rank: int, stage: int, folder: str) -> None:
    engine = _train(_build(stage), rank, range(2))
    engine.save_checkpoint(folder, tag="two")
    [mine] = Path(folder, "two").glob(f"zero_pp_rank_{rank}_*")
    good = mine.read_bytes()
    for damage, words in (
        (lambda: mine.write_bytes(good[:1000]), r"\(on 1 rank\(s\), first rank 1\)"),
        (mine.unlink, r"No such file .* \(on 1 rank\(s\), first rank 1\)"),
    ):
        dist.barrier()
        if rank == 1:
            damage()
        with pytest.raises(ValueError, match=words):
            engine.load_checkpoint(folder, tag="two")
    engine.destroy()


def _other_batch_size(rank: int, stage: int) -> None:
    engine = _train(_build(stage, accumulation=2), rank, range(3))
    with pytest.raises(RuntimeError, match=r"set_train_batch_size\(18\) inside a step: gradients of some"):
        engine.set_train_batch_size(18)
    _train(engine, rank, [3])
    engine.set_train_batch_size(18)
    steps = [_train(engine, rank, [number]).global_steps for number in range(6)]
    assert steps == [2, 2, 3, 3, 3, 4], "each step is of three micro-batches"
    _train(engine, rank, [7])
    engine.zero_grad()
    engine.set_train_batch_size(engine.train_batch_size())  # after a step that was given up
    assert [_train(engine, rank, [number]).global_steps for number in range(3)] == [4, 4, 5]
    engine.destroy()


# ---- other models, frozen parameters


def _two_models(rank: int, stage: int) -> None:
    """A generator that learns through a discriminator, whose gradients from that it drops; against one process."""

    def models() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        return first, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def losses(make: Any, judge: Any, rank: int, number: int) -> Iterable[torch.Tensor]:
        x = _input(number, rank)
        yield F.softplus(-judge(_input(50 + number, rank))).mean() + F.softplus(judge(make(x).detach())).mean()
        yield F.softplus(-judge(make(x))).mean()

    makes, judges = (_build(stage, model) for model in models())
    for number in range(4):
        # In stage 2 the generator's loss goes around the discriminator's engine, which no hook tells of a backward.
        behind = judges if stage == 1 else judges.module
        for engine, loss in zip((judges, makes), losses(makes, behind, rank, number), strict=False):
            engine.backward(loss)
            engine.step()
        judges.zero_grad()
    serial = models()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4) for model in serial]
    for number in range(4):
        both = [losses(*serial, r, number) for r in range(WORLD)]
        for model, optimizer in zip(reversed(serial), reversed(optimizers), strict=True):
            for each in serial:
                each.zero_grad()
            torch.stack([next(iter(each)) for each in both]).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    for engine, model in zip((makes, judges), serial, strict=True):
        expected = torch.cat([param.detach().flatten() for param in model.parameters()])
        torch.testing.assert_close(_weights(engine), expected, rtol=0, atol=1e-5)


def _frozen(rank: int, stage: int) -> None:
    model = _Chain()
    model.layers[0].requires_grad_(False)
    engine = _train(_build(stage, model), rank, range(3))
    with pytest.raises(ValueError, match="Train batch size"):  # a second engine that fails leaves the first one
        _build(stage, model, accumulation=-1)
    model.layers[4].requires_grad_(False)  # from now on its gradient is a zero
    _train(engine, rank, range(3, 5))
    model.layers[4].requires_grad_(True)
    before = model.layers[4].weight.detach().clone()
    _train(engine, rank, range(5, 7))
    assert not torch.equal(model.layers[4].weight, before)
    model.layers[0].requires_grad_(True)
    _train(engine, rank, [7])
    with pytest.raises(RuntimeError, match=r"'layers\.0\.weight' was frozen when the engine was built"):
        _train(engine, rank, [8])
    engine.destroy()
    _train(_build(stage, model), rank, range(2)).destroy()


def _written(rank: int, stage: int) -> None:
    """fp32 parameters are the masters: weights that a program clips stay clipped."""
    engine = _train(_build(stage), rank, range(2))
    with torch.no_grad():
        for param in engine.module.parameters():
            param.clamp_(-0.01, 0.01)
    engine.optimizer.param_groups[0]["lr"] = 1e-5
    assert float(_weights(_train(engine, rank, [2])).abs().max()) < 0.011


def _scripts(rank: int, world: int, folder: str) -> None:
    deepspeed_ext.init_distributed()
    logging.getLogger("deepspeed_ext").setLevel(logging.CRITICAL)
    for stage in (1, 2):
        _errors_on_one_rank(rank, stage)
        _errors_beside_a_curvature_estimate(rank, stage)
        _given_up(rank, stage)
        _saved_and_evaluated(rank, stage, folder)
        _loaded(rank, stage, folder)
        _unreadable(rank, stage, f"{folder}/{stage}/damaged")
        _other_batch_size(rank, stage)
        _two_models(rank, stage)
        _frozen(rank, stage)
        _written(rank, stage)
    deepspeed_ext.shutdown()


def test_other_peoples_programs() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_distributed(_scripts, WORLD, folder)
