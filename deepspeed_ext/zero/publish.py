"""Other ranks' new parameters: gathered bucket by bucket after each update, awaited where they are used.

Without overlap ``step()`` waits at its end. With it, a forward pre-hook of every module that owns parameters waits for
the buckets these lie in, and reading a state dict waits for all. Code that reads a parameter in any other way must call
``wait`` first. A module whose parameters are used without calling it is found in the first forward; its buckets are
awaited before the first module that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from deepspeed_ext.zero.bucket import Bucket
from deepspeed_ext.zero.family import Family


class ParamPublisher:
    """``buckets`` in launch order of gradients; parameters are published in the opposite order. Raises ValueError for
    overlap without the module whose forward is to wait."""

    def __init__(
        self, families: Sequence[Family], buckets: Sequence[Bucket], module: nn.Module | None, overlap: bool
    ) -> None:
        if overlap and module is None:
            raise ValueError("overlap_param_gather needs module=, whose forward waits for the parameters")
        self.buckets = list(reversed(buckets))
        self._is_pending = False
        self._uncalled: list[Bucket] = []  # of modules that are not called themselves
        self._has_learned = not overlap
        self._called: set[nn.Module] = set()
        self._overlap = overlap
        self._hooks: list[Any] = []
        self._modules: dict[nn.Module, list[Bucket]] = {}
        if overlap and module is not None:
            self._hook_modules(module, families)

    def _hook_modules(self, module: nn.Module, families: Sequence[Family]) -> None:
        buckets_of = {
            param: [family.buckets[index] for index, _ in family.pieces[name]]
            for family in families
            for name, param in family.params.items()
        }
        for child in module.modules():
            mine = [bucket for param in child.parameters(recurse=False) for bucket in buckets_of.get(param, [])]
            if mine or child is module:
                self._modules[child] = list(dict.fromkeys(mine))
                self._hooks.append(child.register_forward_pre_hook(self._before_forward))
        self._hooks.append(module.register_state_dict_pre_hook(lambda *_: self.wait()))

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not self._has_learned:
            self._called.add(module)
        if self._is_pending:
            for bucket in self._uncalled:
                bucket.finish_gather()
            for bucket in self._modules[module]:
                bucket.finish_gather()

    def finish_step(self) -> None:
        """After the last bucket's gather has started."""
        self._is_pending = True
        if self._has_learned and self._overlap:
            return
        self.wait()
        if self._called:  # the first forward has been seen
            uncalled = [buckets for child, buckets in self._modules.items() if child not in self._called]
            self._uncalled = list(dict.fromkeys(bucket for buckets in uncalled for bucket in buckets))
            self._has_learned = True
            self._called.clear()

    def wait(self) -> None:
        """All parameters are here when this returns (on a GPU: for work queued on the stream from now on)."""
        if self._is_pending:
            for bucket in self.buckets:
                bucket.finish_gather()
            self._is_pending = False

    def close(self) -> None:
        """Waits and removes the hooks."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
