"""Do all ranks describe the same parameters? The same error on every rank if not.

Ranks that disagree would exchange buffers of different meaning or wait for each other for ever, so the comparison
happens before the first collective that carries data.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from deepspeed_ext.config_checks import in_one_line
from deepspeed_ext.groups import ZeroGroups, expert_group_name, ranks_of, world_group
from deepspeed_ext.zero.options import ZeroOptions

# (name, shape, dtype, the optimizer's parameter group with its options, or None)
Signature = tuple[str, tuple[int, ...], str, str | None]


Signatures = dict[str | None, list[Signature]]  # by expert group, None: dense
T = TypeVar("T")


@dataclass(frozen=True)
class _Member:
    """What a rank says of one of its groups; thousands of these are exchanged, so lists are replaced by digests."""

    ranks: str  # digest of those of the group
    num_ranks: int
    parameters: str  # digest of its parameters there: names, shapes, dtypes, parameter groups, order
    outside: tuple[int, ...]  # ranks of an expert group that are not in the dense one


def parameter_signatures(model: nn.Module, param_groups: Sequence[dict[str, Any]]) -> Signatures:
    """Describes the model's parameters by expert group, in the model's order; ``param_groups`` are the optimizer's.

    Raises ValueError if a parameter is in two groups, is not the model's, shares memory with another parameter object,
    or has gradients that cannot be reduced (a sparse embedding).
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
    """Ranks with another lr would update their shards of one model by another rule."""
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


def gather(item: T, group: dist.ProcessGroup) -> dict[int, T]:
    """Every rank's item, by global rank. Collective over ``group``."""
    ranks = dist.get_process_group_ranks(group)
    items: list[Any] = [None] * len(ranks)
    dist.all_gather_object(items, item, group=group)
    return dict(zip(ranks, items, strict=True))


def together(action: Callable[[], T], group: dist.ProcessGroup) -> T:
    """What ``action``, which must not communicate, returns here. Raises ValueError on every rank of ``group``, with the
    words of the first that failed, if it fails on any: no rank waits for one that has left. Collective."""
    result: list[T] = []
    error = cause = None
    try:
        result.append(action())
    except Exception as failure:
        error, cause = in_one_line(failure), failure
    errors = {rank: text for rank, text in gather(error, group).items() if text is not None}
    if errors:
        first = min(errors)
        raise ValueError(f"{errors[first]} (on {len(errors)} rank(s), first rank {first})") from cause
    return result[0]


def same_everywhere(what: str, value: Any, group: dist.ProcessGroup) -> None:
    """Raises ValueError on every rank of ``group`` unless all pass the same. Collective."""
    everybody = gather(value, group)
    first = min(everybody)
    for rank, other in everybody.items():
        if other != everybody[first]:
            raise ValueError(f"ranks disagree on {what}: rank {first} has {everybody[first]}, rank {rank} has {other}")


def check_agreement(signatures: Signatures, groups: ZeroGroups, options: ZeroOptions) -> None:
    """Raises ValueError on every rank if ranks of one group describe different parameters, a group is misplaced, or
    options differ. Collective over all ranks: one exchange when all agree; a second one finds the first difference.
    """
    own: dict[str | None, _Member] = {}
    dense = set(ranks_of(groups.dense))
    for name in (None, *groups.expert):
        described = repr(signatures.get(name, []))
        ranks = ranks_of(groups.of(name))
        # Tensor-parallel ranks may hold replicas of an expert.
        outside = sorted(set(ranks) - dense) if groups.tensor is None else []
        own[name] = _Member(_digest(repr(ranks)), len(ranks), _digest(described), tuple(outside))
    everybody = gather((own, options), world_group())
    for rank, (_, other) in everybody.items():
        if other != everybody[0][1]:
            raise ValueError(f"ranks disagree on options: rank 0 has {everybody[0][1]}, rank {rank} has {other}")
    members = {rank: entries for rank, (entries, _) in everybody.items()}
    for entries in members.values():
        for name, member in entries.items():
            if member.outside:
                raise ValueError(f"expert group {name!r} has ranks {list(member.outside)} outside the dense group")
    # Only the ranks of a group can say so of it. A multiple: in torch's fake world everybody says what this rank says.
    if all(count % member.num_ranks == 0 for (_, member), count in _alike(members).items()):
        return
    details = gather({name: (ranks_of(groups.of(name)), signatures.get(name, [])) for name in own}, world_group())
    for rank, entries in members.items():
        for name, member in entries.items():
            for peer in details[rank][name][0]:
                if members[peer].get(name) != member:
                    theirs = details[peer].get(name, ([], []))[1]
                    raise ValueError(_difference(name, rank, details[rank][name][1], peer, theirs))


def _alike(members: dict[int, dict[str | None, _Member]]) -> Counter[tuple[str | None, _Member]]:
    """How many ranks describe a group in the same words. All of them do if they are as many as it has ranks: looking
    at each rank's peers instead would take the square of the number of ranks."""
    return Counter((name, member) for entries in members.values() for name, member in entries.items())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _difference(name: str | None, rank: int, mine: list[Signature], peer: int, theirs: list[Signature]) -> str:
    family = "dense parameters" if name is None else f"expert group {name!r}"
    for left, right in zip_longest(mine, theirs):
        if left != right:
            return (
                f"ranks disagree on the {family}: rank {rank} has {_describe(left)}, rank {peer} has "
                f"{_describe(right)}; every rank of a group must build the same model and parameter groups in order"
            )
    return f"ranks {rank} and {peer} disagree on the members of the group of the {family}"


def _describe(signature: Signature | None) -> str:
    if signature is None:
        return "nothing more"
    name, shape, dtype, group = signature
    where = "not optimized" if group is None else f"in {group}"
    return f"{name!r} {shape} {dtype} {where}"
