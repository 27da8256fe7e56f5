"""EPZeroOptimizer: ZeRO stage 1 whose expert states are sharded over the ranks that hold the same experts.

One step, as data walks: backward leaves p.grad -> a hook adds it to the family's fp32 main_grad and frees it; at the
accumulation boundary each family reduce-scatters main_grad over its own group; one global norm; clip; the wrapped
torch optimizer updates the fp32 master shards; each rank casts its masters into its part of the parameters and the
group gathers the rest.

Scale: the engine divides each loss by the accumulation steps, and a gradient sums over the family's group, so dividing
by the number of ranks of the DENSE group gives the mean over the global batch. That holds for experts too: through
the exchange of tokens an expert's gradient already contains the losses of all its expert-parallel peers, and the sum
over its replicas adds the others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import nn

from deepspeed_ext.groups import ZeroGroups, expert_group_name, ranks_of
from deepspeed_ext.zero.family import SUPPORTED_DTYPES, Family, FamilyKey
from deepspeed_ext.zero.norm import clip_coefficient, global_norm
from deepspeed_ext.zero.partition import ParamSpec, plan_families

logger = logging.getLogger("deepspeed_ext")

# torch optimizers whose update of an element depends on others: on a slice of a flat buffer they would be wrong.
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
_CHECKPOINT_FORMAT = "deepspeed_ext.EPZeroOptimizer/1"


@dataclass(frozen=True)
class StateShard:
    """What this rank owns of one parameter.

    ``[start, stop)`` is a range of the flattened local parameter. ``tensors`` holds 1-D live views of length
    ``stop - start``: "master" (fp32) and the wrapped optimizer's element-wise states ("exp_avg", "exp_avg_sq" for
    Adam and AdamW). Writing into them changes the optimizer; call ``sync_params_from_master`` after changing masters.
    """

    name: str
    param: nn.Parameter
    start: int
    stop: int
    tensors: dict[str, torch.Tensor]


class EPZeroOptimizer(ZeROOptimizer):
    """Wraps an element-wise torch optimizer (AdamW, Adam, SGD, ...) into sharded fp32 masters and states.

    ``optimizer`` must be fresh; its param_groups keep their options (lr, weight_decay, ...) and get master shards in
    place of the parameters, so schedulers built on it keep working. ``param_names`` maps parameters to names.
    ``max_norm`` 0 turns clipping off. ``average`` False leaves gradients summed over the data-parallel ranks.
    Frozen parameters are left out; a parameter without a gradient in a step counts as one with a zero gradient.
    Construction is local; the engine has checked before that all ranks describe the same parameters.

    Raises ValueError for an optimizer that is used or not element-wise, an expert group without a process group, or a
    parameter dtype other than float32 and bfloat16.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        param_names: Mapping[nn.Parameter, str],
        *,
        groups: ZeroGroups,
        max_norm: float = 0.0,
        average: bool = True,
    ) -> None:
        super().__init__()
        kind = type(optimizer).__name__
        if kind in _NOT_ELEMENTWISE:
            raise ValueError(f"{kind} needs whole tensors; shards serve element-wise optimizers such as AdamW or SGD")
        if optimizer.state:
            raise ValueError("the optimizer has taken steps already; wrap a fresh one, then load its state")
        self.optimizer = optimizer
        self.groups = groups
        self.max_norm = max_norm
        self.grad_divisor = dist.get_world_size(groups.dense) if average else 1
        self.overflow = False
        self._global_grad_norm = 0.0
        self._step_count = 0
        self._reduced = False
        self._init_engine_attributes()
        self.bit16_groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
        self.families = _build_families(self.bit16_groups, param_names, groups)
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [family.master for family in self.families if family.key.param_group == index]
        _materialise_states(optimizer)
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._accumulator(main_grad))
            for family in self.families
            for param, main_grad in family.grad_views()
        ]

    def _init_engine_attributes(self) -> None:
        """What DeepSpeed's engine reads from every ZeRO optimizer; no loss scaling, because fp16 is refused."""
        self.custom_loss_scaler = False
        self.external_loss_scale = None
        self.torch_autocast_gradscaler = None
        self.loss_scaler = None
        self.dynamic_loss_scale = False
        self.cur_scale = 1.0
        self.dp_process_group = self.groups.dense

    # ---- gradients

    def _accumulator(self, main_grad: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def accumulate(param: torch.Tensor) -> None:
            grad = param.grad
            if grad is None:
                return
            if grad.layout != torch.strided:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} got a {grad.layout} gradient; sparse gradients cannot "
                    "be sharded, build the module with sparse=False"
                )
            main_grad.add_(grad)
            param.grad = None
            self._reduced = False

        return accumulate

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Sums every family's main_grad over its group into grad_shard. Called by the engine at the boundary.

        main_grad stays as it is, so reducing again after another backward is exact. Collective.
        """
        for work in [family.start_reduce() for family in self.families]:
            if work is not None:
                work.wait()
        self._reduced = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all accumulated gradients."""
        for family in self.families:
            family.main_grad.zero_()
            for param in family.params.values():
                param.grad = None
        self._reduced = False

    # ---- step

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Norm, clip, update of the masters, new parameters on every rank; skipped on all ranks if the norm is not
        finite (then ``overflow`` is True and masters, states and step_count stay untouched). Collective."""
        if closure is not None:
            raise ValueError("EPZeroOptimizer.step takes no closure; run forward and backward through the engine")
        if not self._reduced:
            self.reduce_gradients()
        summed_norm = global_norm((family.grad_shard for family in self.families), self.groups.dense)
        self._global_grad_norm = summed_norm.item() / self.grad_divisor
        self.overflow = not math.isfinite(self._global_grad_norm)
        if self.overflow:
            logger.warning("gradient norm is %s: step skipped on all ranks", self._global_grad_norm)
            return
        scale = clip_coefficient(self._global_grad_norm, self.max_norm) / self.grad_divisor
        for family in self.families:
            family.grad_shard.mul_(scale)
        self._reduced = False  # the shards are scaled now: they must not serve a second step
        self.optimizer.step()
        self._step_count += 1
        self.sync_params_from_master()

    def sync_params_from_master(self) -> None:
        """Writes the masters into the parameters of every rank; needed after masters were changed. Collective."""
        for work in [family.start_publish() for family in self.families]:
            if work is not None:
                work.wait()

    # ---- state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups; a changed lr takes effect at the next step."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The wrapped optimizer's state, keyed by master shard."""
        return self.optimizer.state

    @property
    def step_count(self) -> int:
        """Applied (not skipped) steps. Setting it sets Adam's bias correction as well."""
        return self._step_count

    @step_count.setter
    def step_count(self, value: int) -> None:
        self._step_count = value
        for state in self.optimizer.state.values():
            step = state.get("step")
            if isinstance(step, torch.Tensor):
                step.fill_(value)
            elif step is not None:
                state["step"] = value

    def state_shards(self) -> list[StateShard]:
        """What this rank owns, parameter by parameter; over a family's group every element has exactly one owner."""
        shards = []
        for family in self.families:
            flat = {"master": family.master, **self._elementwise_states(family)}
            for piece in family.pieces:
                end = piece.offset + piece.stop - piece.start
                views = {kind: tensor[piece.offset : end] for kind, tensor in flat.items()}
                shards.append(StateShard(piece.name, family.params[piece.name], piece.start, piece.stop, views))
        return shards

    def _elementwise_states(self, family: Family) -> dict[str, torch.Tensor]:
        state = self.optimizer.state.get(family.master, {})
        return {
            kind: tensor
            for kind, tensor in state.items()
            if isinstance(tensor, torch.Tensor) and tensor.shape == family.master.shape
        }

    def destroy(self) -> None:
        """Removes the gradient hooks; the model keeps its parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # ---- DeepSpeed's own checkpoint files (same layout only)

    @property
    def round_robin_bit16_groups(self) -> list[list[nn.Parameter]]:
        """The engine records parameter shapes from here."""
        return self.bit16_groups

    def _layout(self) -> list[tuple[str, int, int, list[tuple[str, int]]]]:
        return [
            (
                str(family.key),
                family.layout.group_size,
                family.layout.shard_numel,
                [(placement.name, placement.numel) for placement in family.layout.placements],
            )
            for family in self.families
        ]

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards and their layout, for DeepSpeed's checkpoint files."""
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {
            "format": _CHECKPOINT_FORMAT,
            "layout": self._layout(),
            "step_count": self._step_count,
            "param_groups": options,
            "shards": [{"master": f.master, **self._elementwise_states(f)} for f in self.families],
        }

    @torch.no_grad()
    def load_state_dict(
        self, state_dict_list: Sequence[Any], load_optimizer_states: bool = True, **engine_options: Any
    ) -> None:
        """Restores what ``state_dict`` of the same rank and layout returned, and publishes the parameters. Collective.

        ``state_dict_list`` has one entry per dense rank; only this rank's is read. Raises ValueError if it was written
        at another layout or by DeepSpeed's own optimizer.
        """
        saved = state_dict_list[dist.get_rank(self.groups.dense)]
        if not isinstance(saved, Mapping) or saved.get("format") != _CHECKPOINT_FORMAT:
            raise ValueError("the checkpoint was not written by EPZeroOptimizer; it cannot be loaded here")
        if saved["layout"] != self._layout():
            raise ValueError(
                "the checkpoint was written at another parameter or rank layout; DeepSpeed's files load only at the "
                "layout that wrote them"
            )
        for family, shard in zip(self.families, saved["shards"], strict=True):
            family.master.copy_(shard["master"])
            if load_optimizer_states:
                state = self.optimizer.state[family.master]
                for kind in shard.keys() - {"master"}:
                    state[kind] = shard[kind].to(family.master.device, copy=True)
        if load_optimizer_states:
            for group, options in zip(self.param_groups, saved["param_groups"], strict=True):
                group.update(options)
            self.step_count = saved["step_count"]
        self.sync_params_from_master()

    def _restore_from_bit16_weights(self) -> None:
        self.refresh_fp32_params()

    def refresh_fp32_params(self) -> None:
        """Sets the masters from the parameters, after the module's weights were loaded without optimizer state.

        Raises ValueError if ranks hold different experts: DeepSpeed's module file holds those of one rank only.
        """
        for family in self.families:
            name = family.key.expert_group
            if name is not None and family.layout.group_size < dist.get_world_size(self.groups.dense):
                raise ValueError(
                    f"DeepSpeed's module file holds only one rank's experts of group {name!r}; load the optimizer "
                    "states too (load_optimizer_states=True), or use an expert-parallel checkpoint format"
                )
        for family in self.families:
            family.read_master_from_params()

    def update_lp_params(self) -> None:
        """DeepSpeed's name for ``sync_params_from_master``."""
        self.sync_params_from_master()


def _build_families(
    param_groups: Sequence[Sequence[nn.Parameter]], param_names: Mapping[nn.Parameter, str], groups: ZeroGroups
) -> list[Family]:
    """One family per parameter group x expert group x dtype, in the order of their first parameters."""
    specs: list[ParamSpec] = []
    members: dict[FamilyKey, list[nn.Parameter]] = {}
    for index, params in enumerate(param_groups):
        for param in params:
            key = FamilyKey(index, expert_group_name(param), param.dtype)
            if param.dtype not in SUPPORTED_DTYPES:
                raise ValueError(f"parameter {param_names[param]!r} is {param.dtype}; use float32 or bfloat16")
            if key.expert_group is not None and key.expert_group not in groups.expert:
                raise ValueError(
                    f"parameter {param_names[param]!r} is marked as expert of group {key.expert_group!r}, which has no "
                    f"process group; known groups: {sorted(groups.expert)}"
                )
            members.setdefault(key, []).append(param)
            specs.append(ParamSpec(param_names[param], param.numel(), key))
    layouts = plan_families(specs, {key: len(ranks_of(groups.of(key.expert_group))) for key in members})
    return [Family(key, params, layouts[key], groups.of(key.expert_group)) for key, params in members.items()]


def _materialise_states(optimizer: torch.optim.Optimizer) -> None:
    """Creates zero moments before the first step, where zeros mean the same as torch's lazily created state."""
    for group in optimizer.param_groups:
        for master in group["params"]:
            state = optimizer.state[master]
            if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
                on_device = group["capturable"] or group["fused"]
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device if on_device else "cpu")
                state["exp_avg"] = torch.zeros_like(master)
                state["exp_avg_sq"] = torch.zeros_like(master)
                if group["amsgrad"]:
                    state["max_exp_avg_sq"] = torch.zeros_like(master)
            elif isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
                state["momentum_buffer"] = torch.zeros_like(master)
