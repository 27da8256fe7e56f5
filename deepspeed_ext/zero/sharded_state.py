"""The optimizer's state by parameter, for checkpoints at any layout; and DeepSpeed's own files, for one layout only.

``state_shards`` gives what this rank owns of each parameter, whatever buckets and shards it lies in. ``Stage3States``
gives the same of DeepSpeed's ZeRO-3 optimizer, so a checkpoint written from either loads at any other stage and layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed_ext.zero.bucket import Bucket
from deepspeed_ext.zero.flat_buffer import FlatBuffer

if TYPE_CHECKING:
    from deepspeed_ext.zero.optimizer import EPZeroOptimizer

_FORMAT = "deepspeed_ext.EPZeroOptimizer/2"
_STAGE3_KINDS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StateShard:
    """What this rank owns of one parameter.

    Writing into ``tensors`` changes the optimizer once ``sync_params_from_master`` is called, before the next step.

    Attributes:
        name: the parameter's.
        param: the local parameter; of ZeRO-3 a stand-in on the meta device with the whole one's shape and dtype.
        start: first element of the flattened local parameter.
        stop: one past the last.
        tensors: fp32 of shape [stop - start]: "master" and the optimizer's states ("exp_avg", "exp_avg_sq" for Adam and
            AdamW).
        source: flat buffer and bucket, and copies of states that are not kept in fp32; None if ``tensors`` are live.
    """

    name: str
    param: nn.Parameter
    start: int
    stop: int
    tensors: dict[str, Tensor]
    source: tuple[FlatBuffer, Bucket, dict[str, Tensor]] | None = field(default=None, repr=False)


def state_shards(optimizer: EPZeroOptimizer) -> list[StateShard]:
    """Returns what this rank owns; states kept in fp32 are live views, others decoded copies."""
    shards = []
    for flat_buffer in optimizer.flat_buffers:
        for bucket in flat_buffer.buckets:
            kinds = flat_buffer.shard_optimizer.state_kinds
            states = {kind: flat_buffer.shard_optimizer.read_state(bucket.shard, kind) for kind in kinds}
            copies = {kind: state for kind, state in states.items() if not _is_live(state, bucket, kind)}
            source = (flat_buffer, bucket, copies)
            for part in bucket.layout.shard_ranges(flat_buffer.rank):
                views = {"master": bucket.shard.master[part.where]}
                views |= {kind: tensor[part.where] for kind, tensor in states.items()}
                shards.append(
                    StateShard(part.name, flat_buffer.params[part.name], part.start, part.stop, views, source)
                )
    return shards


def _is_live(state: Tensor, bucket: Bucket, kind: str) -> bool:
    kept = bucket.shard.state.get(kind)
    return kept is not None and kept.data_ptr() == state.data_ptr()


def write_back(shards: Sequence[StateShard]) -> None:
    """Encodes the decoded copies among ``shards`` again."""
    done: set[int] = set()
    for shard in shards:
        if shard.source is not None and id(shard.source) not in done:
            done.add(id(shard.source))
            flat_buffer, bucket, copies = shard.source
            for kind, value in copies.items():
                flat_buffer.shard_optimizer.write_state(bucket.shard, kind, value)


# ---- DeepSpeed's files


def _layout(optimizer: EPZeroOptimizer) -> list[Any]:
    return [
        (
            str(flat_buffer.key),
            [
                (bucket.group_size, bucket.shard_numel, [(p.name, p.start, p.stop, p.offset) for p in bucket.ranges])
                for bucket in flat_buffer.layout.buckets
            ],
        )
        for flat_buffer in optimizer.flat_buffers
    ]


def state_dict(optimizer: EPZeroOptimizer) -> dict[str, Any]:
    """Returns this rank's shards and their layout."""
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {
        "format": _FORMAT,
        "layout": _layout(optimizer),
        "step_count": optimizer.step_count,
        "loss_scale": optimizer.loss_scale_state,
        "param_groups": options,
        "shards": [
            # A master that is part of the parameters' buffer would be written with all of it.
            {
                "master": bucket.shard.master if flat_buffer.has_masters else bucket.shard.master.clone(),
                **bucket.shard.state,
            }
            for flat_buffer in optimizer.flat_buffers
            for bucket in flat_buffer.buckets
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
    """Restores masters from a checked state dict, and with ``load_optimizer_states`` states, options and step count."""
    buckets = [bucket for flat_buffer in optimizer.flat_buffers for bucket in flat_buffer.buckets]
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


# ---- DeepSpeed's ZeRO-3


class Stage3States:
    """Reads and writes the AdamW states of an engine with DeepSpeed's ZeRO-3. Every method is local.

    DeepSpeed keeps, for groups of parameters, one flat fp32 tensor of this rank's parts and the optimizer's states of
    the same shape; where a parameter's part lies is in ``grad_position``.

    Args:
        engine: DeepSpeed's.

    Raises:
        ValueError: another optimizer than torch's Adam or AdamW, or states on NVMe.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        basic = self._optimizer.optimizer
        if not isinstance(basic, (torch.optim.Adam, torch.optim.AdamW)):
            raise ValueError(f"checkpoints of ZeRO-3 need torch's Adam or AdamW, not {type(basic).__name__}")
        if self._optimizer.swap_optimizer:
            raise ValueError("checkpoints of ZeRO-3 need the states in device or host memory, not on NVMe")

    def state_shards(self) -> list[StateShard]:
        """Returns what this rank owns, as live views, without padding and parameters of which it owns nothing."""
        optimizer = self._optimizer
        shards = []
        for name, param in self._engine.module.named_parameters():
            group, offset, size = optimizer.grad_position[optimizer.get_param_id(param)]
            start = optimizer._get_param_partition_rank(param) * size
            stop = min(start + size, param.ds_numel)
            if start >= stop:
                continue
            master = optimizer.fp32_partitioned_groups_flat[group]
            flat = {"master": master.detach(), **{kind: self._states(master)[kind] for kind in _STAGE3_KINDS}}
            tensors = {kind: tensor.narrow(0, offset, stop - start) for kind, tensor in flat.items()}
            whole = nn.Parameter(torch.empty(param.ds_shape, dtype=param.dtype, device="meta"), requires_grad=False)
            shards.append(StateShard(name, whole, start, stop, tensors))
        return shards

    def forget_copies(self) -> None:
        """Does nothing: all shards are live, none is a copy."""

    @property
    def step_count(self) -> int:
        """Optimizer steps applied."""
        return int(self._states(self._optimizer.fp32_partitioned_groups_flat[0])["step"])

    @step_count.setter
    def step_count(self, value: int) -> None:
        for master in self._optimizer.fp32_partitioned_groups_flat:
            self._states(master)["step"].fill_(value)

    def sync_params_from_master(self) -> None:
        """Makes the next forward gather what was written into the masters."""
        optimizer = self._optimizer
        optimizer._partition_all_parameters()  # as its step does: what is whole now would stay as it was
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)

    def _states(self, master: Tensor) -> dict[str, Tensor]:
        """AdamW's, which torch makes in the first step only; a checkpoint may come before."""
        state = self._optimizer.optimizer.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for kind in _STAGE3_KINDS:
                state[kind] = torch.zeros_like(master, requires_grad=False)
        return dict(state)
