"""Expert gradients put by the backward into the optimizer's buffers: weights and memory, on two gloo ranks.

A first gradient is written over whatever is there: the buffers are filled with NaN before every step, and weights must
have the bits of runs whose producers never ask, and always add to zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import nn

import deepspeed_ext
from megatron.optimus.moe.experts import Experts
from megatron.optimus.ops import main_grad_of
from tests.distributed.layouts import deviation, model_config
from tests.helpers import run_distributed
from tests.ops.test_main_grads import peak_bytes

TOKENS, EXPERTS, TOPK = 24, 4, 2


class Stack(nn.Module):
    """Three layers of experts with given routing; ``shares``: the last is the first again."""

    def __init__(self, width: int, inner: int, dtype: torch.dtype, shares: bool = False) -> None:
        super().__init__()
        config = model_config(dict(num_experts=EXPERTS, hidden_size=width, moe_ffn_hidden_size=inner))
        self.layers = nn.ModuleList(Experts(config) for _ in range(2 if shares else 3))
        if shares:
            self.layers.append(self.layers[0])
        self.scale = nn.Parameter(torch.ones(width, dtype=dtype))
        generator = torch.Generator().manual_seed(4)
        for weight in self.layers.parameters():
            weight.data = (torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5).to(dtype)

    def forward(self, x: torch.Tensor, choice: int = EXPERTS, unused: int = -1) -> torch.Tensor:
        """The loss. ``choice``: the first so many experts are chosen among; ``unused``: a layer that is left out."""
        generator = torch.Generator().manual_seed(9)
        for place, layer in enumerate(self.layers):
            indices = torch.rand(TOKENS, choice, generator=generator).topk(TOPK).indices
            if place != unused:
                x = x + layer(x, torch.rand(TOKENS, TOPK, generator=generator), indices)
        return (x * self.scale).float().square().mean()


def _sharded(model: nn.Module, alone: bool = False, **options: Any) -> Any:
    """``alone``: each rank trains by itself."""
    assert dist.group.WORLD is not None
    names = {p: n for n, p in model.named_parameters() if p.requires_grad}
    groups = [{"params": [p for p in names if p.dim() > 1]}, {"params": [p for p in names if p.dim() == 1]}]
    return deepspeed_ext.EPZeroOptimizer(
        torch.optim.AdamW(groups, lr=1e-2, eps=1e-3),  # experts in buckets of their own, as in a model of ours
        names,
        groups=deepspeed_ext.ZeroGroups(dense=dist.new_subgroups(1)[0] if alone else dist.group.WORLD, expert={}),
        options=deepspeed_ext.ZeroOptions(**{"bucket_numel": 4096, **options}),
        module=model,
    )


def _train(model: Stack, rank: int, fuses: bool) -> list[torch.Tensor]:
    """Weights after three steps of two micro-batches."""
    optimizer = _sharded(model)
    experts = [weight for weight in model.layers.parameters() if weight.requires_grad]
    if not fuses:
        for weight in experts:
            weight.main_grad = None  # type: ignore[attr-defined]
    for step in range(3):
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            optimizer.set_gradient_accumulation_boundary(micro == 1)
            model(torch.randn(TOKENS, model.scale.numel(), generator=generator)).backward()
            assert not fuses or all(weight.grad is None for weight in experts)
            if micro == 1:  # in the first step nobody knows yet what comes this way
                assert step == 0 or all(bucket.is_reduced for bucket in optimizer._reducer.buckets)
                optimizer.reduce_gradients()
            optimizer.backward_epilogue()
        optimizer.step()
        assert all((main_grad_of(weight) is not None) is fuses for weight in experts)
    return [p.detach().clone() for p in model.parameters()]


def _same_weights(rank: int, world: int) -> dict[str, float]:
    found = {}
    for case in ("plain", "frozen", "shared"):
        runs = []
        for fuses in (True, False):
            model = Stack(16, 12, torch.float32, shares=case == "shared")
            if case == "frozen":
                model.layers[1].gate_up_weight.requires_grad_(False)  # type: ignore[union-attr]
            start = [p.detach().clone() for p in model.parameters()]
            runs.append(_train(model, rank, fuses))
        moved = [not torch.equal(a, b) for a, b in zip(start, runs[0], strict=True)]
        assert moved.count(False) == (case == "frozen")
        found[case] = max(deviation(a, b) for a, b in zip(*runs, strict=True))
    return found


def _peaks(rank: int, world: int) -> tuple[int, int, int]:
    """Bytes at the peak of a forward and backward in bf16, with and without; bytes of the experts' bf16 gradients.

    All are in one bucket, which takes gradients over when it has them all.
    """
    peaks = []
    for fuses in (True, False):
        model = Stack(128, 96, torch.bfloat16)
        optimizer = _sharded(model, bucket_numel=10**7)
        if not fuses:
            for weight in model.layers.parameters():
                weight.main_grad = None  # type: ignore[attr-defined]
        x = torch.randn(TOKENS, 128).bfloat16()
        optimizer.set_gradient_accumulation_boundary(False)

        def backward(model: Stack = model, x: torch.Tensor = x) -> None:
            model(x).backward()

        backward()  # the first one finds out who adds where
        optimizer.backward_epilogue()
        peaks.append(peak_bytes(backward))
        optimizer.backward_epilogue()
    weights = list(model.layers.parameters())
    return peaks[0], peaks[1], sum(weight.numel() * 2 for weight in weights)


def test_weights_equal_those_without() -> None:
    for found in run_distributed(_same_weights, 2):
        assert set(found) == {"plain", "frozen", "shared"}
        assert max(found.values()) < 2e-6, found


def test_no_gradient_of_the_experts_in_bf16_at_the_peak() -> None:
    for fused, plain, gradients in run_distributed(_peaks, 2):
        assert gradients > 800_000
        assert plain - fused >= 0.98 * gradients, (fused, plain, gradients)


class Run:
    """Three steps of a stack. ``asks``: its backward asks whether a buffer holds a sum, and NaN is in all of them when
    a step begins; else it adds to what is zeroed for it."""

    def __init__(self, rank: int, asks: bool, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.rank, self.asks, self.step = rank, asks, 0
        self.model = Stack(16, 12, dtype)
        self.optimizer = _sharded(self.model, **options)
        self.experts = list(self.model.layers.parameters())
        self.seen: list[torch.Tensor] = []
        for weight in self.experts:
            if not asks:
                weight.main_grad_holds_sum = None  # type: ignore[attr-defined]
        self.poison()

    def poison(self) -> None:
        for weight in self.experts if self.asks else ():
            weight.main_grad.fill_(math.nan)  # type: ignore[attr-defined]

    def loss(self, micro: int, **how: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * self.step + 10 * micro + self.rank)
        x = torch.randn(TOKENS, 16, generator=generator).to(self.model.scale.dtype).requires_grad_()
        if how.pop("breaks", False):  # when the layers' backwards have run
            x.register_hook(lambda _: 1 / 0)
        return self.model(x, **how)

    def backward(self, micro: int, last: bool, only: Any = None, ordinary: bool = False, **how: Any) -> None:
        self.optimizer.set_gradient_accumulation_boundary(last, only)
        if ordinary:  # as where weight gradients are computed apart
            weights = list(self.model.parameters())
            for weight, gradient in zip(weights, torch.autograd.grad(self.loss(micro, **how), weights), strict=True):
                weight.grad = gradient
        else:
            self.loss(micro, **how).backward()
        if last:
            self.optimizer.reduce_gradients()
        self.optimizer.backward_epilogue()

    def take_step(self) -> None:
        self.seen += [grad for weight in self.experts if (grad := safe_get_full_grad(weight)) is not None]
        self.optimizer.step()
        assert all(weight.grad is None and main_grad_of(weight) is not None for weight in self.experts)
        if self.step == 2:  # what a step leaves: nobody zeroes what will be written
            buffers = [weight.main_grad for weight in self.experts]  # type: ignore[attr-defined]
            assert any(bool(buffer.any()) for buffer in buffers) is self.asks
        self.poison()
        self.step += 1

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def _plain(run: Run, **how: Any) -> None:
    for _ in range(3):
        run.backward(0, False, **how)
        run.backward(1, True, **how)
        run.take_step()


def _first_written(run: Run) -> None:
    for _ in range(3):
        run.backward(0, True)
        run.take_step()


def _unused(run: Run) -> None:
    """A layer that both ranks leave out of a step, one of them, and both of them out of a micro-batch."""
    for step, left_out in enumerate((-1, 1, 1 if run.rank else -1)):
        run.backward(0, False, unused=1 if step == 2 else left_out)
        run.backward(1, True, unused=left_out)
        run.take_step()


def _ordinary(run: Run) -> None:
    """Gradients that come the ordinary way before one that is written, after it, and alone."""
    for ways in ((False, False), (True, False), (False, True), (True, True)):
        run.backward(0, False, ordinary=ways[0])
        run.backward(1, True, ordinary=ways[1])
        run.take_step()
        run.step = min(run.step, 2)


def _dropped(run: Run) -> None:
    """Sums that zero_grad drops: of a micro-batch, of one that an exception has ended, of such a last one."""
    run.backward(0, False)
    run.backward(1, True)
    run.take_step()
    run.backward(0, False)
    run.optimizer.zero_grad()
    run.poison()
    for last in (False, True):
        run.backward(0, False)
        try:
            run.backward(1, last, breaks=run.rank == 0)
        except ZeroDivisionError:
            assert run.rank == 0
        run.optimizer.zero_grad()
        run.poison()
    _plain(run)


def _overflow(run: Run) -> None:
    for step in range(3):
        run.backward(0, False)
        if step == 1:
            run.optimizer.set_gradient_accumulation_boundary(True)
            (run.loss(1) * math.inf).backward()
            run.optimizer.reduce_gradients()
            run.optimizer.backward_epilogue()
        else:
            run.backward(1, True)
        run.take_step()
        assert run.optimizer.overflow is (step == 1)


def _again(run: Run) -> None:
    """Backwards after a reduction in the same step, of all or of some buckets: of the first weight they cut one."""
    buckets = run.optimizer._reducer.buckets
    for _ in range(3):
        run.backward(0, True)
        run.backward(1, False)
        run.backward(2, True, only=buckets[::2])
        run.backward(3, True)
        run.take_step()


def _beyond(run: Run) -> None:
    """A backward reaches buckets that have been reduced and that it does not reduce; beside the ordinary way."""
    buckets, ordinary = run.optimizer._reducer.buckets, not run.asks
    for step in range(3):
        if step > 0:
            run.backward(0, True, only=buckets[::2], ordinary=ordinary)
            run.backward(1, True, only=buckets[1::2], ordinary=ordinary)
        run.backward(2, True, ordinary=ordinary and step > 0)
        run.take_step()


def _offloaded(run: Run) -> None:
    for _ in range(3):
        run.backward(0, False)
        run.optimizer.offload_states()
        run.optimizer.reload_states()
        run.backward(1, True)
        run.take_step()
        run.optimizer.offload_states()
        run.optimizer.reload_states()


BF16 = torch.bfloat16
SCENARIOS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "one micro-batch": (_first_written, {}),
    "two": (_plain, {}),
    "experts without tokens": (lambda run: _plain(run, choice=2), {}),
    "in 16 bits": (lambda run: _plain(run, choice=3), dict(dtype=BF16, grad_dtype=BF16)),
    "another dtype on the wire": (_plain, dict(comm_dtype=BF16)),
    "cut by buckets": (_plain, dict(bucket_numel=1000)),
    "each reduced": (_plain, dict(reduce_each_micro_batch=True, bucket_numel=1000)),
    "not overlapped": (_plain, dict(overlap_comm=False)),
    "unused": (_unused, {}),
    "unused, cut": (_unused, dict(bucket_numel=1000)),
    "ordinary": (_ordinary, {}),
    "ordinary, cut": (_ordinary, dict(bucket_numel=1000)),
    "dropped": (_dropped, {}),
    "overflow": (_overflow, {}),
    "again": (_again, dict(bucket_numel=1000)),
    "beyond": (_beyond, {}),
    "offloaded": (_offloaded, {}),
    "alone, unused": (_unused, dict(alone=True)),
    "alone, again": (_again, dict(alone=True, bucket_numel=1000)),
    "alone, stage 2": (_plain, dict(alone=True, stage=2)),
}


def _scenarios(rank: int, world: int) -> dict[str, bool]:
    found = {}
    for name, (train, options) in SCENARIOS.items():
        runs = [Run(rank, asks, **options) for asks in (True, False)]
        for run in runs:
            train(run)
        pairs = zip(runs[0].weights() + runs[0].seen, runs[1].weights() + runs[1].seen, strict=True)
        if train is _beyond:  # sums of another order
            same = [deviation(a, b) < 2e-6 for a, b in pairs]
        else:
            same = [torch.equal(a.nan_to_num(math.pi), b.nan_to_num(math.pi)) for a, b in pairs]  # of an overflow
        start = Stack(16, 12, runs[0].model.scale.dtype).parameters()
        moved = all(not torch.equal(a, b) for a, b in zip(start, runs[0].weights(), strict=True))
        found[name] = all(same) and moved and len(runs[0].seen) >= 3 * len(runs[0].experts)
    return found


def _stops_asking(rank: int, world: int) -> tuple[list[str], list[bool]]:
    """What is said of a producer that asks in the first step and not in the next, while another one never asks of its
    parameter; which of the two places is zero when a step begins."""
    run = Run(rank, True, overlap_comm=False)  # a gradient more than expected would come after the reduction
    errors: list[Exception] = []
    run.optimizer._reducer._errors.record = errors.append  # each of them would skip a step
    first, second = run.experts[:2]
    run.backward(0, False)
    second.main_grad_ready()  # type: ignore[attr-defined]
    run.backward(1, True)
    run.optimizer.step()
    zeroed = [not weight.main_grad.any() for weight in (first, second)]  # type: ignore[attr-defined]
    run.backward(0, False)
    for weight in (first, second):  # to what the backward has written
        weight.main_grad_ready()  # type: ignore[attr-defined]
    assert not errors
    run.optimizer.zero_grad()
    run.optimizer.set_gradient_accumulation_boundary(False)
    for weight in (first, second):
        weight.main_grad_ready()  # type: ignore[attr-defined]
    return [str(error) for error in errors], zeroed


def test_a_written_first_gradient_is_one_added_to_zeros() -> None:
    for found in run_distributed(_scenarios, 2):
        assert found == dict.fromkeys(SCENARIOS, True)


def test_a_producer_that_stops_asking_is_told() -> None:
    for errors, zeroed in run_distributed(_stops_asking, 2):
        assert zeroed == [False, True]
        assert len(errors) == 1 and "'layers.0.gate_up_weight' got a gradient added to main_grad, which" in errors[0]
