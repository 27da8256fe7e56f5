"""Other ranks' new parameters: gathered bucket by bucket after each update, awaited where they are used.

Without overlap ``step()`` waits at its end. With it, every module that owns parameters waits for the buckets these lie
in before its forward; reading or loading a state dict waits for all. Code that reads a parameter in any other way must
call ``wait`` first. A module whose parameters are used without calling it, or inside of what torch.compile made of
several, is found in the first forward; its buckets are awaited before the first module that runs.

A module with a pre-hook costs the host more than a microsecond a call, whatever the hook does. So modules have one only
while what they own is on its way: ``step()`` puts it into their tables of hooks, a loop of dictionary stores, and the
first module that waits takes it from all that wait for the same buckets. Nothing is guessed from the order of earlier
forwards: a module that is skipped, moved, called from elsewhere or recomputed finds its hook, or somebody has waited
before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from deepspeed_ext.zero.bucket import Bucket
from deepspeed_ext.zero.family import Family


class _Need:
    """Modules that wait for the same buckets. ``tables``: their forward pre-hooks; ``key``: ours among these."""

    __slots__ = ("buckets", "hook", "is_armed", "key", "tables")

    def __init__(self, buckets: Sequence[Bucket], modules: Sequence[nn.Module], key: int) -> None:
        self.buckets = list(buckets)
        self.tables: list[Any] = [module._forward_pre_hooks for module in modules]  # OrderedDicts
        self.key = key
        self.is_armed = False

        def before_forward(module: nn.Module, args: Any) -> None:  # a function: a copy of the model must not copy us
            self.meet()

        self.hook = before_forward

    @property
    def is_pending(self) -> bool:
        """Whether one of the buckets is on its way."""
        return any(bucket.is_gathering for bucket in self.buckets)

    def arm(self) -> None:
        """From now on the first of the modules that runs waits."""
        key, hook = self.key, self.hook
        self.is_armed = True
        for table in self.tables:
            if table:  # what users do before a forward reads parameters (weight_norm)
                table[key] = hook
                table.move_to_end(key, last=False)
            else:
                table[key] = hook

    def meet(self) -> None:
        """Waits (on a GPU: makes the stream wait) for the buckets; the modules need no hook any more."""
        for bucket in self.buckets:
            bucket.finish_gather()
        if self.is_armed:
            self.is_armed = False
            key = self.key
            try:
                for table in self.tables:
                    del table[key]
            except KeyError:  # somebody has cleared a table
                for table in self.tables:
                    table.pop(key, None)


class ParamPublisher:
    """``buckets`` in launch order of gradients; parameters are published in the opposite order. Raises ValueError for
    overlap without the module whose forward is to wait."""

    def __init__(
        self, families: Sequence[Family], buckets: Sequence[Bucket], module: nn.Module | None, overlap: bool
    ) -> None:
        if overlap and module is None:
            raise ValueError("overlap_param_gather needs module=, whose forward waits for the parameters")
        self.buckets = list(reversed(buckets))
        self._overlaps = overlap
        self._is_pending = False
        self._called: set[nn.Module] = set()  # in the first forward
        self._has_seen_forward = self._has_learned = False
        self._handles: list[RemovableHandle] = []
        self._needs: list[_Need] = []
        self._of_uncalled: _Need | None = None
        if module is not None and self._overlaps:
            self._modules = list(module.modules())
            self._watch_first_forward()
            self._owners = _owners(self._modules, families)

            def wait(*_: Any) -> None:
                self.wait()

            for child in self._modules:
                self._handles.append(child.register_state_dict_pre_hook(wait))
                self._handles.append(child.register_load_state_dict_pre_hook(wait))

    def _watch_first_forward(self) -> None:
        called = self._called

        def seen(module: nn.Module, args: Any) -> None:
            if not torch.compiler.is_compiling():  # compiled code sees no changes of hooks
                called.add(module)

        self._watching = [child.register_forward_pre_hook(seen) for child in self._modules]

    def _learn(self) -> None:
        """After the first forward: who waits for what."""
        for handle in self._watching:
            handle.remove()
        together: dict[tuple[Bucket, ...], list[nn.Module]] = {}
        uncalled: dict[Bucket, None] = {}
        for child, buckets in self._owners.items():
            together.setdefault(buckets, []).append(child)
            if child not in self._called:
                uncalled.update(dict.fromkeys(buckets))
        self._needs = [_Need(buckets, modules, _new_key()) for buckets, modules in together.items()]
        if uncalled:
            self._of_uncalled = _Need(list(uncalled), self._modules, _new_key())
            self._needs.append(self._of_uncalled)
        self._has_learned = True
        self._called.clear()

    def finish_step(self) -> None:
        """After the last bucket's gather has started."""
        self._is_pending = True
        if not self._overlaps or not self._has_learned:
            self.wait()
            if self._overlaps and (self._called or self._has_seen_forward):
                self._learn()
            return
        for need in self._needs:
            if need.is_pending:
                need.arm()

    def wait_for_uncalled(self) -> None:
        """Waits for what no module's own hook would: outside of compiled code, where that does not cut it in two."""
        self._has_seen_forward = True
        if self._of_uncalled is not None:
            self._of_uncalled.meet()

    def wait(self) -> None:
        """All parameters are here when this returns (on a GPU: for work queued on the stream from now on)."""
        if self._is_pending:
            for bucket in self.buckets:
                bucket.finish_gather()
            for need in self._needs:
                need.meet()
            self._is_pending = False

    def close(self) -> None:
        """Waits and removes the hooks."""
        self.wait()
        if self._overlaps and not self._has_learned:
            self._learn()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _owners(modules: Sequence[nn.Module], families: Sequence[Family]) -> dict[nn.Module, tuple[Bucket, ...]]:
    """The modules that own parameters themselves, and the buckets these lie in."""
    buckets_of = {
        param: [family.buckets[index] for index, _ in family.pieces[name]]
        for family in families
        for name, param in family.params.items()
    }
    owners = {}
    for module in modules:
        mine = [bucket for param in module.parameters(recurse=False) for bucket in buckets_of.get(param, [])]
        if mine:
            owners[module] = tuple(dict.fromkeys(mine))
    return owners


def _new_key() -> int:
    """One that torch gives to no other hook."""
    return RemovableHandle(OrderedDict()).id
