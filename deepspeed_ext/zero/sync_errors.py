"""Errors of one rank, raised on all ranks: no rank may leave while others wait for it in a collective.

Before training, ranks compare what they are about to build (``check_same_parameters``), and what one of them alone may
fail at goes through ``run_on_all_ranks``: ranks that disagree would exchange buffers of different meaning, or wait for
each other for ever.

During training, an error is recorded and what caused it is dropped (``StepErrors``). The rank's part of the gradient
norm becomes NaN, which skips the step on all ranks. The host knows a norm that is not finite one step later, at the
same point on every rank; there the ranks exchange their errors and all raise the same. Where nothing fails, nothing is
sent. A backward that an exception has ended counts as such an error (``BackwardTracker``).
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ext.config_checks import in_one_line
from deepspeed_ext.groups import ZeroGroups, expert_group_name, ranks_of, world_group
from deepspeed_ext.zero.options import ZeroOptions

if TYPE_CHECKING:
    from deepspeed_ext.zero.gradient_hooks import GradientReducer

logger = logging.getLogger("deepspeed_ext")

# (name, shape, dtype, the optimizer's parameter group with its options, or None)
Signature = tuple[str, tuple[int, ...], str, str | None]
Signatures = dict[str | None, list[Signature]]  # by expert group, None: dense
T = TypeVar("T")


# ---- the same on every rank


class InvalidCall(ValueError, RuntimeError, AssertionError):
    """A call or a configuration that DeepSpeed answers by an assertion: who catches that class catches ours."""


def gather(item: T, group: dist.ProcessGroup) -> dict[int, T]:
    """Returns every rank's item, by global rank. Collective over ``group``."""
    ranks = dist.get_process_group_ranks(group)
    items: list[Any] = [None] * len(ranks)
    dist.all_gather_object(items, item, group=group)
    return dict(zip(ranks, items, strict=True))


def run_on_all_ranks(action: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Runs an action on every rank, and raises on all of them if it fails on any. Collective.

    Args:
        action: must not communicate.
        group: the ranks that call this.

    Returns:
        What the action has returned on this rank.

    Raises:
        ValueError: with the words of the first rank that failed, on every rank; an ``InvalidCall`` where that rank met
            an AssertionError, as DeepSpeed's checks of a configuration raise it.
    """
    result: list[T] = []
    error = cause = None
    try:
        result.append(action())
    except Exception as failure:
        error, cause = (in_one_line(failure), isinstance(failure, AssertionError)), failure
    errors = {rank: found for rank, found in gather(error, group).items() if found is not None}
    if errors:
        first = min(errors)
        text, is_assertion = errors[first]
        kind = InvalidCall if is_assertion else ValueError
        raise kind(f"{text} (on {len(errors)} rank(s), first rank {first})") from cause
    return result[0]


def require_same_on_all_ranks(what: str, value: Any, group: dist.ProcessGroup) -> None:
    """Raises ValueError on every rank of ``group`` unless all pass the same value. Collective."""
    values = gather(value, group)
    first = min(values)
    for rank, other in values.items():
        if other != values[first]:
            raise ValueError(f"ranks disagree on {what}: rank {first} has {values[first]}, rank {rank} has {other}")


# ---- the same parameters on every rank


def parameter_signatures(model: nn.Module, param_groups: Sequence[dict[str, Any]]) -> Signatures:
    """Describes the model's parameters.

    Args:
        model: whose parameters are described, in its order.
        param_groups: the optimizer's.

    Returns:
        Name, shape, dtype and parameter group of each parameter, by expert group.

    Raises:
        ValueError: a parameter is in two groups, is not the model's, shares memory with another parameter object, or
            has gradients that cannot be reduced (a sparse embedding).
    """
    index_of: dict[nn.Parameter, int] = {}
    for index, group in enumerate(param_groups):
        for param in group["params"]:
            if param in index_of:
                raise ValueError(f"a parameter of shape {tuple(param.shape)} is twice in the optimizer's param_groups")
            index_of[param] = index
    named = dict(model.named_parameters())
    unknown = set(index_of) - set(named.values())
    if unknown:
        shapes = sorted(tuple(param.shape) for param in unknown)
        raise ValueError(f"the optimizer holds {len(unknown)} parameters that the model does not have: shapes {shapes}")
    _refuse_sparse_and_aliased(model, named)
    signatures: Signatures = {None: []}
    described = [_describe_group(index, group) for index, group in enumerate(param_groups)]
    for name, param in named.items():
        optimized_in = described[index_of[param]] if param.requires_grad and param in index_of else None
        signature = (name, tuple(param.shape), str(param.dtype), optimized_in)
        signatures.setdefault(expert_group_name(param), []).append(signature)
    return signatures


def _describe_group(index: int, group: Mapping[str, Any]) -> str:
    # with the options: a rank with another lr would update its shards of one model differently
    plain = [f"{key}={value}" for key, value in sorted(group.items()) if isinstance(value, (int, float, str, tuple))]
    return f"parameter group {index} ({', '.join(plain)})"


def _refuse_sparse_and_aliased(model: nn.Module, named: dict[str, nn.Parameter]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(f"module {name!r} has sparse=True; sparse gradients cannot be sharded, use sparse=False")
    first: dict[int, str] = {}
    for name, param in named.items():
        if param.device.type == "meta" or param.numel() == 0:
            continue
        other = first.setdefault(param.data_ptr(), name)
        if other != name:
            raise ValueError(
                f"parameters {other!r} and {name!r} share memory but are two objects; to tie them, assign the same "
                "nn.Parameter to both modules"
            )


@dataclass(frozen=True)
class _GroupDigest:
    """What a rank says of one of its groups. Thousands of these are exchanged, so lists are replaced by digests."""

    ranks: str  # of the group
    num_ranks: int
    parameters: str  # of this rank in the group: names, shapes, dtypes, parameter groups, order
    outside: tuple[int, ...]  # ranks of an expert group that are not in the dense one


def check_same_parameters(signatures: Signatures, groups: ZeroGroups, options: ZeroOptions) -> None:
    """Checks that all ranks of each group describe the same parameters, and that all have the same options.

    Collective over all ranks: one exchange when all agree; a second one finds the first difference.

    Args:
        signatures: this rank's, see ``parameter_signatures``.
        groups: this rank's process groups.
        options: this rank's.

    Raises:
        ValueError: on every rank, if ranks differ or an expert group has ranks outside the dense group.
    """
    own: dict[str | None, _GroupDigest] = {}
    dense = set(ranks_of(groups.dense))
    for name in (None, *groups.expert):
        described = repr(signatures.get(name, []))
        ranks = ranks_of(groups.of(name))
        # Tensor-parallel ranks may hold replicas of an expert.
        outside = sorted(set(ranks) - dense) if groups.tensor is None else []
        own[name] = _GroupDigest(_digest(repr(ranks)), len(ranks), _digest(described), tuple(outside))
    everybody = gather((own, options), world_group())
    for rank, (_, other) in everybody.items():
        if other != everybody[0][1]:
            raise ValueError(f"ranks disagree on options: rank 0 has {everybody[0][1]}, rank {rank} has {other}")
    digests = {rank: entries for rank, (entries, _) in everybody.items()}
    for entries in digests.values():
        for name, digest in entries.items():
            if digest.outside:
                raise ValueError(f"expert group {name!r} has ranks {list(digest.outside)} outside the dense group")
    # Counting equal digests, because comparing each rank with its peers would take the square of the number of ranks.
    # A multiple is enough: only the ranks of a group can send its digest, and in torch's fake world all send this one.
    counts = Counter((name, digest) for entries in digests.values() for name, digest in entries.items())
    if all(count % digest.num_ranks == 0 for (_, digest), count in counts.items()):
        return
    details = gather({name: (ranks_of(groups.of(name)), signatures.get(name, [])) for name in own}, world_group())
    for rank, entries in digests.items():
        for name, digest in entries.items():
            for peer in details[rank][name][0]:
                if digests[peer].get(name) != digest:
                    theirs = details[peer].get(name, ([], []))[1]
                    raise ValueError(_difference(name, rank, details[rank][name][1], peer, theirs))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _difference(name: str | None, rank: int, mine: list[Signature], peer: int, theirs: list[Signature]) -> str:
    what = "dense parameters" if name is None else f"expert group {name!r}"
    for left, right in zip_longest(mine, theirs):
        if left != right:
            return (
                f"ranks disagree on the {what}: rank {rank} has {_describe(left)}, rank {peer} has "
                f"{_describe(right)}; every rank of a group must build the same model and parameter groups in order"
            )
    return f"ranks {rank} and {peer} disagree on the members of the group of the {what}"


def _describe(signature: Signature | None) -> str:
    if signature is None:
        return "nothing more"
    name, shape, dtype, group = signature
    where = "not optimized" if group is None else f"in {group}"
    return f"{name!r} {shape} {dtype} {where}"


# ---- errors during a step


class StepErrors:
    """Errors of this rank in the present step, which all ranks raise at the end of the next one.

    Args:
        groups: the groups whose ranks compute one norm together, see ``global_norm``.
        device: where the norm is computed.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._groups = [group for group in groups if dist.get_world_size(group) > 1]
        self._device = device
        self._present: str | None = None  # since the last step
        self._last: str | None = None  # in the last step
        self._before_last: str | None = None  # in the one whose outcome the host learns in this step

    def record(self, error: Exception) -> None:
        """Records that the present step cannot be taken. Raises the error where there is no other rank."""
        if not self._groups:
            raise error
        if self._present is None:
            self._present = str(error)
            logger.error("%s (the step is skipped on all ranks, and the next one ends with this error)", error)

    def norm_terms(self) -> list[Tensor]:
        """Returns what a norm has to count besides the gradients: NaN after an error since the last step."""
        return [] if self._present is None else [torch.full((1,), math.nan, device=self._device)]

    def end_step(self) -> None:
        """Begins the next step, once the norm of the present one is known."""
        self._before_last, self._last, self._present = self._last, self._present, None

    def raise_on_all_ranks(self) -> None:
        """Raises what a rank has recorded for the step whose outcome the host has just learnt.

        Call it on all ranks when they learn that this step was skipped. Collective.

        Raises:
            RuntimeError: in the same words on every rank, if any had recorded an error.
        """
        errors = {dist.get_rank(): self._before_last}
        for group in self._groups:
            errors = {rank: text for ranks in gather(errors, group).values() for rank, text in ranks.items()}
        ranks = sorted(rank for rank, text in errors.items() if text is not None)
        if ranks:
            raise RuntimeError(
                f"{errors[ranks[0]]} (on {len(ranks)} rank(s), first rank {ranks[0]}; that step was skipped on all "
                "ranks)"
            )


# ---- backwards that an exception has ended


_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)  # -1: no backward runs in this thread


class BackwardTracker:
    """Notices that an exception has ended a backward: the program may catch it and go on.

    The engine reports exceptions of ``engine.backward``. Those of ``loss.backward()`` are noticed when autograd runs
    another graph although the gradients of the one before have not been ended.
    """

    def __init__(self, reducer: GradientReducer, errors: StepErrors, leave: Callable[[], None]) -> None:
        self._reducer, self._errors, self._leave = reducer, errors, leave
        self._error: Exception | None = None
        self._task = -1  # autograd's number of the present backward, if this ran inside it

    def interrupt(self, error: Exception) -> None:
        """Reports that ``error`` has ended the present backward."""
        self._error = error

    def is_in_another_backward(self) -> bool:
        """Whether this runs inside another backward than the last ``begin``."""
        return _graph_task() not in (-1, self._task)

    def begin(self) -> None:
        """Marks the begin of a backward, or that it goes on."""
        task = _graph_task()
        if task != -1 or self._reducer.has_ended:
            self._task = task

    def end_interrupted(self) -> bool:
        """Ends a backward that was interrupted, if there was one, and records an error.

        Call it before a backward or a step.

        Returns:
            Whether the interrupted backward was reduced.
        """
        if self._error is None and not self._reducer.has_ended and self._task != -1:
            self._error = RuntimeError("see its own message")
        if self._error is None:
            return False
        text = in_one_line(self._error)
        was_reduced = self.give_up()
        self._errors.record(
            RuntimeError(
                f"a backward was ended by an exception ({text}) and its gradients are incomplete: call "
                "engine.zero_grad() on every rank before the next backward or step"
            )
        )
        return was_reduced

    def give_up(self) -> bool:
        """Ends the present backward, if there is one. Returns whether it was reduced."""
        self._error, self._task = None, -1
        if self._reducer.has_ended:
            return False
        self._leave()
        return self._reducer.end_interrupted()
