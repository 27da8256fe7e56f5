"""The versions of DeepSpeed that the engine works with: its subclass and its optimizer use names that are not public.

One rule: a version is in the range when the tests that build an engine beside stock's pass with it
(``make test-deepspeed VERSION=0.17.6``). What only some of them have is asked for here and nowhere else.
"""

import logging
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine

OLDEST, NEWEST = (0, 17, 6), (0, 19, 8)


def problem_with(version: str) -> str | None:
    """Returns one line that names the range if the version is outside of it.

    Args:
        version: as ``deepspeed.__version__`` has it.

    Returns:
        None for a version of the range.
    """
    if OLDEST <= _numbers(version) <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
    return f"deepspeed {version}: deepspeed_ext works with {oldest} to {newest}; pip install deepspeed=={newest}"


def check(version: str) -> None:
    """Logs a warning for a version after the range, and raises ImportError for one before: it lacks what ours needs."""
    problem = problem_with(version)
    if problem is not None and _numbers(version) < OLDEST:
        raise ImportError(problem)
    if problem is not None:
        logging.getLogger("deepspeed_ext").warning("%s", problem)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:3] if part.isdigit())


def manages_accumulation(engine: Any) -> bool:
    """Whether the engine counts micro-batches; before 0.19.4 it always does."""
    asked = getattr(engine, "managed_gradient_accumulation", None)
    return asked is None or bool(asked())


def configure_python_gc(engine: Any) -> None:
    """Applies the key ``disable_python_gc``, which is of 0.19.8."""
    configure = getattr(engine, "_configure_python_gc", None)
    if configure is not None:
        configure()


class _AssignedBoundary(ZeROOptimizer):
    """The base optimizer for engines before 0.19.5: where later ones call a method, they assign."""

    _is_gradient_accumulation_boundary = True

    @property
    def is_gradient_accumulation_boundary(self) -> bool:
        return self._is_gradient_accumulation_boundary

    @is_gradient_accumulation_boundary.setter
    def is_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.set_gradient_accumulation_boundary(is_boundary)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._is_gradient_accumulation_boundary = bool(is_boundary)


class _QueuedEnd(_AssignedBoundary):
    """The base optimizer for engines of 0.18.3 and 0.18.4: of ``loss.backward()`` they do not notice the end."""

    def enter_backward(self) -> None:
        super().enter_backward()
        torch.autograd.Variable._execution_engine.queue_callback(self.run_grad_acc_post_hooks)


class _RunsBackward(_AssignedBoundary):
    """The base optimizer for engines before 0.18.3, which have it run the backward and know no other."""

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Runs the backward of the loss, which is scaled in fp16. Called by the engine's ``backward``."""
        self.loss_scaler.scale_loss(loss).backward(retain_graph=retain_graph)


class _EndsBackward(DeepSpeedEngine):
    """The engine before 0.18.3, which does not tell the optimizer that a backward has ended."""

    def _backward_epilogue(self) -> None:
        super()._backward_epilogue()
        self.optimizer.backward_epilogue()


BaseOptimizer, BaseEngine = ZeROOptimizer, DeepSpeedEngine
if not TYPE_CHECKING and not hasattr(ZeROOptimizer, "enter_backward"):
    BaseOptimizer, BaseEngine = _RunsBackward, _EndsBackward
elif not TYPE_CHECKING and not hasattr(ZeROOptimizer, "queue_post_backward_callback"):
    BaseOptimizer = _QueuedEnd
elif not TYPE_CHECKING and not hasattr(ZeROOptimizer, "set_gradient_accumulation_boundary"):
    BaseOptimizer = _AssignedBoundary

check(deepspeed.__version__)
