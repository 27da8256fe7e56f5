"""All-gather of the new parameters: bucket by bucket after each update, waited for where they are used.

Without overlap ``step()`` waits at its end. With it, every module that owns parameters waits for the buckets these lie
in before its forward; reading or loading a state dict waits for all. Code that reads a parameter in any other way must
call ``wait`` first. Modules whose parameters are used without calling them, or that torch.compile has merged with
others, are found in the first forward; their buckets are waited for before the first module that runs.

A forward pre-hook costs the host more than a microsecond a call, whatever it does. So modules have one only while what
they own is in flight: ``step()`` puts it into their tables of hooks, a loop of dictionary stores, and the first module
that waits removes it from all modules that wait for the same buckets. Nothing is guessed from the order of earlier
forwards: a module that is skipped, moved, called from elsewhere or recomputed has its hook, or somebody has waited.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from deepspeed_ext.zero.bucket import Bucket
from deepspeed_ext.zero.flat_buffer import FlatBuffer


class _WaitingModules:
    """Modules that wait for the same buckets.

    ``tables`` are their dictionaries of forward pre-hooks, ``key`` is that of our hook in them.
    """

    __slots__ = ("buckets", "hook", "is_hooked", "key", "tables")

    def __init__(self, buckets: Sequence[Bucket], modules: Sequence[nn.Module], key: int) -> None:
        self.buckets = list(buckets)
        self.tables: list[Any] = [module._forward_pre_hooks for module in modules]  # OrderedDicts
        self.key = key
        self.is_hooked = False

        def before_forward(module: nn.Module, args: Any) -> None:  # a function: a copy of the model must not copy us
            self.wait()

        self.hook = before_forward

    @property
    def is_pending(self) -> bool:
        """Whether one of the buckets is in flight."""
        return any(bucket.is_gathering for bucket in self.buckets)

    def add_hooks(self) -> None:
        """Makes the first of the modules that runs wait."""
        key, hook = self.key, self.hook
        self.is_hooked = True
        for table in self.tables:
            if table:  # what users do before a forward reads parameters (weight_norm)
                table[key] = hook
                table.move_to_end(key, last=False)
            else:
                table[key] = hook

    def wait(self) -> None:
        """Waits (on a GPU: makes the stream wait) for the buckets and removes the modules' hooks."""
        for bucket in self.buckets:
            bucket.finish_gather()
        if self.is_hooked:
            self.is_hooked = False
            key = self.key
            try:
                for table in self.tables:
                    del table[key]
            except KeyError:  # somebody has cleared a table
                for table in self.tables:
                    table.pop(key, None)


class ParamAllGather:
    """Gathers other ranks' new parameters.

    Args:
        flat_buffers: all of the optimizer's.
        buckets: in launch order of gradients; parameters are gathered in the opposite order.
        module: whose forward waits for the parameters.
        overlap: return from ``finish_step`` before they have arrived.

    Raises:
        ValueError: overlap without a module.
    """

    def __init__(
        self, flat_buffers: Sequence[FlatBuffer], buckets: Sequence[Bucket], module: nn.Module | None, overlap: bool
    ) -> None:
        if overlap and module is None:
            raise ValueError("overlap_param_gather needs module=, whose forward waits for the parameters")
        self.buckets = list(reversed(buckets))
        self._overlaps = overlap
        self._is_pending = False
        self._called: set[nn.Module] = set()  # in the first forward
        self._has_seen_forward = self._has_learned = False
        self._handles: list[RemovableHandle] = []
        self._waiting: list[_WaitingModules] = []
        self._uncalled: _WaitingModules | None = None  # all modules, for buckets that no called module waits for
        if module is not None and self._overlaps:
            self._modules = list(module.modules())
            self._watch_first_forward()
            self._buckets_of = _buckets_by_module(self._modules, flat_buffers)

            def wait(*_: Any) -> None:
                self.wait()

            for child in self._modules:
                self._handles.append(child.register_state_dict_pre_hook(wait))
                self._handles.append(child.register_load_state_dict_pre_hook(wait))

    def _watch_first_forward(self) -> None:
        called = self._called

        def before_forward(module: nn.Module, args: Any) -> None:
            if not torch.compiler.is_compiling():  # compiled code sees no changes of hooks
                called.add(module)

        self._watching = [child.register_forward_pre_hook(before_forward) for child in self._modules]

    def _learn(self) -> None:
        """Decides after the first forward which modules wait for which buckets."""
        for handle in self._watching:
            handle.remove()
        by_buckets: dict[tuple[Bucket, ...], list[nn.Module]] = {}
        uncalled: dict[Bucket, None] = {}
        for child, buckets in self._buckets_of.items():
            by_buckets.setdefault(buckets, []).append(child)
            if child not in self._called:
                uncalled.update(dict.fromkeys(buckets))
        self._waiting = [_WaitingModules(buckets, modules, _new_key()) for buckets, modules in by_buckets.items()]
        if uncalled:
            self._uncalled = _WaitingModules(list(uncalled), self._modules, _new_key())
            self._waiting.append(self._uncalled)
        self._has_learned = True
        self._called.clear()

    def finish_step(self) -> None:
        """Waits, or makes modules wait, after the last bucket's gather has started."""
        self._is_pending = True
        if not self._overlaps or not self._has_learned:
            self.wait()
            if self._overlaps and (self._called or self._has_seen_forward):
                self._learn()
            return
        for modules in self._waiting:
            if modules.is_pending:
                modules.add_hooks()

    def wait_for_uncalled(self) -> None:
        """Waits for what no module's own hook would: outside of compiled code, where that does not cut it in two."""
        self._has_seen_forward = True
        if self._uncalled is not None:
            self._uncalled.wait()

    def wait(self) -> None:
        """Waits until all parameters have arrived (on a GPU: for work queued on the stream from now on)."""
        if self._is_pending:
            for bucket in self.buckets:
                bucket.finish_gather()
            for modules in self._waiting:
                modules.wait()
            self._is_pending = False

    def close(self) -> None:
        """Waits and removes the hooks."""
        self.wait()
        if self._overlaps and not self._has_learned:
            self._learn()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _buckets_by_module(
    modules: Sequence[nn.Module], flat_buffers: Sequence[FlatBuffer]
) -> dict[nn.Module, tuple[Bucket, ...]]:
    """The buckets of the parameters that each module owns itself, for modules that own any."""
    buckets_of = {
        param: [flat_buffer.buckets[index] for index, _ in flat_buffer.ranges[name]]
        for flat_buffer in flat_buffers
        for name, param in flat_buffer.params.items()
    }
    by_module = {}
    for module in modules:
        mine = [bucket for param in module.parameters(recurse=False) for bucket in buckets_of.get(param, [])]
        if mine:
            by_module[module] = tuple(dict.fromkeys(mine))
    return by_module


def _new_key() -> int:
    """A key that torch gives to no other hook."""
    return RemovableHandle(OrderedDict()).id
