"""The optimizer's files of DeepSpeed's own ZeRO-1 and ZeRO-2: reads them, and writes their fields into ours.

A rank's file holds, for each parameter group, one flat part of the fp32 masters and states, and where in it the
fragment of each parameter lies. The fragments of all ranks, in the order of ranks, are the flattened parameter.

Ours holds the same for each flat buffer, so that ``zero_to_fp32`` and ``ds_to_universal`` read it. A rank owns one
shard of every bucket there, and the flat buffer is put together bucket by bucket: ``FlatPartition``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed import __version__ as deepspeed_version
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from deepspeed_ext.groups import world_group
from deepspeed_ext.zero.grad_scaling import loss_scale_state
from deepspeed_ext.zero.sharded_state import has_whole_states
from deepspeed_ext.zero.sync_errors import gather, run_on_all_ranks

if TYPE_CHECKING:
    from deepspeed_ext.zero.flat_buffer import FlatBuffer
    from deepspeed_ext.zero.optimizer import EPZeroOptimizer

_OURS = "deepspeed_ext"  # in the base optimizer's state, which ds_to_universal does not copy into its general file
_UNIVERSAL_KINDS = ("exp_avg", "exp_avg_sq")  # ds_to_universal reads these two and no other
_MASTERS, _MAPPINGS, _OPTIMIZER = "single_partition_of_fp32_groups", "param_slice_mappings", "base_optimizer_state"


class _Fragment(NamedTuple):
    """What one rank's file holds of a parameter: ``numel`` elements at ``start`` of the group's flat tensors."""

    group: int
    start: int
    numel: int


def is_stock(saved: Any) -> bool:
    """Whether a rank's state dict was written by DeepSpeed's own optimizer of ZeRO-1 or ZeRO-2."""
    is_zero = isinstance(saved, Mapping) and {_MASTERS, _MAPPINGS, _OPTIMIZER} <= saved.keys()
    return is_zero and _OURS not in saved[_OPTIMIZER]


# ---- our files


class FlatPartition(Tensor):
    """What one rank owns of a flat buffer, as DeepSpeed's scripts take it: in the place of one flat tensor.

    It shares the memory of its pieces, so a file grows by no data. It knows what the scripts do and nothing else:
    ``narrow`` and ``clone`` of one, and ``torch.cat`` of those of all ranks, which is a tensor in the flat buffer's
    order, without the elements between parameters: only newer versions of zero_to_fp32 can skip those. Everything else
    is an error, so no other program takes it for the contiguous part that stock ZeRO owns.

    Args:
        pieces: one flat tensor for each bucket, the rank's shard; after ``narrow`` some are empty.
        refusal: raised as a ValueError for every use; None: it can be used.
        places: where the parameters lie in the flat buffer, as (start, stop); None: ``cat`` takes all elements.
    """

    pieces: list[Tensor]
    refusal: str | None
    places: Sequence[tuple[int, int]] | None

    def __new__(
        cls, pieces: Sequence[Tensor], refusal: str | None = None, places: Sequence[tuple[int, int]] | None = None
    ) -> FlatPartition:
        self = torch.empty(0).as_subclass(cls)
        self.pieces, self.refusal, self.places = list(pieces), refusal, places
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the pieces, which ``torch.save`` writes once however often they are in a file."""
        return FlatPartition, (self.pieces, self.refusal, self.places)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatPartition:
        return FlatPartition(copy.deepcopy(self.pieces, memo), self.refusal, self.places)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs ``narrow``, ``clone`` and ``cat``; raises ValueError for every other function."""
        first = args[0] if args else None
        parts: list[Any] = list(first) if isinstance(first, (list, tuple)) else [first]
        for refusal in (one.refusal for one in parts if isinstance(one, FlatPartition) and one.refusal):
            raise ValueError(refusal)
        if func is torch.cat and all(isinstance(one, FlatPartition) for one in parts):
            pieces = [piece for of_ranks in zip(*(one.pieces for one in parts), strict=True) for piece in of_ranks]
            return torch.cat(pieces if parts[0].places is None else list(_within(pieces, parts[0].places)))
        if func is Tensor.clone and isinstance(first, FlatPartition):
            return FlatPartition([piece.clone() for piece in first.pieces])
        if func is Tensor.narrow and isinstance(first, FlatPartition):
            _, _, start, numel = args
            starts = [0, *accumulate(piece.numel() for piece in first.pieces)]
            return FlatPartition(
                [
                    piece[max(start - begin, 0) : max(start + numel - begin, 0)]
                    for piece, begin in zip(first.pieces, starts, strict=False)
                ]
            )
        raise ValueError(
            "the optimizer's files are of deepspeed_ext; load them by an engine of deepspeed_ext.initialize, or "
            "convert them by ds_to_universal and set checkpoint.load_universal"
        )


def _within(pieces: Sequence[Tensor], places: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """Yields what lies in ``places`` of the tensor that the pieces are one after the other."""
    begin = 0
    for piece in pieces:
        end = begin + piece.numel()
        yield from (piece[max(a - begin, 0) : b - begin] for a, b in places if a < end and b > begin)
        begin = end


def add_stock_fields(optimizer: EPZeroOptimizer, ours: dict[str, Any]) -> dict[str, Any]:
    """Returns a rank's state dict with ``ours`` in it and the fields that DeepSpeed's scripts read. Copies nothing.

    Args:
        optimizer: whose.
        ours: of ``sharded_state.state_dict``; its tensors are taken.
    """
    shards, masters, states = iter(ours["shards"]), [], {}
    step = torch.tensor(float(ours["step_count"]))
    for index, flat_buffer in enumerate(optimizer.flat_buffers):
        own = [next(shards) for _ in flat_buffer.buckets]
        spread = None
        if optimizer.is_spread(flat_buffer.key.expert_group):
            spread = (
                f"experts of {flat_buffer.key.expert_group!r} are spread over ranks, which DeepSpeed's scripts would "
                "mix; load them by an engine of deepspeed_ext.initialize and read them by safe_get_full_fp32_param"
            )
        masters.append(FlatPartition([shard["master"] for shard in own], spread, _places(flat_buffer)))
        states[index] = {kind: _universal_state(optimizer, own, kind, spread) for kind in _UNIVERSAL_KINDS}
        states[index]["step"] = step
    fields = {
        _OPTIMIZER: {
            "state": states,
            # Without parameters stock's engine refuses the groups, as their sizes differ.
            "param_groups": [{**options, "params": []} for options in ours["param_groups"]],
            _OURS: ours,
        },
        _MASTERS: masters,
        _MAPPINGS: [_addresses(flat_buffer) for flat_buffer in optimizer.flat_buffers],
        "partition_count": [dist.get_world_size(optimizer.groups.dense)] * len(masters),
        "zero_stage": optimizer.options.stage,
        "clip_grad": optimizer.clip_grad,
        "ds_version": deepspeed_version,
    }
    return fields | _stock_loss_scaler(optimizer)


def ours_in(saved: Any) -> Any:
    """Returns what ``add_stock_fields`` was given; what earlier versions wrote, and anything else, as it is."""
    base = saved.get(_OPTIMIZER) if isinstance(saved, Mapping) else None
    return base[_OURS] if isinstance(base, Mapping) and _OURS in base else saved


def stored_params(flat_buffer: FlatBuffer) -> list[torch.nn.Parameter]:
    """The parameters in the order of a flat buffer, without those that have no elements, as stock keeps them."""
    return [param for param in flat_buffer.params.values() if param.numel()]


def _universal_state(optimizer: EPZeroOptimizer, own: list[dict[str, Any]], kind: str, spread: str | None) -> Tensor:
    tensors = [shard[kind] for shard in own if kind in shard and shard[kind].dtype == torch.float32]
    if len(tensors) == len(own):
        return FlatPartition(tensors, spread)
    return FlatPartition(
        [],
        f"{type(optimizer.optimizer).__name__} keeps no state {kind!r} in fp32, which a universal checkpoint needs; "
        "zero_to_fp32 gives the weights",
    )


def _addresses(flat_buffer: FlatBuffer) -> dict[str, fragment_address]:
    """Where this rank's part of each parameter lies in its shards, one after the other.

    A parameter that reaches into the next bucket ends with the shard and goes on at the next one's start: one range.
    """
    addresses: dict[str, fragment_address] = {}
    first = 0
    for bucket in flat_buffer.layout.buckets:
        for part in bucket.shard_ranges(flat_buffer.rank):
            known = addresses.setdefault(part.name, fragment_address(numel=0, start=first + part.offset))
            known.numel += part.numel
        first += bucket.shard_numel
    return addresses


def _places(flat_buffer: FlatBuffer) -> list[tuple[int, int]]:
    """Where the stored parameters lie in the flat buffer."""
    places = [flat_buffer.slice_of(name) for name, param in flat_buffer.params.items() if param.numel()]
    return [(place.start, place.stop) for place in places]


def _stock_loss_scaler(optimizer: EPZeroOptimizer) -> dict[str, Any]:
    """DeepSpeed's dynamic loss scaler at the present scale, with which a universal checkpoint goes on; the opposite of
    ``grad_scaling.loss_scale_state``."""
    options, state = optimizer.options.loss_scale, optimizer.loss_scale_state
    if options is None or state is None or not options.is_dynamic:
        return {}
    scaler = DynamicLossScaler(
        state["scale"], options.window, options.minimum, options.hysteresis, options.refills_hysteresis
    )
    scaler.cur_iter, scaler.cur_hysteresis = int(state["clean_steps"]), int(state["hysteresis_left"])
    return {"loss_scaler": scaler, "dynamic_loss_scale": True}


# ---- stock's files


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
            shard.write(kind, whole[shard.start : shard.stop])
    if not load_states:
        optimizer.restart_states()
        return
    optimizer.restart_average()
    load_options(optimizer, saved[_OPTIMIZER], saved.get("loss_scaler"))
    optimizer.step_count = max(gather(_steps(saved), group).values())


def load_options(optimizer: EPZeroOptimizer, saved: Mapping[str, Any], loss_scaler: Any) -> None:
    """Restores the parameter groups' options, if there are as many groups (converters add empty ones), and the loss
    scale from DeepSpeed's scaler."""
    groups = [dict(group) for group in saved.get("param_groups") or ()]
    if len(groups) == len(optimizer.param_groups):
        for target, source in zip(optimizer.param_groups, groups, strict=True):
            target.update({key: source[key] for key in (source.keys() & target.keys()) - {"params"}})
    optimizer.loss_scale_state = loss_scale_state(loss_scaler)


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
    if load_states and has_whole_states(optimizer):
        raise ValueError(
            "a checkpoint of DeepSpeed's own ZeRO holds no states of whole matrices or tensors, which "
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
