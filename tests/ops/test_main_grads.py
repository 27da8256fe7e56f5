"""The expert layer's backward writes main gradients and adds to them: values, when it must not, and what it saves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.optimus import ops
from megatron.optimus.config.schema import PipelineSchedule
from megatron.optimus.ops.backend import kernels, resolve
from tests.distributed.layouts import refusal
from tests.ops.cases import CASES, TOLERANCE, Case, case_with_answer, expected, make_inputs
from tests.ops.targets import ON_GPU, TARGETS, each_target_and_dtype

ADDING = [target for target in TARGETS if target.id != "sycl"]  # whose tests are in test_sycl.py: a start takes long
NAMED = ("one_token", "odd_tokens", "odd_widths", "empty_experts", "some_foreign", "none_local", "no_token")


class Layer:
    """Inputs of one layer; its two weights have main gradients that start with noise and count their additions."""

    def __init__(self, inputs: list[Tensor], device: str, wide: bool = True) -> None:
        x, gate_up, down, weights, self.indices, self.dy = (t.to(device) for t in inputs)
        self.x, self.weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
        self.params = [nn.Parameter(gate_up.clone()), nn.Parameter(down.clone())]
        generator = torch.Generator().manual_seed(1)
        self.starts, self.calls = [], [0, 0]
        for place, param in enumerate(self.params):
            noise = torch.randn(param.shape, generator=generator).to(device, torch.float32 if wide else param.dtype)
            self.starts.append(noise)
            param.main_grad, param.main_grad_ready = noise.clone(), self._counter(place)  # type: ignore[attr-defined]

    def _counter(self, place: int) -> Callable[[], None]:
        def ready() -> None:
            self.calls[place] += 1

        return ready

    def fill(self, value: float) -> None:
        for param in self.params:
            param.main_grad.fill_(value)  # type: ignore[attr-defined]

    def say(self, *holds_sum: bool) -> None:
        """Of each buffer, whether it holds a sum; without an argument there is nobody to ask."""
        for param, answer in zip(self.params, holds_sum or (None, None), strict=True):
            say = None if answer is None else lambda answer=answer: answer
            param.main_grad_holds_sum = say  # type: ignore[attr-defined]

    def forward(self, x: Tensor | None = None, tell: ops.InputGradients | None = None) -> Tensor:
        gate_up, down = self.params
        main_grads = (ops.main_grad_of(gate_up), ops.main_grad_of(down))
        return ops.moe_mlp(self.x if x is None else x, gate_up, down, self.weights, self.indices, main_grads, tell)

    def added(self) -> list[Tensor]:
        pairs = zip(self.params, self.starts, strict=True)
        return [param.main_grad.double() - start.double() for param, start in pairs]  # type: ignore[attr-defined]

    def is_untouched(self) -> bool:
        pairs = zip(self.params, self.starts, strict=True)
        return not any(self.calls) and all(torch.equal(p.main_grad, s) for p, s in pairs)  # type: ignore[attr-defined]


def error(actual: Tensor, wanted: Tensor) -> float:
    return ((actual.double().cpu() - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("wide", [True, False], ids=["fp32_buffer", "own_dtype"])
@pytest.mark.parametrize("name", [*NAMED, "one_of_two"])
@each_target_and_dtype(ADDING, TOLERANCE)
def test_two_backwards_add_twice(backend: str, device: str, dtype: torch.dtype, name: str, wide: bool) -> None:
    ops.set_backend(backend)
    inputs, want = case_with_answer(name, dtype)
    layer = Layer(inputs, device, wide)
    y = layer.forward()
    y.backward(layer.dy)
    first = layer.x.grad, layer.weights.grad
    layer.x.grad = layer.weights.grad = None
    layer.forward().backward(layer.dy)
    assert layer.calls == [2, 2] and all(param.grad is None for param in layer.params)

    # all but the weights' gradients is bitwise what the ordinary way computes
    plain = [t.detach().clone().requires_grad_() for t in (layer.x, *layer.params, layer.weights)]
    want_y = ops.moe_mlp(*plain, layer.indices)
    dx, *_, dweights = torch.autograd.grad(want_y, plain, layer.dy)
    assert torch.equal(y, want_y) and torch.equal(first[0], dx) and torch.equal(first[1], dweights)
    assert torch.equal(layer.x.grad, dx)

    rounding = 0.0 if wide else torch.finfo(dtype).eps * 2 * layer.starts[0].double().norm().item()
    for added, gradient in zip(layer.added(), (want["dgate_up"], want["ddown"]), strict=True):
        scale = gradient.norm().item()
        limit = 2 * TOLERANCE[dtype] * scale + 2 * rounding + 1e-5 * layer.starts[0].double().norm().item()
        assert (added.cpu() - 2 * gradient).norm().item() <= limit


@pytest.mark.parametrize("wide", [True, False], ids=["fp32_buffer", "own_dtype"])
@pytest.mark.parametrize("name", [*NAMED, "one_of_two", "all_to_one", "one_expert_exists"])
@each_target_and_dtype(ADDING, TOLERANCE)
def test_a_first_gradient_is_written_over_whatever_was_there(
    backend: str, device: str, dtype: torch.dtype, name: str, wide: bool
) -> None:
    """To the bits that come of adding it to zeros, so that a training that writes is one that zeroes and adds."""
    ops.set_backend(backend)
    inputs, want = case_with_answer(name, dtype)
    layer = Layer(inputs, device, wide)
    has_whole_and_halves = backend == "cuda"
    for tell in (None, lambda *_: None) if has_whole_and_halves else (None,):

        def run(*holds_sum: bool, tell: ops.InputGradients | None = tell) -> list[Tensor]:
            layer.say(*holds_sum)
            layer.forward(layer.x * 1, tell).backward(layer.dy)
            return [param.main_grad.clone() for param in layer.params]  # type: ignore[attr-defined]

        layer.fill(0.0)
        added, twice = run(), run()
        layer.fill(math.nan)
        assert all(map(torch.equal, run(False, False), added))
        layer.params[1].main_grad.fill_(math.nan)  # type: ignore[attr-defined]
        assert all(map(torch.equal, run(True, False), (twice[0], added[1])))  # each of its own
        layer.params[0].main_grad.fill_(math.nan)  # type: ignore[attr-defined]
        assert all(map(torch.equal, run(False, True), (added[0], twice[1])))
    for once, both, gradient in zip(added, twice, (want["dgate_up"], want["ddown"]), strict=True):
        limit = 2 * TOLERANCE[dtype] * gradient.norm()
        assert (once.double().cpu() - gradient).norm() <= limit
        assert (both.double().cpu() - 2 * gradient).norm() <= 2 * limit


# Pairs of tiles and odd ones, several tiles of columns, widths and depths that are no multiple of a tile.
MANY_TILES = (
    Case(3000, 320, 640, 5, 2),
    Case(700, 1032, 136, 20, 4, "some_foreign"),
    Case(512, 264, 72, 16, 1, "half_empty"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", MANY_TILES, ids=str)
@pytest.mark.parametrize("wide", [True, False], ids=["fp32_buffer", "own_dtype"])
@pytest.mark.parametrize(("backend", "device"), [target for target in TARGETS if target.id in ON_GPU])
def test_many_tiles_are_written(backend: str, device: str, wide: bool, case: Case) -> None:
    """Each element of the buffers by some tile, to the bits of adding to zeros; what surrounds them is left alone."""
    ops.set_backend(backend)
    layer = Layer(make_inputs(case, torch.bfloat16), device, wide)
    margins = []
    for param in layer.params:
        flat = torch.full((param.numel() + 128,), 7.0, dtype=param.main_grad.dtype, device=device)  # type: ignore[attr-defined]
        param.main_grad = flat[64:-64].view(param.shape)  # type: ignore[attr-defined]
        margins.append((flat[:64], flat[-64:]))
    results = []
    for answers, before in (((), 0.0), ((False, False), math.nan)):
        for tell in (None, lambda *_: None):
            layer.fill(before)
            layer.say(*answers)
            layer.forward(layer.x * 1, tell).backward(layer.dy)
            results.append([param.main_grad.clone() for param in layer.params])  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for others in results[1:] for a, b in zip(results[0], others, strict=True))
    assert all(bool(gradient.any()) for gradient in results[0])
    assert all(bool((margin == 7.0).all()) for pair in margins for margin in pair)


@pytest.mark.parametrize(("backend", "device"), ADDING)
def test_it_is_asked_once_a_gradient_and_in_the_backward(backend: str, device: str) -> None:
    layer = Layer(make_inputs(CASES["odd_tokens"], torch.float16), device)
    ops.set_backend(backend)
    events: list[tuple[str, int]] = []
    for place, param in enumerate(layer.params):
        param.main_grad_holds_sum = lambda place=place: events.append(("asked", place)) is not None  # type: ignore[attr-defined]
        param.main_grad_ready = lambda place=place: events.append(("ready", place))  # type: ignore[attr-defined]
    y = layer.forward()
    torch.autograd.grad(y, layer.params[:1], layer.dy, retain_graph=True)
    y.backward(layer.dy, inputs=[layer.x], retain_graph=True)
    assert not events
    y.backward(layer.dy)
    assert events == [("asked", 0), ("asked", 1), ("ready", 0), ("ready", 1)]
    layer.params[0].requires_grad_(False)
    events.clear()
    layer.forward().backward(layer.dy)
    assert events == [("asked", 1), ("ready", 1)]


@pytest.mark.parametrize(("backend", "device"), ADDING)
def test_sums_in_fp32_are_not_rounded_to_the_weights_dtype(backend: str, device: str) -> None:
    dtype = torch.float16 if backend in ON_GPU else torch.bfloat16
    inputs = make_inputs(CASES["odd_tokens"], dtype)
    ops.set_backend(backend)
    layer = Layer(inputs, device)
    for param in layer.params:
        param.main_grad.zero_()  # type: ignore[attr-defined]
    layer.forward().backward(layer.dy)
    for param in layer.params:
        buffer = param.main_grad  # type: ignore[attr-defined]
        assert (buffer != buffer.to(dtype).float()).float().mean() > 0.9


@pytest.mark.parametrize(("backend", "device"), ADDING)
def test_a_gradient_asked_for_is_returned_and_not_added(backend: str, device: str) -> None:
    inputs = make_inputs(CASES["some_foreign"], torch.float16)
    ops.set_backend(backend)
    layer, want = Layer(inputs, device), expected(inputs)
    (dgate_up,) = torch.autograd.grad(layer.forward(), layer.params[:1], layer.dy)
    assert error(dgate_up, want["dgate_up"]) < TOLERANCE[torch.float16]
    (dx,) = torch.autograd.grad(layer.forward(), [layer.x], layer.dy)
    assert error(dx, want["dx"]) < TOLERANCE[torch.float16]
    layer.forward().backward(layer.dy, inputs=[layer.x])
    assert layer.is_untouched() and all(param.grad is None for param in layer.params)
    layer.forward().backward(layer.dy, inputs=[layer.x, layer.params[1]])
    assert layer.calls == [0, 1] and layer.params[0].grad is None
    assert error(layer.added()[1], want["ddown"]) < 2 * TOLERANCE[torch.float16]


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize(("backend", "device"), ADDING)
def test_recomputation_adds_once(backend: str, device: str, is_reentrant: bool) -> None:
    inputs = make_inputs(CASES["odd_tokens"], torch.float16)
    ops.set_backend(backend)
    layer = Layer(inputs, device)
    checkpoint(layer.forward, layer.x, use_reentrant=is_reentrant).backward(layer.dy)
    assert layer.calls == [1, 1]
    want = expected(inputs)
    for added, name in zip(layer.added(), ("dgate_up", "ddown"), strict=True):
        assert error(added, want[name]) < 2 * TOLERANCE[torch.float16]


@pytest.mark.parametrize(("backend", "device"), ADDING)
def test_a_frozen_weight_gets_nothing(backend: str, device: str) -> None:
    inputs = make_inputs(CASES["odd_tokens"], torch.float16)
    ops.set_backend(backend)
    layer, want = Layer(inputs, device), expected(inputs)
    layer.params[0].requires_grad_(False)
    layer.forward().backward(layer.dy)
    assert layer.calls == [0, 1] and torch.equal(layer.params[0].main_grad, layer.starts[0])  # type: ignore[attr-defined]
    assert layer.params[0].grad is None and error(layer.added()[1], want["ddown"]) < 2 * TOLERANCE[torch.float16]
    layer.params[1].main_grad = None  # type: ignore[attr-defined]  # one weight of two, the ordinary way
    layer.params[0].requires_grad_(True)
    layer.forward().backward(layer.dy)
    assert layer.calls == [1, 1] and layer.params[1].grad is not None
    assert error(layer.params[1].grad, want["ddown"]) < TOLERANCE[torch.float16]


@pytest.mark.parametrize(("backend", "device"), ADDING)
def test_input_gradients_are_told_once_and_before_the_last_product(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(CASES["some_foreign"], torch.float16)
    ops.set_backend(backend)
    layer, want = Layer(inputs, device), expected(inputs)
    events: list[str] = []
    told: list[tuple[Tensor, Tensor]] = []

    def tell(dx: Tensor, dweights: Tensor) -> None:
        events.append("told")
        told.append((dx.clone(), dweights.clone()))

    chosen = resolve(layer.x.device, layer.x.dtype)
    run: Any = ops.reference if backend == "reference" else kernels(chosen)
    halves = ["told", "last product"] if hasattr(run, "moe_mlp_backward_up_weights") else ["told"]
    assert len(halves) == 1 + (backend != "cpu")
    if len(halves) == 2:
        last_product = run.moe_mlp_backward_up_weights
        monkeypatch.setattr(
            run, "moe_mlp_backward_up_weights", lambda *args: events.append("last product") or last_product(*args)
        )
    for main_grads in ((None, None), tuple(map(ops.main_grad_of, layer.params))):
        events.clear()
        x = layer.x * 1  # as rows that were dispatched: no leaf
        arguments = (x, *layer.params, layer.weights, layer.indices)
        layer.x.grad = layer.weights.grad = None
        ops.moe_mlp(*arguments, main_grads, tell).backward(layer.dy)
        assert events == halves
        dx, dweights = told[-1]
        assert torch.equal(dx, layer.x.grad) and torch.equal(dweights, layer.weights.grad)
        assert error(dx, want["dx"]) < TOLERANCE[torch.float16]
        grads = layer.added() if main_grads[0] else [param.grad for param in layer.params]
        for gradient, name in zip(grads, ("dgate_up", "ddown"), strict=True):
            assert error(gradient, want[name]) < 2 * TOLERANCE[torch.float16]
        for param in layer.params:
            param.grad = None
        # Asked for the weights' gradients alone: nobody would wait for a combine, so a whole backward may run.
        torch.autograd.grad(ops.moe_mlp(*arguments, main_grads, tell), layer.params, layer.dy)
        assert events == [*halves, *([] if hasattr(run, "moe_mlp_backward") else halves[1:])]
    with torch.no_grad():
        assert ops.moe_mlp(*arguments, (None, None), tell).grad_fn is None


def test_split_backwards_of_zero_bubble_pipelines_go_the_ordinary_way() -> None:
    """Input gradients first, weights' later: the layer's backward runs twice, and must not add twice."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    if reason := refusal(PipelineSchedule.ZBV):
        pytest.skip(reason)
    inputs = make_inputs(CASES["odd_tokens"], torch.float32)
    layer, want = Layer(inputs, "cpu"), expected(inputs)
    _, groups = stage_backward_input([layer.forward()], [layer.dy], [layer.x], iter(layer.params))
    stage_backward_weight(iter(layer.params), groups)
    assert layer.is_untouched()
    for param, name in zip(layer.params, ("dgate_up", "ddown"), strict=True):
        assert param.grad is not None and error(param.grad, want[name]) < TOLERANCE[torch.float32]


def _drop(name: str) -> Callable[[nn.Parameter], Any]:
    return lambda param: delattr(param, name)


@pytest.mark.parametrize(
    "spoil",
    [
        _drop("main_grad"),
        _drop("main_grad_ready"),
        lambda p: setattr(p, "main_grad", None),
        lambda p: setattr(p, "main_grad", p.main_grad.double()),
        lambda p: setattr(p, "main_grad", p.main_grad[:1]),
        lambda p: setattr(p, "main_grad", p.main_grad.transpose(1, 2).contiguous().transpose(1, 2)),
        lambda p: setattr(p, "main_grad", torch.zeros(p.numel() + 1)[1:].view_as(p)),
        lambda p: p.register_hook(lambda gradient: 2 * gradient),
    ],
    ids=["no_buffer", "nobody_to_tell", "given_up", "dtype", "shape", "strides", "address", "hook"],
)
def test_what_does_not_fit_takes_the_ordinary_way(spoil: Callable[[nn.Parameter], Any]) -> None:
    layer = Layer(make_inputs(CASES["odd_tokens"], torch.float32), "cpu")
    spoil(layer.params[0])
    assert ops.main_grad_of(layer.params[0]) is None and ops.main_grad_of(layer.params[1]) is not None
    layer.forward().backward(layer.dy)
    assert layer.calls == [0, 1] and layer.params[0].grad is not None and layer.params[1].grad is None


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda b: b.int(), "main_grad torch.int32"),
        (lambda b: b[:1], r"main_grad .* \(1, "),
        (lambda b: b.bfloat16(), "main_grad torch.bfloat16"),
        (lambda b: b.transpose(1, 2).contiguous().transpose(1, 2), "main_grad .* with strides"),
        (lambda b: b.to("meta"), "main_grad is on meta but its weight on cpu"),
    ],
    ids=["int", "shape", "narrow", "strides", "device"],
)
def test_a_buffer_that_does_not_fit_is_refused_in_the_forward(
    backend: str, spoil: Callable[[Tensor], Tensor], what: str
) -> None:
    ops.set_backend(backend)
    x, gate_up, down, weights, indices, _ = make_inputs(CASES["odd_tokens"], torch.float32)
    place = ops.MainGrad(spoil(torch.zeros(down.shape)), lambda: None)
    with pytest.raises(ValueError, match=what):
        ops.moe_mlp(x, gate_up, down, weights, indices, (None, place))


def test_without_gradients_nothing_is_kept() -> None:
    layer = Layer(make_inputs(CASES["odd_tokens"], torch.float32), "cpu")
    with torch.no_grad():
        assert layer.forward().grad_fn is None
    assert layer.is_untouched()


def test_a_compiled_graph_gives_gradients_the_ordinary_way() -> None:
    inputs = make_inputs(CASES["odd_tokens"], torch.float32)
    layer, want = Layer(inputs, "cpu"), expected(inputs)
    torch.compile(layer.forward, backend="aot_eager", fullgraph=True)().backward(layer.dy)
    assert layer.is_untouched()
    for param, name in zip(layer.params, ("dgate_up", "ddown"), strict=True):
        assert param.grad is not None and error(param.grad, want[name]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_so_it_does_where_main_gradients_are_given_to_it(backend: str, fullgraph: bool) -> None:
    torch.compiler.reset()  # a compiled function keeps its backend
    ops.set_backend(backend)
    inputs = make_inputs(CASES["odd_tokens"], torch.float32)
    layer, want = Layer(inputs, "cpu"), expected(inputs)
    main_grads = tuple(ops.main_grad_of(param) for param in layer.params)
    assert None not in main_grads

    def forward(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return ops.moe_mlp(x, gate_up, down, layer.weights, layer.indices, main_grads, lambda *_: layer.calls.append(0))

    run = torch.compile(forward, backend="aot_eager", fullgraph=fullgraph)
    run(layer.x, *layer.params).backward(layer.dy)
    assert layer.is_untouched() and len(layer.calls) == 2
    for param, name in zip(layer.params, ("dgate_up", "ddown"), strict=True):
        assert param.grad is not None and error(param.grad, want[name]) < TOLERANCE[torch.float32]


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most that is allocated on the CPU at a time while ``run`` runs, above what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as trace:
        run()
    events = trace.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    now = most = 0
    for _, size in sorted(sizes, key=lambda pair: pair[0]):
        now += size
        most = max(most, now)
    return most


def test_peak_memory_falls_by_the_weights_gradients() -> None:
    """Three layers in bf16 with fp32 buffers: no gradient in the weights' dtype exists at any time."""
    inputs = make_inputs(Case(16, 128, 64, 8, 2), torch.bfloat16)
    peaks = []
    for is_fused in (True, False):
        layers = [Layer(inputs, "cpu") for _ in range(3)]
        for layer in layers:
            if not is_fused:
                for param in layer.params:
                    del param.main_grad

        def run(layers: list[Layer] = layers) -> None:
            x = layers[0].x
            for layer in layers:
                x = layer.forward(x)
            x.backward(layers[0].dy)

        run()
        for layer in layers:
            for param in layer.params:
                param.grad = None
        peaks.append(peak_bytes(run))
    gradients = 3 * sum(t.numel() * 2 for t in inputs[1:3])
    assert gradients > 1_000_000
    assert peaks[1] - peaks[0] >= 0.95 * gradients
