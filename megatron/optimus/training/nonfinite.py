"""Finds where values that are not finite begin, after a step whose gradients were not finite: rank, layer, samples.

Such values spread: one all-to-all or reduce-scatter and every rank has them. Where they begin is a layer whose input is
finite and whose output is not, or a gradient that is not finite where that of the layer's output is. So the steps after
a skipped one run with hooks on all layers without children, which communicate with nobody. Steps before cost nothing.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.optimus.platform.collectives import is_replaying
from megatron.optimus.platform.ranks import Ranks

_MOST_NAMED = 4


class _Check(NamedTuple):
    """A module output, or the loss, that a step checks for values that are not finite."""

    where: str
    micro_batch: int
    begins: Tensor  # bool, on the device: they begin here


class NonFiniteOrigin(NamedTuple):
    """Where values that are not finite began, over all ranks."""

    text: str  # a sentence without its full stop; "" where that is not known
    is_device: bool  # always on the same ranks, not on all: their devices are to be suspected, not the data


class NonFiniteSource:
    """Looks for the source of values that are not finite, on this rank.

    Args:
        model: this rank's part of the model.
        ranks: all ranks.
        samples_of: describes the samples of a micro-batch of this rank, given the position in the order of samples at
            which its step begins, and its number in the step.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, samples_of: Callable[[int, int], str]) -> None:
        self._model, self._ranks, self._samples_of = model, ranks, samples_of
        self._hooks: list[RemovableHandle] = []
        self._checks: list[_Check] = []
        self._calls: Counter[tuple[str, bool]] = Counter()  # of each layer in this step; True: repeated for backward
        # Where they began in each step looked at, and in which samples; ("", "") for nowhere on this rank.
        self._steps: list[tuple[str, str]] = []

    def watch(self, *, is_skipped: bool) -> None:
        """Starts the checks after a skipped step and ends them after another; call when a step's result is known.

        Args:
            is_skipped: whether the update was left out because gradients were not finite.
        """
        if is_skipped and not self._hooks:
            for name, module in self._model.named_modules():
                if not any(True for _ in module.children()):
                    self._hooks.append(module.register_forward_hook(partial(self._after_forward, name)))
        elif not is_skipped and self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks, self._steps, self._checks = [], [], []
            self._calls.clear()

    def begin_step(self) -> None:
        """Forgets the forwards since the last step, such as those of an evaluation. Call before a step's forwards."""
        self._checks = []
        self._calls.clear()

    def end_step(self, position: int, losses: Sequence[Tensor]) -> None:
        """Notes the first layer of this step with a value that is not finite; waits for the device if checks are on.

        Args:
            position: samples consumed before the step.
            losses: of this rank's micro-batches.
        """
        if not self._hooks:
            return
        checks = [*self._checks, *(_Check("the loss", n, ~_is_finite(loss)) for n, loss in enumerate(losses))]
        flags = torch.stack([check.begins for check in checks]).tolist() if checks else []
        first = next((check for check, begins in zip(checks, flags, strict=True) if begins), None)
        samples = "" if first is None else self._samples_of(position, first.micro_batch)
        self._steps.append(("", "") if first is None else (first.where, samples))

    def describe(self) -> NonFiniteOrigin:
        """Compares what all ranks found and says where the values began. Collective."""
        own = json.dumps([socket.gethostname(), [step for step in self._steps if step[0]], len(self._steps)])
        found = [json.loads(part) for part in self._ranks.all_gather_bytes(own.encode())]
        sources = {rank: (host, steps) for rank, (host, steps, _) in enumerate(found) if steps}
        # A loss that is not finite may have come from another rank; a layer that makes it so is the source.
        by_layer = {rank: each for rank, each in sources.items() if any(where != "the loss" for where, _ in each[1])}
        sources = by_layer or sources
        if not sources:
            return NonFiniteOrigin("", is_device=False)
        looked_at = max(number for _, _, number in found)
        if len(sources) == len(found) > 1:
            where = Counter(step[0] for _, steps in sources.values() for step in steps).most_common(1)[0][0]
            samples = next(iter(sources.values()))[1][0][1]
            return NonFiniteOrigin(
                f"They begin on all {len(found)} ranks alike (mostly in {where}; on rank {next(iter(sources))} in "
                f"{samples}), so no single device is bad",
                is_device=False,
            )
        always = {rank: each for rank, each in sources.items() if len(each[1]) == looked_at}
        if len(found) == 1 or len(always) != len(sources):
            named = "; ".join(
                f"rank {rank}: {steps[0][0]}, in {steps[0][1]}" for rank, (_, steps) in [*sources.items()][:_MOST_NAMED]
            )
            return NonFiniteOrigin(f"They begin in changing places ({named})", is_device=False)
        rank, (host, steps) = next(iter(always.items()))
        more = f" (and on ranks {', '.join(map(str, [*always][1 : _MOST_NAMED + 1]))})" if len(always) > 1 else ""
        return NonFiniteOrigin(
            f"They came first on rank {rank} of node {host}{more}, in {steps[0][0]}, in each of {looked_at} steps "
            f"looked at (at first in {steps[0][1]}): suspect that device before the rate and the data, and leave it "
            "out",
            is_device=True,
        )

    def _after_forward(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        given = [tensor for tensor in inputs if _is_float(tensor)]
        made = [tensor for tensor in (output if isinstance(output, tuple | list) else [output]) if _is_float(tensor)]
        if not made:
            return
        # Micro-batches come in their order, also through a layer that is run again for backward.
        number = self._calls[name, is_replaying()]
        self._calls[name, is_replaying()] += 1
        healthy = torch.stack([_is_finite(tensor) for tensor in given]).all() if given else _true(made[0])
        ends_well = torch.stack([_is_finite(tensor) for tensor in made]).all()
        weights = [weight for weight in module.parameters(recurse=False) if weight.is_floating_point()]
        bad_weights = torch.stack([~_is_finite(weight) for weight in weights]).any() if weights else ~_true(made[0])
        self._checks.append(_Check(f"the weights of {name}", number, bad_weights))
        self._checks.append(_Check(f"the output of {name}", number, healthy & ~ends_well))
        if made[0].requires_grad:
            seen: list[Tensor] = []
            made[0].register_hook(lambda gradient: None if gradient is None else seen.append(_is_finite(gradient)))
            after = partial(self._after_gradient, name, number, seen)
            self._hooks += [weight.register_hook(after) for weight in weights if weight.requires_grad]

    def _after_gradient(self, name: str, number: int, seen: list[Tensor], gradient: Tensor | None) -> None:
        if seen and self._hooks and gradient is not None:  # None: a kernel has added it to main_grad by itself
            self._checks.append(_Check(f"the gradient of {name}", number, seen[0] & ~_is_finite(gradient)))


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_finite(tensor: Tensor) -> Tensor:
    return torch.isfinite(tensor.detach()).all()


def _true(like: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.bool, device=like.device)
