"""Single bits that flip in memory and in computations: which are found, and is the right rank named?

    python -m tests.campaigns.bit_flips --flips 2000 --clean-steps 10000 --output benchmarks/results/bit_flips.json

A tiny MoE model trains on 2 to 4 gloo ranks with ``integrity_interval=1``. Each trial flips one random bit, from 0 to
31 (15 in bf16), at a random place of a random rank, does one step of training as the trainer does, and takes the state
before back. In memory a bit flips between two updates: of weights, master weights or moments. In computation it flips
while gradients are compared (``integrity_gradient_interval``): in a layer's output or a weight's gradient, once, or in
every pass of that rank. Clean steps must raise no alarm.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers import run_distributed
from tests.integration.conftest import TINY, write_corpus

STORED, COMPUTED = ("weights", "master weights", "exp_avg", "exp_avg_sq"), ("activations", "gradients")
# Ranks, and options: with two copies of a weight a difference names both ranks, with three or more the bad one.
LAYOUTS = {
    "4 ranks, experts on 2, bf16": (4, "--expert-model-parallel-size 2 --params-dtype bf16"),
    "3 ranks, fp32": (3, "--params-dtype fp32"),
    "2 ranks, bf16": (2, "--params-dtype bf16"),
}
OPTIONS = "--global-batch-size 12 --micro-batch-size 1 --integrity-interval 1 --eval-interval 0 --save-interval 0"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def flip(tensor: Tensor, place: int, bit: int) -> None:
    """Flips one bit of an element of a contiguous tensor."""
    size = tensor.element_size()
    bits = tensor.detach().view(-1).view(_INTEGERS[size])
    value = 1 << bit
    bits[place] ^= value - (1 << 8 * size) if bit == 8 * size - 1 and size > 1 else value


class Victim:
    """A trainer of one rank whose state is taken back after each trial."""

    def __init__(self, rank: int, world: int, folder: str, options: str, seed: int) -> None:
        from megatron.optimus.config.load import load
        from megatron.optimus.context import RunContext
        from megatron.optimus.platform.mesh import Mesh
        from megatron.optimus.training.trainer import Trainer

        logging.getLogger("optimus").setLevel(logging.ERROR)
        words = [*TINY, *OPTIONS.split(), *options.split()]
        config = load([*words, "--run-dir", f"{folder}/run", "--data-path", f"{folder}/tokens"]).config
        mesh = Mesh(config.parallel, rank=rank, world_size=world)
        self.trainer = Trainer(RunContext.of(config, mesh, torch.device("cpu")))
        self.rank, self.world = rank, world
        self.shared = random.Random(seed)  # the same on all ranks
        self.integrity, self.optimizer = self.trainer.integrity, self.trainer.engine.optimizer
        self.trainer.data.train.start(0, 1 << 20)
        for _ in range(3):  # moments that are not zero
            self.train()
        self.step, self.consumed = self.trainer.step, self.trainer.consumed_samples
        self.optimizer.wait_for_params()  # other ranks' parts may be on their way
        self.kept = [tensor.clone() for tensor in self.tensors()]
        self.kept_step_count = self.optimizer.step_count
        self.batches = self.trainer.data.train.batch(self.consumed)
        self.results: list[Any] = []  # of the comparisons of gradients
        exchange = self.integrity._exchange
        self.integrity._exchange = lambda *args: self.results.append(exchange(*args)) or self.results[-1]  # type: ignore[method-assign]
        self.clean = self.compare_gradients()[1]

    def tensors(self) -> list[Tensor]:
        buffers = self.optimizer.flat_buffers
        flat = [tensor for one in buffers for tensor in (one.param_buffer, one.masters, *one.state_tensors())]
        return [*flat, *self.trainer.model.buffers()]

    def restore(self) -> None:
        """Takes the state back. Raises AssertionError where weights that ranks have copies of are not the same then."""
        self.optimizer.wait_for_params()
        for tensor, kept in zip(self.tensors(), self.kept, strict=True):
            tensor.copy_(kept)
        self.optimizer.step_count = self.kept_step_count
        self.trainer.step, self.trainer.consumed_samples = self.step, self.consumed
        assert self.integrity._states is not None
        self.integrity._states.record()
        different = [one.ranks for one in self.integrity._states.replicas() if (one.sums != one.sums[:1]).any()]
        assert not different, f"before any flip the weights differ on ranks {different}"

    def train(self, batches: Any = None) -> None:
        """One step; raises IntegrityError as the trainer does."""
        from megatron.optimus.training.trainer import train_step

        trainer, step = self.trainer, self.trainer.step + 1
        batches = batches or trainer.data.train.batch(trainer.consumed_samples)
        result = train_step(
            *(trainer.run, trainer.engine, trainer.schedule, trainer.recorder, batches),
            before_update=lambda: self.integrity.before_update(step, trainer.recorder),
            after_update=lambda: self.integrity.after_update(step),
        ).read()
        trainer.step, trainer.consumed_samples = step, trainer.consumed_samples + 12
        self.integrity.judge(step, result.metrics)

    def compare_gradients(self) -> tuple[str, list[Any]]:
        """The message ("" where all are equal), and what all ranks computed the first time."""
        from megatron.optimus.platform.intervals import Interval
        from megatron.optimus.training.health import IntegrityError

        self.results.clear()
        never, text = self.integrity._gradient_interval, ""
        self.integrity._gradient_interval = Interval(1, "", self.trainer.run.ranks)
        try:
            self.integrity.check_gradients(self.step + 1, self.consumed, self.batches)
        except IntegrityError as error:
            text = str(error)
        self.integrity._gradient_interval = never
        return text, self.results[0]

    # ---- trials

    def stored(self, kind: str, bad_rank: int) -> tuple[str, bool]:
        """Flips a bit in memory, and does a step. Returns the message, and True: it has changed something."""
        from megatron.optimus.training.health import IntegrityError

        self.restore()
        buffers = self.optimizer.flat_buffers
        places = self.shared.random(), self.shared.random(), self.shared.random()
        if self.rank == bad_rank:
            if kind == "weights":
                tensors = [one.param_buffer for one in buffers]
            elif kind == "master weights":
                tensors = [bucket.shard.master for one in buffers for bucket in one.buckets]
            else:
                tensors = [bucket.shard.state[kind] for one in buffers for bucket in one.buckets]
            tensor = tensors[int(places[0] * len(tensors))]
            flip(tensor, int(places[1] * tensor.numel()), int(places[2] * 8 * tensor.element_size()))
        try:
            self.train(self.batches)
        except IntegrityError as error:
            return str(error), True
        return "", True

    def computed(self, kind: str, bad_rank: int) -> tuple[str, bool]:
        """Flips a bit in a computation. Returns the message, and whether any checksum became another."""
        self.restore()
        first = self.shared.choice((0, 1, None))  # the pass in which it flips; None: in all of them
        places = self.shared.random(), self.shared.random(), self.shared.random()
        with self._flipping(kind, places, first) if self.rank == bad_rank else _nothing():
            text, found = self.compare_gradients()
        return text, found != self.clean

    @contextmanager
    def _flipping(self, kind: str, places: tuple[float, float, float], only: int | None) -> Iterator[None]:
        passes = [-1]

        def flipped(tensor: Tensor) -> Tensor:
            if only is not None and passes[0] != only:
                return tensor
            copy = tensor.detach().clone().contiguous()
            flip(copy, int(places[1] * copy.numel()), int(places[2] * 8 * copy.element_size()))
            # The value is the flipped one, gradients go on as before.
            return copy if not tensor.requires_grad else _Replace.apply(tensor, copy)

        def begin(*_: Any) -> None:
            passes[0] += 1

        model: nn.Module = self.trainer.model
        handles = [model.register_forward_pre_hook(begin)]
        if kind == "activations":
            leaves = [one for one in model.modules() if not any(True for _ in one.children())]
            leaves = [one for one in leaves if any(True for _ in one.parameters())]
            module = leaves[int(places[0] * len(leaves))]

            def after(_: nn.Module, __: Any, output: Any) -> Any:
                return flipped(output) if isinstance(output, Tensor) and output.is_floating_point() else output

            handles.append(module.register_forward_hook(after))
        else:
            weights = list(model.parameters())
            handles.append(weights[int(places[0] * len(weights))].register_hook(flipped))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Replace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def verdict(text: str, bad_rank: int) -> str:
    """How well a message names the rank."""
    exact = re.search(r"first on rank (\d+) of node \S+?(?: \(and on ranks ([\d, ]+)\))?$", text)
    if exact:
        named = {int(exact[1]), *map(int, (exact[2] or "").split(", ") if exact[2] else [])}
        return ("named" if named == {bad_rank} else "named among others") if bad_rank in named else "another named"
    pairs = re.search(r"ranks ([^;]*?) (?:computed|has wrong)", text)
    numbers = set(map(int, re.findall(r"\d+", re.sub(r"\([^)]*\)", "", pairs[1])))) if pairs else set()
    return "named among others" if bad_rank in numbers else "another named"


def run_layout(rank: int, world: int, folder: str, options: str, flips: int, clean: int, seed: int) -> dict[str, Any]:
    """Trials and clean steps on one layout; the same on every rank."""
    victim = Victim(rank, world, folder, options, seed)
    table: dict[str, Counter[str]] = {}
    wrong: list[dict[str, Any]] = []
    kinds = [*STORED, *COMPUTED]
    for number in range(flips):
        kind, bad_rank = kinds[number % len(kinds)], victim.shared.randrange(world)
        trial: Callable[[str, int], tuple[str, bool]] = victim.stored if kind in STORED else victim.computed
        text, has_changed = trial(kind, bad_rank)
        row = table.setdefault(kind, Counter(flips=0, changed=0, found=0, false_alarms=0))
        row["flips"] += 1
        row["changed"] += has_changed
        row["found" if has_changed else "false_alarms"] += bool(text)
        if text:
            row[verdict(text, bad_rank)] += 1
            if verdict(text, bad_rank) == "another named":
                wrong.append({"kind": kind, "rank": bad_rank, "text": text})
    victim.restore()
    alarms = 0
    for _ in range(clean):
        try:
            victim.train()
            if victim.trainer.step % 10 == 0:
                victim.step, victim.consumed = victim.trainer.step, victim.trainer.consumed_samples
                victim.batches = victim.trainer.data.train.batch(victim.consumed)
                alarms += bool(victim.compare_gradients()[0])
        except Exception as error:
            if type(error).__name__ != "IntegrityError":
                raise
            alarms += 1
    rows = {kind: dict(row) for kind, row in table.items()}
    return {"table": rows, "another_named": wrong[:20], "clean_steps": clean, "false_alarms": alarms}


def run(flips: int, clean: int, seed: int, layouts: tuple[str, ...] = tuple(LAYOUTS)) -> dict[str, Any]:
    """All layouts, each with its share."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "tokens")
        for number, name in enumerate(layouts):
            world, options = LAYOUTS[name]
            share = [total // len(layouts) + (number < total % len(layouts)) for total in (flips, clean)]
            own = Path(folder) / str(number)
            own.mkdir()
            for file in Path(folder).glob("tokens.*"):
                (own / file.name).symlink_to(file)
            results = run_distributed(run_layout, world, str(own), options, *share, seed + number, timeout=7200.0)
            assert all(one == results[0] for one in results), "all ranks find the same"
            found[name] = results[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--clean-steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    layouts = run(options.flips, options.clean_steps, options.seed, tuple(options.layouts))
    evidence = {"seed": options.seed, "wall_s": round(time.monotonic() - began), "layouts": layouts}
    options.output.write_text(json.dumps(evidence, indent=1) + "\n")
    print(json.dumps(evidence))


if __name__ == "__main__":
    main()
