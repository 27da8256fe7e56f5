"""The optimizer's state for checkpoints: by parameter, whatever the layout; and DeepSpeed's files, one layout only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed_ext.zero.bucket import Bucket
from deepspeed_ext.zero.family import Family

if TYPE_CHECKING:
    from deepspeed_ext.zero.optimizer import EPZeroOptimizer

_FORMAT = "deepspeed_ext.EPZeroOptimizer/2"


@dataclass(frozen=True)
class StateShard:
    """What this rank owns of one parameter.

    ``[start, stop)`` is a range of the flattened local parameter. ``tensors`` holds fp32 1-D tensors of length
    ``stop - start``: "master" and the rule's states ("exp_avg", "exp_avg_sq" for Adam and AdamW). Writing into them
    changes the optimizer once ``sync_params_from_master`` is called, before the next step.
    """

    name: str
    param: nn.Parameter
    start: int
    stop: int
    tensors: dict[str, Tensor]
    source: tuple[Family, Bucket, dict[str, Tensor]] = field(repr=False)  # states that are not kept in fp32, decoded


def state_shards(optimizer: EPZeroOptimizer) -> list[StateShard]:
    """This rank's pieces; states kept in fp32 are live views, others decoded copies."""
    shards = []
    for family in optimizer.families:
        for bucket in family.buckets:
            kinds = family.rule.state_kinds
            states = {kind: family.rule.read_state(bucket.shard, kind) for kind in kinds}
            copies = {kind: state for kind, state in states.items() if not _is_live(state, bucket, kind)}
            flat = {"master": bucket.shard.master, **states}
            for piece in bucket.layout.shard_pieces(family.rank):
                end = piece.offset + piece.stop - piece.start
                views = {kind: tensor[piece.offset : end] for kind, tensor in flat.items()}
                source = (family, bucket, copies)
                shards.append(StateShard(piece.name, family.params[piece.name], piece.start, piece.stop, views, source))
    return shards


def _is_live(state: Tensor, bucket: Bucket, kind: str) -> bool:
    kept = bucket.shard.state.get(kind)
    return kept is not None and kept.data_ptr() == state.data_ptr()


def write_back(optimizer: EPZeroOptimizer, shards: Sequence[StateShard]) -> None:
    """Encodes the decoded copies among ``shards`` again."""
    done: set[int] = set()
    for shard in shards:
        family, bucket, copies = shard.source
        if id(copies) not in done:
            done.add(id(copies))
            for kind, value in copies.items():
                family.rule.write_state(bucket.shard, kind, value)


def _layout(optimizer: EPZeroOptimizer) -> list[Any]:
    return [
        (
            str(family.key),
            [
                (bucket.group_size, bucket.shard_numel, [(p.name, p.start, p.stop, p.offset) for p in bucket.pieces])
                for bucket in family.layout.buckets
            ],
        )
        for family in optimizer.families
    ]


def state_dict(optimizer: EPZeroOptimizer) -> dict[str, Any]:
    """This rank's shards and their layout."""
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {
        "format": _FORMAT,
        "layout": _layout(optimizer),
        "step_count": optimizer.step_count,
        "loss_scale": optimizer.loss_scale_state,
        "param_groups": options,
        "shards": [
            # A master that is part of the parameters' buffer would be written with all of it.
            {"master": bucket.shard.master if family.has_masters else bucket.shard.master.clone(), **bucket.shard.state}
            for family in optimizer.families
            for bucket in family.buckets
        ],
    }


def check_state_dict(optimizer: EPZeroOptimizer, saved: Any) -> None:
    """Raises ValueError if ``saved`` was written at another layout or by another optimizer. Local."""
    if not isinstance(saved, Mapping) or saved.get("format") != _FORMAT:
        raise ValueError("the checkpoint was not written by this version of EPZeroOptimizer; it cannot be loaded here")
    if saved["layout"] != _layout(optimizer):
        raise ValueError(
            "the checkpoint was written at another parameter, bucket or rank layout; DeepSpeed's files load only at "
            "the layout that wrote them"
        )


@torch.no_grad()
def load_state_dict(optimizer: EPZeroOptimizer, saved: Any, load_optimizer_states: bool) -> None:
    """Restores masters, and with ``load_optimizer_states`` states, options and step count; ``saved`` is checked."""
    buckets = [bucket for family in optimizer.families for bucket in family.buckets]
    for bucket, shard in zip(buckets, saved["shards"], strict=True):
        bucket.shard.master.copy_(shard["master"])
        if load_optimizer_states:
            for kind in shard.keys() - {"master"}:
                bucket.shard.state[kind].copy_(shard[kind])
    if load_optimizer_states:
        for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update(options)
        optimizer.step_count = saved["step_count"]
        optimizer.loss_scale_state = saved.get("loss_scale")
