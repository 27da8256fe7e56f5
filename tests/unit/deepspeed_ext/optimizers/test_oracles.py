"""Each optimizer against a well-kept implementation: the weights after ten steps, alone and on shards of any cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_ext.optimizers import Shard, StepScalars, own_optimizer, shard_optimizer_for
from deepspeed_ext.optimizers.base import CurvatureOptimizer
from deepspeed_ext.optimizers.schedule_free import warmup_and_weight
from deepspeed_ext.optimizers.whole_tensors import (
    TensorOptimizer,
    WholeTensors,
    run_in_rounds,
    runs_in,
    tensors_of,
)

library = pytest.importorskip("pytorch_optimizer")
schedulefree = pytest.importorskip("schedulefree")

SHAPES = {"matrix": (12, 20), "vector": (7,), "wide": (3, 50)}
STEPS, LR, DECAY = 10, 1e-2, 0.1
B2, B3 = (0.9, 0.95), (0.9, 0.95, 0.999)
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adafactor(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.3, weight_decay=DECAY * LR / 0.3)


def adopt(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """As the authors' code: the first step decays nothing, and the t-th update is clipped to t^(1/4)."""
    for param in params:
        param.data /= 1 - LR * DECAY
    clip = lambda step: (step - 1) ** 0.25  # noqa: E731
    return library.ADOPT(params, lr=LR, betas=B2, weight_decay=DECAY, weight_decouple=True, clip_lambda=clip)


def cautious(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdEMAMix without its slow momentum is AdamW."""
    decoupled: dict[str, Any] = {"weight_decay": DECAY, "weight_decouple": True}
    return library.AdEMAMix(params, lr=LR, betas=B3, alpha=0.0, cautious=True, **decoupled)


def ademamix(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    decoupled: dict[str, Any] = {"weight_decay": DECAY, "weight_decouple": True}
    return library.AdEMAMix(params, lr=LR, betas=B3, alpha=4.0, t_alpha_beta3=6, **decoupled)


def mars(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    of_vectors = {"lr_1d": LR, "weight_decay_1d": DECAY}
    return library.MARS(params, lr=LR, weight_decay=DECAY, gamma=0.05, **of_vectors)


def lamb(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return library.Lamb(params, lr=LR, betas=B2, weight_decay=DECAY, weight_decouple=False, adam_debias=True)


def lars(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return library.LARS(params, lr=LR, weight_decay=DECAY, trust_coefficient=0.3)


def schedule_free_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return schedulefree.AdamWScheduleFree(params, lr=LR, betas=B2, weight_decay=DECAY, warmup_steps=4)


def schedule_free_sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return schedulefree.SGDScheduleFree(params, lr=LR, weight_decay=DECAY, warmup_steps=4)


CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "adafactor": (adafactor, {"lr": 0.3, "weight_decay": DECAY * LR / 0.3}),
    "adopt": (adopt, {"betas": B2}),
    "ademamix": (ademamix, {"betas": B3, "alpha": 4.0, "warmup_iters": 6}),
    "cautious-adamw": (cautious, {"betas": B2}),
    "mars": (mars, {"gamma": 0.05}),
    "lamb": (lamb, {"betas": B2, "correct_bias": False}),
    "lars": (lars, {"trust_coefficient": 0.3}),
    "schedule-free-adamw": (schedule_free_adamw, {"betas": B2, "warmup_iters": 4}),
    "schedule-free-sgd": (schedule_free_sgd, {"warmup_iters": 4}),
}


def initial() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, Tensor]:
    """Large ones in some steps, so that what clips them shows."""
    generator = torch.Generator().manual_seed(100 + step)
    scale = 3.0 if step % 3 == 2 else 0.1
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in SHAPES.items()}


def expected(make: Make) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What gradients are taken at, and what is evaluated, which differ for schedule-free ones."""
    params = {name: nn.Parameter(value.clone()) for name, value in initial().items()}
    optimizer: Any = make(list(params.values()))
    has_modes = hasattr(optimizer, "eval")
    if has_modes:
        optimizer.train()
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            params[name].grad = gradient.clone()
        optimizer.step()
    trained = {name: param.detach().clone() for name, param in params.items()}
    if has_modes:
        optimizer.eval()
    return trained, {name: param.detach().clone() for name, param in params.items()}


class Cut:
    """All parameters one after the other, with padding between, in shards of ``length``, as a flat buffer has them."""

    def __init__(self, optimizer: torch.optim.Optimizer, length: int, dtype: torch.dtype) -> None:
        self.group = optimizer.param_groups[0]
        self.optimizer = shard_optimizer_for(optimizer, self.group)
        self.places, end = {}, 0
        for name, shape in SHAPES.items():
            self.places[name] = slice(end, end + torch.Size(shape).numel())
            end += torch.Size(shape).numel() + 9
        self.flat = torch.zeros(-(-end // length) * length)
        for name, value in initial().items():
            self.flat[self.places[name]] = value.flatten()
        self.shards = [
            Shard(part.clone(), torch.empty(0), part.to(dtype, copy=True)) for part in self.flat.split(length)
        ]
        for shard in self.shards:
            shard.state = self.optimizer.new_state(shard, self.group)
        self.length = length
        whole = [tensor for name, shape in SHAPES.items() for tensor in tensors_of(name, shape)]
        ranges = [list(self._ranges(index * length)) for index in range(len(self.shards))]
        self.tensors = WholeTensors(whole, ranges, torch.device("cpu"))
        if isinstance(self.optimizer, TensorOptimizer):
            self.tensors.state = self.optimizer.new_tensor_state(self.tensors, self.group)

    def _ranges(self, low: int) -> Any:
        for name, place in self.places.items():
            start, stop = max(place.start, low), min(place.stop, low + self.length)
            if start < stop:
                yield name, start - place.start, stop - place.start, start - low

    def _take(self, grads: dict[str, Tensor], number: int, skip: bool) -> StepScalars:
        flat = torch.zeros_like(self.flat)
        for name, gradient in grads.items():
            flat[self.places[name]] = gradient.flatten() * 4
        for shard, part in zip(self.shards, flat.split(self.length), strict=True):
            shard.grad = part.clone()
        return StepScalars.of(torch.device("cpu"), number, 0.25, skip)

    def estimate(self, grads: dict[str, Tensor], num_labels: float, *, skip: bool = False) -> None:
        scalars = self._take(grads, 1, skip)
        for shard in self.shards:
            assert isinstance(self.optimizer, CurvatureOptimizer)
            self.optimizer.update_curvature_(shard, self.group, scalars, torch.tensor(num_labels))

    def step(self, number: int, grads: dict[str, Tensor], *, skip: bool = False) -> None:
        scalars = self._take(grads, number, skip)
        if isinstance(self.optimizer, TensorOptimizer):
            run_in_rounds([(self.optimizer.update_tensors_(self.shards, self.tensors, self.group, scalars), ())])
            return
        for shard in self.shards:
            self.optimizer.update_(shard, self.group, scalars)

    def of(self, which: str) -> dict[str, Tensor]:
        flat = torch.cat([getattr(shard, which) for shard in self.shards])
        named = {name: flat[place].view(SHAPES[name]).clone() for name, place in self.places.items()}
        for place in self.places.values():
            flat[place] = 0
        assert not flat.any(), "padding stays zero"
        return named


def assert_close(actual: dict[str, Tensor], wanted: dict[str, Tensor], start: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        moved = (value - start[name]).abs().max()
        assert (actual[name] - value).abs().max() <= 2e-5 * moved, name


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_the_oracle_alone_and_on_shards(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options = CASES[name]
    trained, evaluated = expected(make)
    params = {key: nn.Parameter(value.clone()) for key, value in initial().items()}
    options = {"lr": LR, "weight_decay": DECAY} | options
    ours = own_optimizer(name)(params.values(), **options)
    monkeypatch.setattr("deepspeed_ext.optimizers.blocks.CPU_BLOCK", 256)
    cut = Cut(own_optimizer(name)([torch.zeros(1)], **options), 300, torch.float32)
    for step in range(STEPS):
        for key, gradient in gradients(step).items():
            params[key].grad = gradient.clone()
        ours.step()
        cut.step(step + 1, {key: value * torch.nan for key, value in gradients(step).items()}, skip=True)
        cut.step(step + 1, gradients(step))
    assert_close({key: param.detach() for key, param in params.items()}, trained, initial())
    assert_close(cut.of("param"), trained, initial())
    assert_close(cut.of("master"), evaluated, initial())


@pytest.mark.parametrize("name", sorted({*CASES, "sophia"} - {"adafactor", "schedule-free-adamw", "schedule-free-sgd"}))
@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 0.05), ("int8", 0.3)])
def test_states_in_fewer_bits_stay_near_and_a_skipped_step_changes_none(
    name: str, dtype: str, tolerance: float
) -> None:
    exact = Cut(own_optimizer(name)([torch.zeros(1)], lr=LR), 512, torch.bfloat16)
    rounded = Cut(own_optimizer(name)([torch.zeros(1)], lr=LR, state_dtype=dtype), 512, torch.bfloat16)
    for step in range(STEPS):
        for cut in (exact, rounded):
            if step == 0 and name == "sophia":
                cut.estimate(gradients(50), 32.0)
            cut.step(step + 1, gradients(step))
    wanted, found, start = exact.of("master"), rounded.of("master"), initial()
    for key, value in wanted.items():
        moved = (value - start[key]).norm()
        assert 0 < (found[key] - value).norm() <= tolerance * moved, key
    assert all(torch.equal(shard.param, shard.master.bfloat16()) for shard in rounded.shards)
    before = [[t.clone() for t in (s.master, s.param, *s.state.values())] for s in rounded.shards]
    rounded.step(STEPS + 1, {key: value * torch.nan for key, value in gradients(0).items()}, skip=True)
    after = [[s.master, s.param, *s.state.values()] for s in rounded.shards]
    assert all(torch.equal(a, b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))


def test_lamb_corrects_the_bias_as_the_paper_says() -> None:
    weight, grad = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    param = nn.Parameter(weight.float())
    param.grad = grad.float()
    own_optimizer("lamb")([param], lr=0.1, betas=(0.9, 0.99), weight_decay=0.2, eps=1e-6).step()
    direction = grad / (grad.abs() + 1e-6) + 0.2 * weight
    wanted = weight - 0.1 * weight.norm() / (direction.norm() + 1e-6) * direction
    torch.testing.assert_close(param.detach().double(), wanted, rtol=1e-5, atol=1e-6)


def test_each_expert_is_a_tensor_of_its_own() -> None:
    stack = torch.randn(4, 6, 5)
    whole, parts = nn.Parameter(stack.clone()), [nn.Parameter(part.clone()) for part in stack]
    one, other = (own_optimizer("lamb")(params, lr=0.1) for params in ([whole], parts))
    for step in range(3):
        whole.grad = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(step)) * torch.arange(1, 5).view(
            4, 1, 1
        )
        for part, gradient in zip(parts, whole.grad, strict=True):
            part.grad = gradient.clone()
        one.step()
        other.step()
    torch.testing.assert_close(whole.detach(), torch.stack([part.detach() for part in parts]))


def test_runs_cover_every_element_once() -> None:
    for start, stop, numel in ((0, 24, 6), (3, 23, 6), (7, 11, 6), (5, 31, 8), (0, 5, 9)):
        found = [
            (run.first + (run.offset + k) // numel, (run.offset + k) % numel, run.start + k)
            for run in runs_in(start, stop, 100, numel, 2)
            for k in range(run.count * run.length)
        ]
        assert found == [(2 + i // numel, i % numel, 100 + i - start) for i in range(start, stop)]


def test_sophia_equals_its_definition() -> None:
    """Algorithm 3 of the paper with the Gauss-Newton-Bartlett estimate, in fp64."""
    options: dict[str, Any] = {"betas": (0.96, 0.9), "gamma": 0.03, "eps": 1e-12}
    cut = Cut(own_optimizer("sophia")([torch.zeros(1)], lr=LR, weight_decay=DECAY, **options), 300, torch.bfloat16)
    theta = {name: value.double() for name, value in initial().items()}
    m, h = ({name: torch.zeros_like(value) for name, value in theta.items()} for _ in range(2))
    clipped = 0.0
    for step in range(STEPS):
        if step % 4 == 0:
            cut.estimate({name: value * torch.nan for name, value in gradients(0).items()}, 32.0, skip=True)
            cut.estimate(gradients(50 + step), 32.0)
            for name, value in gradients(50 + step).items():
                h[name] = 0.9 * h[name] + 0.1 * 32 * value.double() ** 2
        cut.step(step + 1, gradients(step))
        for name, gradient in gradients(step).items():
            m[name] = 0.96 * m[name] + 0.04 * gradient.double()
            ratio = m[name] / (0.03 * h[name]).clamp(min=1e-12)
            clipped += (ratio.abs() > 1).double().mean().item() / STEPS / len(SHAPES)
            theta[name] = theta[name] * (1 - LR * DECAY) - LR * ratio.clamp(-1, 1)
    assert 0.1 < clipped < 0.9, "both sides of the clipping must occur"
    assert_close(cut.of("master"), {name: value.float() for name, value in theta.items()}, initial())


def test_the_weights_of_the_average_are_those_of_the_warm_up() -> None:
    for warmup in (0, 1, 5):
        factors = [min(1.0, t / max(1, warmup)) for t in range(1, 12)]
        for t, factor in enumerate(factors, start=1):
            found, weight = warmup_and_weight(torch.tensor(float(t)), warmup)
            assert found.item() == pytest.approx(factor)
            assert weight.item() == pytest.approx(factor**2 / sum(f**2 for f in factors[:t]))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adopt", {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) are out of range"),
        ("ademamix", {"alpha": -1.0}, "alpha=-1.0 must not be negative"),
        ("ademamix", {"betas": (0.0, 0.9, 0.99), "warmup_iters": 5}, "warmup_iters=5 needs betas"),
        ("sophia", {"lr": float("nan")}, "lr=nan must not be negative"),
    ],
)
def test_bad_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        own_optimizer(name)([torch.zeros(1)], **options)


@pytest.mark.parametrize("name", ["schedule-free-adamw", "schedule-free-sgd"])
def test_schedule_free_states_are_weights(name: str) -> None:
    optimizer = own_optimizer(name)([torch.zeros(1)], state_dtype="bf16")
    with pytest.raises(ValueError, match="state_dtype='bf16': schedule-free optimizers keep z"):
        Cut(optimizer, 512, torch.bfloat16)


@pytest.mark.parametrize("name", ["lamb", "mars", "lars", "cautious-adamw"])
def test_one_shard_has_no_whole_tensors(name: str) -> None:
    optimizer = own_optimizer(name)([torch.zeros(1)])
    shard = Shard(*(torch.zeros(2),) * 3)
    with pytest.raises(TypeError, match="needs sums over whole tensors; use update_tensors_"):
        shard_optimizer_for(optimizer, optimizer.param_groups[0]).update_(
            shard, {}, StepScalars.of(shard.master.device, 1)
        )
