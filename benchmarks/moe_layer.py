"""Speed of one MoE layer, router included, against other implementations: same process, same inputs, medians.

On a GPU:  python benchmarks/moe_layer.py --tokens 8192 16384 32768 --out benchmarks/results/moe_layer_h200
On a CPU:  python benchmarks/moe_layer.py --device cpu --out benchmarks/results/moe_layer_cpu
Several runs in one table and chart:  python benchmarks/moe_layer.py --merge A.json B.json --out ALL
Every repetition times each implementation once, in a random order (seeded), after overwriting the GPU's level-2 cache.
With --sustained S each also runs for S seconds without a pause, in three turns: the GPU's power limit then decides.
With --held N each also runs while another kernel holds N multiprocessors, as NCCL's do in training.
"optimus" is the backend that is chosen by default, optimus-NAME the backend NAME. optimus+add and optimus+main_grad
also sum the expert weights' gradients in fp32 buffers: with an addition after the backward, and inside it;
optimus+write has the backward write them there, as the first of a step. An implementation that is not installed, cannot
run here or fails is named and left out. FLOPs are those of the experts' products: 18*T*K*D*F forward and backward.
MODEL/epN is the layer of one of N ranks that share the experts: it has the Nth part of them, and all T*K slots of its T
tokens fall to these, as many as come to a rank when each of the N has T tokens and routing is balanced.
Besides a printed table: OUT.json with every time and its commit, OUT.png with a bar chart. Exit code 1: no result.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from device_check import require_device
from moe_layer_clock import Clock, make_held, most_held, print_kernels
from moe_layer_peers import PEERS, Inputs
from moe_layer_report import begin, merge, out_path, plot, print_table, with_ending, write
from moe_layer_shapes import ON_CPU, ON_GPU, shape_name, shape_of
from provenance import commit
from sustained import sustained

from megatron.optimus import ops

DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}


def make_inputs(shape: tuple[int, int, int, int], tokens: int, zipf: float, device: str, dtype: torch.dtype) -> Inputs:
    """Random weights and tokens. A direction common to all tokens carries log-probabilities rank**-zipf per expert.

    Ranks are dealt to the experts at random: an order by popularity would suit some schedules and not others.
    """
    width, inner, experts, topk = shape
    torch.manual_seed(0)

    def randn(*size: int, scale: float) -> Tensor:
        return (torch.randn(*size, device=device) * scale).to(dtype)

    direction = torch.randn(width, device=device)
    bias = -zipf * (torch.randperm(experts, device=device) + 1).log()
    router = torch.randn(experts, width, device=device) / width**0.5
    router = router + bias[:, None] * direction / direction.square().sum()
    x = torch.randn(tokens, width, device=device) + (direction if zipf else 0.0)
    return Inputs(
        x.to(dtype).requires_grad_(),
        router.to(dtype).requires_grad_(),
        randn(experts, 2 * inner, width, scale=width**-0.5).requires_grad_(),
        randn(experts, width, inner, scale=inner**-0.5).requires_grad_(),
        randn(tokens, width, scale=1.0),
        topk,
    )


def route(data: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens, for the experts, and each one's weights and choice of experts: as in the model, logits in fp32."""
    routing, _, x = ops.route(data.x, data.router, data.topk, normalize=True)
    return x, routing.weights_TK, routing.indices_TK


def optimus(backend: str) -> Callable[[Inputs], Callable[[], Tensor]]:
    def build(data: Inputs) -> Callable[[], Tensor]:
        def run() -> Tensor:
            ops.set_backend(backend)  # every time: implementations take turns
            x, weights, indices = route(data)
            return ops.moe_mlp(x, data.gate_up, data.down, weights, indices)

        return run

    return build


IMPLEMENTATIONS: dict[str, Callable[[Inputs], Callable[[], Tensor]]] = {
    "optimus": optimus("auto"),
    **{f"optimus-{name}": optimus(name) for name in ("cuda", "triton", "cpu", "reference")},
    "optimus+add": optimus("auto"),
    "optimus+main_grad": optimus("auto"),
    "optimus+write": optimus("auto"),
    **PEERS,
}


@dataclass
class Layer:
    """One implementation on its own inputs."""

    data: Inputs
    forward: Callable[[], Tensor]

    def both(self) -> None:
        torch.autograd.grad(self.forward(), self.data.leaves(), self.data.dy)


class Accumulating(Layer):
    """Gradients of the expert weights are summed in fp32 buffers, where an optimizer keeps them."""

    def __init__(self, data: Inputs, forward: Callable[[], Tensor]) -> None:
        super().__init__(data, forward)
        self.buffers = [torch.zeros_like(weight, dtype=torch.float32) for weight in (data.gate_up, data.down)]

    def both(self) -> None:
        *_, dgate_up, ddown = torch.autograd.grad(self.forward(), self.data.leaves(), self.data.dy)
        torch._foreach_add_(self.buffers, [dgate_up, ddown])


class AddingBackward(Accumulating):
    """The backward adds to the buffers itself (ops/main_grads.py)."""

    holds_sum = True

    def __init__(self, data: Inputs, _forward: Callable[[], Tensor]) -> None:
        super().__init__(data, self._forward)
        self.main_grads = tuple(ops.MainGrad(b, lambda: None, lambda: self.holds_sum) for b in self.buffers)

    def _forward(self) -> Tensor:
        ops.set_backend("auto")
        data = self.data
        x, weights, indices = route(data)
        return ops.moe_mlp(x, data.gate_up, data.down, weights, indices, self.main_grads)

    def both(self) -> None:
        self.forward().backward(self.data.dy)
        self.data.x.grad = self.data.router.grad = None


class WritingBackward(AddingBackward):
    """The backward writes the buffers, which nobody need zero then."""

    holds_sum = False


LAYERS = {"optimus+add": Accumulating, "optimus+main_grad": AddingBackward, "optimus+write": WritingBackward}


def share_of_differing_tokens(y_TD: Tensor, expected_TD: Tensor, expected_name: str) -> float:
    """Share of the tokens whose outputs are further than 3% of their norm from what is expected.

    A peer's router that rounds logits to bf16 chooses another last expert for 1 to 2% of the tokens, those whose logits
    nearly tie, so not every token has to agree. One expert of 96 left out would show in 8% of them (8 experts each):
    more than 5% are a ValueError, and so is any token that is further off than 90% of its norm, such as a lost one.
    """
    distance_T, norm_T = (y_TD.float() - expected_TD).norm(dim=1), expected_TD.norm(dim=1)
    differing = 1 - (distance_T <= 0.03 * norm_T).float().mean().item()
    if differing > 0.05:
        raise ValueError(f"{differing:.1%} of its tokens differ from those of {expected_name}; at most 5% may")
    if lost := (~(distance_T <= 0.9 * norm_T)).sum().item():
        raise ValueError(f"{lost} of its tokens have nothing in common with those of {expected_name}")
    return differing


def build_layers(args: argparse.Namespace, shape: str, tokens: int) -> dict[tuple[str, float], Layer]:
    """Every implementation with its own copy of the inputs, called once; those that fail are named and left out."""
    gc.collect()  # the cell before is in cycles of closures
    layers: dict[tuple[str, float], Layer] = {}
    for zipf in args.zipf:
        expected = None
        for name in args.peers if zipf == args.zipf[0] else args.skewed_peers:
            try:
                start = time.monotonic()
                data = make_inputs(shape_of(shape), tokens, zipf, args.device, DTYPE[args.device])
                layer = LAYERS.get(name, Layer)(data, IMPLEMENTATIONS[name](data))
                y = layer.forward()
                layer.both()
                expected = y.detach().float() if expected is None else expected
                if differing := share_of_differing_tokens(y.detach(), expected, args.peers[0]):
                    print(f"{name}: {differing:.2%} of the tokens differ from {args.peers[0]}'s", flush=True)
                layers[name, zipf] = layer
                if args.verbose:
                    print(f"{name}: first call {time.monotonic() - start:.1f} s", flush=True)
            except Exception as error:
                print(f"{name}: left out: {type(error).__name__}: {str(error)[:300]}", flush=True)
                if args.verbose:
                    traceback.print_exc()
    return layers


def measure(shape: str, tokens: int, args: argparse.Namespace) -> list[dict]:
    """All implementations and skews of one shape in one rotation, so that clocks and temperature are shared."""
    clock, layers = Clock(args.device), build_layers(args, shape, tokens)
    held = make_held(args.held)
    width, inner, experts, topk = shape_of(shape)
    flops = 6 * tokens * topk * width * inner
    times: dict[tuple[str, float], dict[str, list[float]]] = {key: {"forward": [], "both": []} for key in layers}
    keys, order = list(layers), random.Random(tokens)
    for repetition in range(args.repetitions + 2):
        for key in order.sample(keys, len(keys)):  # a call's time depends on what ran before it
            layer, mine = layers[key], times[key]
            if len(mine["both"]) >= 5 and mine["both"][-1] > 100:
                continue  # a slow loop gets its median from fewer runs
            now = {"forward": clock(layer.forward), "both": clock(layer.both)}
            now |= {f"held {each.count}": clock(layer.both, each) for each in held}
            if repetition >= 2:
                for what, ms in now.items():
                    mine.setdefault(what, []).append(ms)
    at_length: dict[tuple[str, float], list[dict[str, float | None]]] = {key: [] for key in layers}
    for _ in range(3 if args.sustained else 0):
        for key in order.sample(keys, len(keys)):
            at_length[key].append(sustained(layers[key].both, args.sustained, clock.cuda))

    rows = []
    for (name, zipf), measured in times.items():
        forward, both = (statistics.median(measured[key]) for key in ("forward", "both"))
        turns = sorted(at_length[name, zipf], key=lambda turn: turn["ms"])
        long = turns[len(turns) // 2] if turns else None
        layer = layers[name, zipf]
        with torch.no_grad():
            counts = ops.expert_counts(route(layer.data)[2], experts)
        beside = {str(each.count): statistics.median(measured[f"held {each.count}"]) for each in held}
        busiest = counts.max().item() / counts.float().mean().item()
        peak = peak_memory(layer) if args.device == "cuda" else None
        rows.append(
            {
                "command": " ".join(sys.argv),
                "shape": shape, "d": width, "f": inner, "experts": experts, "topk": topk, "tokens": tokens,
                "zipf": zipf, "busiest_expert_over_mean": round(busiest, 3), "implementation": name,
                "repetitions": len(measured["both"]),
                "forward_ms": forward, "backward_ms": both - forward, "forward_backward_ms": both,
                "sustained": long, "sustained_turns": turns, "held_ms": beside,
                "forward_tflops": flops / forward / 1e9, "forward_backward_tflops": 3 * flops / both / 1e9,
                "peak_gib": peak, "times_ms": {k: [round(ms, 4) for ms in v] for k, v in measured.items()},
            }
        )  # fmt: skip
        print(
            f"{shape:15s} T {tokens:6d} zipf {zipf:3.1f} ({busiest:4.2f}x) {name:19s} forward {forward:8.3f} ms "
            f"{flops / forward / 1e9:7.2f}   forward+backward {both:8.3f} ms {3 * flops / both / 1e9:7.2f} TFLOP/s"
            + (f"   sustained {long['ms']:8.3f} ms {3 * flops / long['ms'] / 1e9:7.2f}" if long else "")
            + "".join(f"   held {count}: {ms:.3f} ms" for count, ms in beside.items())
            + (f"   peak {peak:.2f} GiB" if peak else ""),
            flush=True,
        )
    return rows


def peak_memory(layer: Layer) -> float:
    """GiB allocated above the arguments during forward and backward, gradients included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer.both()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def profile(args: argparse.Namespace) -> None:
    """Time of every kernel of this library's forward and backward, for each cell."""
    machine(args.device)
    for tokens in args.tokens:
        for shape in args.shapes:
            print(f"{shape}, {tokens} tokens", flush=True)
            data = make_inputs(shape_of(shape), tokens, args.zipf[0], args.device, DTYPE[args.device])
            layer = Layer(data, optimus("auto")(data))
            layer.both()
            print_kernels(layer.both, args.device == "cuda")


def at_least_1(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def not_negative(text: str) -> float:
    number = float(text)
    if not 0.0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more and finite")
    return number


def choose_instructions(parser: argparse.ArgumentParser, name: str) -> None:
    """Of the cpu backend; the parser's error where this processor, or this installation, does not have them."""
    ops.set_backend("cpu")
    try:
        ops.resolve(torch.device("cpu"), torch.float32)
        importlib.import_module("megatron.optimus.ops.cpu").use_instructions(name)
    except (ValueError, ops.BackendUnavailableError) as error:
        parser.error(f"--instructions {name}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shapes", nargs="+", type=shape_name, metavar="MODEL[/epN]", help="of one of N ranks")
    parser.add_argument("--tokens", nargs="+", type=at_least_1)
    parser.add_argument("--zipf", nargs="+", type=not_negative, default=[0.0], help="exponents of experts' popularity")
    parser.add_argument("--peers", nargs="+", choices=IMPLEMENTATIONS)
    parser.add_argument(
        "--skewed-peers",
        nargs="*",
        choices=IMPLEMENTATIONS,
        default=["optimus"],
        help="run all but the first --zipf too (default: optimus; without a name: those of --peers)",
    )
    parser.add_argument("--repetitions", type=at_least_1, default=20)
    parser.add_argument("--sustained", type=not_negative, default=0.0, help="seconds a turn without a pause; 0: none")
    parser.add_argument("--held", nargs="+", type=at_least_1, default=[], help="multiprocessors that others hold")
    parser.add_argument("--threads", type=at_least_1, help="CPU threads")
    parser.add_argument("--instructions", help="instruction set of the cpu backend (default: the fastest)")
    parser.add_argument("--minutes", type=not_negative, default=math.inf, help="start no measurement after this time")
    parser.add_argument("--profile", action="store_true", help="only list the time of each kernel of this library")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--merge", nargs="+", type=Path, help="measure nothing: put these .json files together")
    parser.add_argument("--out", type=out_path, help="path without suffix for .json (measurements are added) and .png")
    args = parser.parse_args()
    if missing := [str(path) for path in args.merge or [] if not path.is_file()]:
        parser.error(f"--merge {' '.join(missing)}: no such file")
    if args.merge:
        try:
            result = merge(args.merge)
        except ValueError as error:
            parser.error(f"--merge: {error}")
        if args.out:
            write(result, args.out)
    else:
        require_device(parser, args.device)
        if args.held and max(args.held) > (most := most_held(args.device)):
            parser.error(f"--held {max(args.held)}: at most {most} multiprocessors, half of those of this device")
        if args.instructions:
            choose_instructions(parser, args.instructions)
        if args.profile and args.out:
            parser.error(f"--profile writes no file: leave out --out {args.out}")
        if args.threads:
            torch.set_num_threads(args.threads)
        choose_defaults(args)
        if args.profile:
            profile(args)
            return
        try:
            result = begin(args.out, machine(args.device))
        except ValueError as error:
            parser.error(f"--out {args.out}: {error}; move that file away or give another name")
        run(args, result)
    print_table(result["measurements"])
    if args.out:
        plot(result["measurements"], with_ending(args.out, ".png"))


def choose_defaults(args: argparse.Namespace) -> None:
    on_gpu = args.device == "cuda"
    args.shapes = args.shapes or (ON_GPU if on_gpu else ON_CPU)
    args.tokens = args.tokens or ([32768] if on_gpu else [4096])
    args.peers = args.peers or (["optimus", *PEERS] if on_gpu else ["optimus", "transformers"])
    args.skewed_peers = args.skewed_peers or args.peers


def machine(device: str) -> dict[str, str]:
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}", flush=True)
    return {"device": name, "torch": torch.__version__}


def run(args: argparse.Namespace, result: dict) -> None:
    """Adds every cell that time allows to the result; writes the file after each. Exit code 1 if there is none."""
    measured_with = commit()  # now: the code that was imported, whatever is checked out or edited meanwhile
    known, start = len(result["measurements"]), time.monotonic()
    for tokens in args.tokens:
        for shape in args.shapes:
            if time.monotonic() - start < 60 * args.minutes:
                rows = measure(shape, tokens, args)
                result["measurements"] += [{"commit": measured_with, **row} for row in rows]
                if args.out and rows:
                    write(result, args.out)
    if len(result["measurements"]) == known:
        sys.exit("nothing was measured: every implementation was left out (above: why), or --minutes left no time")


if __name__ == "__main__":
    main()
