"""Backwards that end with an exception: the program may catch it and go on, and other ranks may have ended theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from deepspeed.runtime.base_optimizer import BackwardHookStateManager

from deepspeed_ext.config_checks import in_one_line
from deepspeed_ext.zero.failures import Failures

if TYPE_CHECKING:
    from deepspeed_ext.zero.gradient_hooks import GradientReducer

_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)  # -1: no backward runs in this thread


class BackwardWatch:
    """Knows of ``engine.backward`` because the engine says so, and of ``loss.backward()`` because autograd has gone on
    to another graph before the gradients' side has ended the one before."""

    def __init__(self, sync: GradientReducer, failures: Failures, hooks: BackwardHookStateManager) -> None:
        self._reducer, self._failures, self._hooks = sync, failures, hooks
        self._error: Exception | None = None
        self._task = -1  # autograd's number of the present backward, where it has told of itself

    def interrupt(self, error: Exception) -> None:
        """Says that ``error`` has ended the backward that was under way."""
        self._error = error

    def is_another(self) -> bool:
        """Whether this runs inside another backward than the last ``begin``."""
        return _graph_task() not in (-1, self._task)

    def begin(self) -> None:
        """A backward begins, or goes on."""
        task = _graph_task()
        if task != -1 or self._reducer.has_ended:
            self._task = task

    def notice(self) -> bool:
        """Before a backward or a step: ends the one that was interrupted, if there was one, and notes a failure.
        Whether it was reduced."""
        if self._error is None and not self._reducer.has_ended and self._task != -1:
            self._error = RuntimeError("see its own message")
        if self._error is None:
            return False
        said = in_one_line(self._error)
        was_reduced = self.give_up()
        self._failures.note(
            RuntimeError(
                f"a backward was ended by an exception ({said}) and its gradients are incomplete: call "
                "engine.zero_grad() on every rank before the next backward or step"
            )
        )
        return was_reduced

    def give_up(self) -> bool:
        """Ends the backward that is under way, if there is one. Whether it was reduced."""
        self._error, self._task = None, -1
        if self._reducer.has_ended:
            return False
        self._hooks.backward_active_depth = 0  # DeepSpeed's, which counts it as under way
        return self._reducer.end_interrupted()
