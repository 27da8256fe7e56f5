"""What DeepSpeed calls on our optimizer and its parameters, apart from the step.

Its engine saves and loads checkpoint files through ``DeepSpeedFiles``; they load only at the layout that wrote them.
``deepspeed.utils``' ``safe_get_full_*`` and ``safe_set_full_*`` look for ``_hp_mapping`` and four methods on the
parameter itself, which ``attach`` puts there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from deepspeed_ext.groups import world_group
from deepspeed_ext.optimizers.base import Shard
from deepspeed_ext.optimizers.states import StoredState, stored_part
from deepspeed_ext.zero import sharded_state, stock_files
from deepspeed_ext.zero.bucket import Bucket
from deepspeed_ext.zero.flat_buffer import FlatBuffer
from deepspeed_ext.zero.partition import TensorRange
from deepspeed_ext.zero.sync_errors import gather, run_on_all_ranks

if TYPE_CHECKING:
    from deepspeed_ext.zero.optimizer import EPZeroOptimizer

_METHODS = ("get_full_hp_param", "set_full_hp_param", "get_full_hp_grad", "set_full_hp_grad")


class DeepSpeedFiles:
    """The part of EPZeroOptimizer that DeepSpeed's engine calls for its checkpoint files.

    ``read_files``, which the engine sets while it loads weights alone, returns what ``load_state_dict`` takes.
    """

    read_files: Callable[[], Sequence[Any] | None] | None = None
    nccl_start_alignment_factor = 2  # every shard starts at a multiple of so many elements, in fact of more

    @property
    def _whole(self) -> EPZeroOptimizer:
        return cast("EPZeroOptimizer", self)

    @property
    def round_robin_bit16_groups(self) -> list[list[nn.Parameter]]:
        """The parameters by flat buffer, from which the engine records shapes for zero_to_fp32."""
        return [stock_files.stored_params(flat_buffer) for flat_buffer in self._whole.flat_buffers]

    @property
    def parallel_partitioned_bit16_groups(self) -> list[list[Tensor]]:
        """The parameters' memory, padding included: for each bucket (stock's: group) the shards of all ranks."""
        buckets = [bucket for flat_buffer in self._whole.flat_buffers for bucket in flat_buffer.buckets]
        return [list(bucket.param.split(bucket.layout.shard_numel)) for bucket in buckets]

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's shards, their layout and the fields that DeepSpeed's scripts read.

        Raises RuntimeError while states are on the host, and inside ``averaged_parameters`` of a moving average.
        """
        optimizer = self._whole
        optimizer.require_on_device("state_dict", "hp_params", "lp_params", "optim_states")
        optimizer.require_masters("state_dict")
        optimizer.wait_for_params()
        return stock_files.add_stock_fields(optimizer, sharded_state.state_dict(optimizer))

    @torch.no_grad()
    def load_state_dict(
        self, state_dict_list: Sequence[Any], load_optimizer_states: bool = True, **engine_options: Any
    ) -> None:
        """Restores what ``state_dict`` of the same rank and layout returned, and gathers the parameters. Collective.

        What DeepSpeed's own ZeRO-1 or ZeRO-2 wrote on as many ranks is restored too (stock_files.py).

        Args:
            state_dict_list: one entry for each dense rank, of which only this rank's is read.
            load_optimizer_states: also restore states, options of the parameter groups and the step count.
            engine_options: the engine's further arguments, which have no meaning here.

        Raises:
            ValueError: on every rank and before anything has changed, if any entry was written at another layout, by
                an optimizer with other states that are to be loaded, or by DeepSpeed's own optimizer and does not fit.
            RuntimeError: while states are on the host.
        """
        optimizer = self._whole
        optimizer.require_on_device("load_state_dict")
        rank = dist.get_rank(optimizer.groups.dense)
        own = state_dict_list[rank] if rank < len(state_dict_list) else None
        optimizer.wait_for_params()  # in fp32 they are the masters
        if any(gather(stock_files.is_stock(own), world_group()).values()):
            stock_files.load(optimizer, own, load_optimizer_states)
        else:
            own = self._checked(state_dict_list, load_optimizer_states)
            sharded_state.load_state_dict(optimizer, own, load_optimizer_states)
        optimizer.sync_params_from_master()

    def _restore_from_bit16_weights(self) -> None:
        self.refresh_fp32_params()

    @torch.no_grad()
    def refresh_fp32_params(self) -> None:
        """Sets the masters from the parameters, after the module's weights were loaded without optimizer state.

        DeepSpeed's module file holds the experts of one rank. Where ranks hold different experts, each gets its own
        from the optimizer's files, which ``read_files`` reads; their masters too are what the parameters' dtype holds.
        Collective.

        Raises:
            ValueError: on every rank, if ranks hold different experts and there are no files, or of another layout.
        """
        optimizer = self._whole
        optimizer.require_on_device("refresh_fp32_params", "hp_params", "lp_params")
        optimizer.wait_for_params()
        spread = {f for f in optimizer.flat_buffers if optimizer.is_spread(f.key.expert_group)}
        is_needed = bool(spread or optimizer.frozen_experts)
        for flat_buffer in optimizer.flat_buffers:
            if flat_buffer not in spread:
                flat_buffer.read_masters_from_params()
        if any(gather(is_needed, world_group()).values()):  # a pipeline stage may have none
            own = self._checked(self.read_files() if self.read_files is not None else None, load_states=False)
            sharded_state.load_masters(optimizer, own, spread)
            optimizer.restart_states()
            optimizer.sync_params_from_master()
            for flat_buffer in spread:
                flat_buffer.read_masters_from_params()
        optimizer.restart_states()

    def _checked(self, state_dict_list: Sequence[Any] | None, load_states: bool) -> Any:
        """Returns this rank's entry. Raises ValueError on every rank if any rank has none that fits."""
        optimizer = self._whole
        rank = dist.get_rank(optimizer.groups.dense)
        own = state_dict_list[rank] if state_dict_list is not None and rank < len(state_dict_list) else None
        own = stock_files.ours_in(own)
        run_on_all_ranks(lambda: sharded_state.check_state_dict(optimizer, own, load_states), world_group())
        return own

    def update_lp_params(self) -> None:
        """DeepSpeed's name for ``sync_params_from_master``."""
        self._whole.sync_params_from_master()


class InnerState(Mapping[str, Any]):
    """What ``engine.optimizer.optimizer.state[master]`` shows: a shard's live states, and torch's ``step``.

    Reading ``step`` waits for the device.
    """

    def __init__(self, shard: Shard, optimizer: EPZeroOptimizer) -> None:
        self._shard, self._optimizer = shard, optimizer

    def __getitem__(self, kind: str) -> Any:
        if kind == "step":
            return torch.tensor(float(self._optimizer.step_count))
        self._optimizer.wait_for_params()
        return self._shard.state[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(("step", *self._shard.state))

    def __len__(self) -> int:
        return 1 + len(self._shard.state)

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes torch.save and deepcopy of the inner optimizer's state_dict() write a plain dict, as torch's own is."""
        return dict, (dict(self),)


# tree_map goes into it as into the dict that it stands for.
register_pytree_node(
    InnerState,
    lambda state: (list(state.values()), list(state)),
    lambda values, kinds: dict(zip(kinds, values, strict=True)),
)


class _FullParam:
    """Access to whole masters, states and gradients of one parameter, which lies in ``flat_buffer``."""

    def __init__(self, optimizer: EPZeroOptimizer, flat_buffer: FlatBuffer, name: str) -> None:
        self.optimizer, self._flat_buffer, self._name = optimizer, flat_buffer, name

    def get_full_hp_param(self, optim_state_key: str | None = None) -> Tensor:
        """Returns the fp32 master, or the state of that name, of the parameter's shape. Collective over its group."""

        def read(bucket: Bucket, part: TensorRange) -> Tensor:
            state = self._state(bucket, part, optim_state_key)
            return state.read() if isinstance(state, StoredState) else state

        return self._gather(read)

    @torch.no_grad()
    def set_full_hp_param(self, value: Tensor, optim_state_key: str | None = None) -> None:
        """Sets what this rank owns of the master, or of the state of that name.

        Weights follow with the next step, or ``sync_params_from_master``; in fp32 at once: they are the masters.
        """
        flat = value.reshape(-1)
        if optim_state_key is None and not self._flat_buffer.has_masters:
            self.optimizer.require_at_rest("access to sharded values")
            self._flat_buffer.params[self._name].copy_(value.view_as(self._flat_buffer.params[self._name]))
            return
        for bucket, part in self._own():
            state = self._state(bucket, part, optim_state_key)
            if isinstance(state, StoredState):
                state.write(flat[part.start : part.stop])
            else:
                state.copy_(flat[part.start : part.stop])

    def get_full_hp_grad(self) -> Tensor | None:
        """Returns the mean gradient in fp32, multiplied by the loss scale. Collective over the parameter's group.

        Before it is reduced, inside ``no_sync()`` for one, this rank's own gradient as in stock DeepSpeed; None before
        the first backward of a step.
        """
        self.optimizer.require_at_rest("access to gradients")
        if not self.optimizer.has_reduced:
            return self.optimizer.local_gradient(self._flat_buffer.params[self._name])
        summed = self._gather(lambda bucket, part: bucket.finish_gradient()[part.where])
        return summed / self.optimizer.gradient_divisor

    @torch.no_grad()
    def set_full_hp_grad(self, value: Tensor) -> None:
        """Sets what this rank owns of the mean gradient. Raises RuntimeError before it is reduced."""
        if not self.optimizer.has_reduced:
            raise RuntimeError(f"{self._name!r} has no reduced gradient to set: call this after the last backward")
        flat = value.reshape(-1)
        for bucket, part in self._own():
            gradient = bucket.finish_gradient()
            gradient[part.where] = (flat[part.start : part.stop] * self.optimizer.gradient_divisor).to(gradient)

    def _own(self) -> Iterator[tuple[Bucket, TensorRange]]:
        """What this rank owns of the parameter, with offsets in the buckets' shards."""
        self.optimizer.require_at_rest("access to sharded values")
        for index, _ in self._flat_buffer.ranges[self._name]:
            bucket = self._flat_buffer.buckets[index]
            for part in bucket.layout.shard_ranges(self._flat_buffer.rank):
                if part.name == self._name:
                    yield bucket, part

    @torch.no_grad()
    def _gather(self, read: Callable[[Bucket, TensorRange], Tensor]) -> Tensor:
        param = self._flat_buffer.params[self._name]
        flat = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
        for bucket, part in self._own():
            flat[part.start : part.stop] = read(bucket, part)
        if self._flat_buffer.group_size > 1:
            dist.all_reduce(flat, group=self._flat_buffer.group)
        return flat.view(param.shape)

    def _state(self, bucket: Bucket, part: TensorRange, kind: str | None) -> Tensor | StoredState:
        if kind is None:
            return bucket.shard.master[part.where]
        known = self._flat_buffer.shard_optimizer.state_kinds
        if kind not in known:
            raise ValueError(f"the optimizer keeps no state {kind!r} of {self._name!r}; it has {', '.join(known)}")
        return stored_part(bucket.shard.state, kind, part.where)


def attach(optimizer: EPZeroOptimizer) -> None:
    """Gives every parameter what DeepSpeed's ``safe_get_full_*`` look for, and the wrapped optimizer its states."""
    for flat_buffer in optimizer.flat_buffers:
        for bucket in flat_buffer.buckets:
            optimizer.optimizer.state[bucket.shard.master] = InnerState(bucket.shard, optimizer)  # type: ignore[assignment]
        for name, param in flat_buffer.params.items():
            full = _FullParam(optimizer, flat_buffer, name)
            param._hp_mapping = None  # type: ignore[attr-defined]
            for method in _METHODS:
                setattr(param, method, getattr(full, method))


def end_optimizers_of(params: Iterable[nn.Parameter]) -> None:
    """Ends the optimizers of ours that have any of these parameters, before another engine takes them."""
    for param in params:
        full = getattr(getattr(param, _METHODS[0], None), "__self__", None)
        if isinstance(full, _FullParam):
            full.optimizer.give_way()


def detach(optimizer: EPZeroOptimizer) -> None:
    """Removes what ``attach`` has put on the parameters."""
    for param in (param for flat_buffer in optimizer.flat_buffers for param in flat_buffer.params.values()):
        for name in ("_hp_mapping", *_METHODS):
            if hasattr(param, name):
                delattr(param, name)
