"""Reads the optimizer's files of DeepSpeed's own ZeRO-1 and ZeRO-2 into EPZeroOptimizer.

A rank's file holds, for each parameter group, one flat part of the fp32 masters and states, and where in it the
fragment of each parameter lies. The fragments of all ranks, in the order of ranks, are the flattened parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.groups import world_group
from deepspeed_ext.zero.grad_scaling import loss_scale_state
from deepspeed_ext.zero.sync_errors import gather, run_on_all_ranks

if TYPE_CHECKING:
    from deepspeed_ext.zero.optimizer import EPZeroOptimizer

_MASTERS, _MAPPINGS, _OPTIMIZER = "single_partition_of_fp32_groups", "param_slice_mappings", "base_optimizer_state"


class _Fragment(NamedTuple):
    """What one rank's file holds of a parameter: ``numel`` elements at ``start`` of the group's flat tensors."""

    group: int
    start: int
    numel: int


def is_stock(saved: Any) -> bool:
    """Whether a rank's state dict was written by DeepSpeed's own optimizer of ZeRO-1 or ZeRO-2."""
    return isinstance(saved, Mapping) and {_MASTERS, _MAPPINGS, _OPTIMIZER} <= saved.keys()


@torch.no_grad()
def load(optimizer: EPZeroOptimizer, saved: Any, load_states: bool) -> None:
    """Restores masters, and with ``load_states`` states, options of the groups, step count and loss scale.

    Holds one whole parameter at a time. Collective over the dense group.

    Args:
        optimizer: is filled; its parameters are gathered by the caller.
        saved: the state dict of this rank's file.
        load_states: False: masters alone.

    Raises:
        ValueError: on every rank and before anything has changed, if ranks hold different experts, the optimizer keeps
            states that the file does not hold, or the files are of another model.
    """
    group = optimizer.groups.dense
    fragments = run_on_all_ranks(lambda: _check(optimizer, saved, load_states), world_group())
    held = gather({name: fragment.numel for name, fragment in fragments.items()}, group)
    by_rank = [held[rank] for rank in sorted(held)]
    run_on_all_ranks(lambda: _check_sizes(optimizer, by_rank), world_group())
    own_rank = dist.get_rank(group)
    shards: dict[str, list[Any]] = {}
    for shard in optimizer.state_shards():
        shards.setdefault(shard.name, []).append(shard)
    for name, kind, numel, device in _pieces(optimizer, load_states):
        whole = torch.zeros(numel, dtype=torch.float32, device=device)
        if fragment := fragments.get(name):
            start = sum(sizes.get(name, 0) for sizes in by_rank[:own_rank])
            flat = _flat(saved, fragment.group, kind)
            whole[start : start + fragment.numel] = flat[fragment.start : fragment.start + fragment.numel].to(whole)
        dist.all_reduce(whole, group=group)
        for shard in shards.get(name, ()):
            part = whole[shard.start : shard.stop]
            if kind in shard.stored:
                shard.stored[kind].write(part)
            else:
                shard.tensors[kind].copy_(part)
    if not load_states:
        optimizer.restart_states()
        return
    options = saved[_OPTIMIZER].get("param_groups", [])
    if len(options) == len(optimizer.param_groups):
        for target, source in zip(optimizer.param_groups, options, strict=True):
            target.update({key: source[key] for key in (source.keys() & target.keys()) - {"params"}})
    optimizer.step_count = max(gather(_steps(saved), group).values())
    optimizer.loss_scale_state = loss_scale_state(saved.get("loss_scaler"))


def _pieces(optimizer: EPZeroOptimizer, load_states: bool) -> Iterator[tuple[str, str, int, torch.device]]:
    """Yields name, kind, number of elements and device of all that is loaded, in the same order on every rank."""
    for flat_buffer in optimizer.flat_buffers:
        for name, param in flat_buffer.params.items():
            for kind in ("master", *(flat_buffer.shard_optimizer.state_kinds if load_states else ())):
                yield name, kind, param.numel(), param.device


def _flat(saved: Any, group: int, kind: str) -> Tensor:
    return saved[_MASTERS][group] if kind == "master" else saved[_OPTIMIZER]["state"][group][kind]


def _check(optimizer: EPZeroOptimizer, saved: Any, load_states: bool) -> dict[str, _Fragment]:
    """Returns where this rank's file holds each parameter. Raises ValueError for what cannot be loaded."""
    if not is_stock(saved):
        raise ValueError("this rank's optimizer file is not of DeepSpeed's ZeRO-1 or ZeRO-2, another rank's is")
    if any(optimizer.is_spread(flat_buffer.key.expert_group) for flat_buffer in optimizer.flat_buffers):
        raise ValueError(
            "a checkpoint of DeepSpeed's own ZeRO holds experts that are spread over ranks in another way; load its "
            "weights with load_module_only=True, or convert it by ds_to_universal and set checkpoint.load_universal"
        )
    if load_states and not isinstance(saved[_OPTIMIZER], Mapping):
        raise ValueError(
            "the checkpoint was written with zero_optimization.elastic_checkpoint; load it with "
            "load_optimizer_states=False, or convert it by ds_to_universal and set checkpoint.load_universal"
        )
    fragments = {
        name: _Fragment(group, int(address.start), int(address.numel))
        for group, addresses in enumerate(saved[_MAPPINGS])
        for name, address in addresses.items()
    }
    if load_states and (optimizer.matrix_states() or any(f.tensor_state for f in optimizer.flat_buffers)):
        raise ValueError(
            f"a checkpoint of DeepSpeed's own ZeRO holds no states of whole matrices or tensors, which "
            f"{type(optimizer.optimizer).__name__} has; use load_optimizer_states=False"
        )
    for name, kind, _, _ in _pieces(optimizer, load_states):
        if kind != "master" and name in fragments:
            states = saved[_OPTIMIZER]["state"].get(fragments[name].group, {})
            if kind not in states:
                raise ValueError(
                    f"the checkpoint holds no state {kind!r} of {name!r}, it has {', '.join(map(str, states))}; load "
                    "it with the optimizer that wrote it, or use load_optimizer_states=False"
                )
    return fragments


def _check_sizes(optimizer: EPZeroOptimizer, by_rank: list[dict[str, int]]) -> None:
    for name, kind, numel, _ in _pieces(optimizer, False):
        found = sum(sizes.get(name, 0) for sizes in by_rank)
        if kind == "master" and found != numel:
            raise ValueError(
                f"the checkpoint's files of {len(by_rank)} ranks hold {found} elements of {name!r}, the model has "
                f"{numel}; load it into the model, and at the number of ranks, that wrote it"
            )


def _steps(saved: Any) -> int:
    """Returns the applied steps; torch's optimizers count them in the states, DeepSpeed's fused ones in the groups."""
    saved = saved[_OPTIMIZER]
    counts = [one["step"] for one in (*saved["state"].values(), *saved.get("param_groups", [])) if "step" in one]
    return int(max(counts, default=0))
