"""DeepSpeed's engine with our optimizer: two overrides choose it, the others keep it from waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_ext import universal
from deepspeed_ext.groups import ZeroGroups, expert_group_name, ranks_of, world_group
from deepspeed_ext.zero.optimizer import EPZeroOptimizer
from deepspeed_ext.zero.options import ZeroOptions
from deepspeed_ext.zero.sync_errors import require_same_on_all_ranks, run_on_all_ranks


class EPEngineMixin:
    """Put before a DeepSpeed engine class; needs ``zero_groups``, ``zero_options`` and ZeRO stage 1 or 2.

    DeepSpeed learns nothing of the experts (has_moe_layers stays False for MoE classes that are not its own): its norm,
    reduction and checkpoint code for them is bypassed, ours works from the parameters' marks.

    After a step DeepSpeed's engine asks whether it was skipped, which would make the host wait for the device. Here it
    is answered for the step before, so ``lr_scheduler`` makes up for a skipped step one step late: after every applied
    step it has been stepped as often as steps were applied, or once more right after a skipped one. What a user asks
    (``get_global_grad_norm``, ``skipped_steps``, ``was_step_applied``) is exact and waits.
    """

    zero_groups: ZeroGroups
    zero_options: ZeroOptions
    optimizer: EPZeroOptimizer

    def __init__(self, *args: Any, zero_groups: ZeroGroups, zero_options: ZeroOptions, **kwargs: Any) -> None:
        # DeepSpeed's constructor builds the optimizer, and nn.Module's forbids ordinary assignment before it has run.
        self.__dict__["zero_groups"] = zero_groups
        self.__dict__["zero_options"] = zero_options
        super().__init__(*args, **kwargs)
        named = self.module.named_parameters()  # type: ignore[attr-defined]
        self.__dict__["_frozen"] = [(name, param) for name, param in named if not param.requires_grad]

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
        # Stock code would send bf16 with fp32 accumulation to BF16_Optimizer and refuse optimizers it has not tested.
        return "zero_optimization"

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer) -> EPZeroOptimizer:
        return EPZeroOptimizer(
            optimizer,
            self.param_names,  # type: ignore[attr-defined]
            groups=self.zero_groups,
            options=replace(self.zero_options, average=self.gradient_average),  # type: ignore[attr-defined]
            module=self.module,  # type: ignore[attr-defined]
        )

    # ---- what happens in a step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """DeepSpeed's: the module's forward."""
        self.optimizer.wait_before_forward()
        return super().forward(*inputs, **kwargs)  # type: ignore[misc]

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        """DeepSpeed's. Raises ValueError for a loss that is no scalar tensor, or has no gradient to give."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"{tuple(loss.shape)}, requires_grad={loss.requires_grad}" if torch.is_tensor(loss) else repr(loss)
            raise ValueError(f"engine.backward needs a scalar loss that forward computed with gradients, got {what}")
        self.optimizer.end_interrupted_backward()
        # DeepSpeed tells the optimizer through a hook on the engine's outputs, which a loss need not come through.
        self.optimizer.set_gradient_accumulation_boundary(self.is_gradient_accumulation_boundary())  # type: ignore[attr-defined]
        if not scale_wrt_gas:  # a tensor of its own: forward's hook on its outputs would divide by the steps after all
            loss = loss.clone()
        try:
            return super().backward(loss, retain_graph, scale_wrt_gas)  # type: ignore[misc]
        except Exception as error:
            self.optimizer.interrupt(error)
            raise

    def zero_grad(self) -> None:
        """DeepSpeed's: drops all gradients since the last step, accumulated ones too."""
        super().zero_grad()  # type: ignore[misc]
        self.optimizer.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """DeepSpeed's: backwards inside accumulate and reduce nothing."""
        with super().no_sync(), self.optimizer.hold_reductions():  # type: ignore[misc]
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """DeepSpeed's: backwards inside accumulate, one reduction follows; a step comes after it. Memory of stage 2:
        full-size gradients inside. Raises RuntimeError inside another, in ``no_sync`` or without managed accumulation.
        """
        if self.inside_no_sync_ctxt or not self.managed_gradient_accumulation():  # type: ignore[attr-defined, has-type]
            raise RuntimeError(
                "coalesce_grad_reduction() stands alone: not inside no_sync() or another, and not with "
                "managed_gradient_accumulation=false, where step() alone reduces"
            )
        self.inside_no_sync_ctxt = True
        try:
            with self.optimizer.hold_reductions():
                yield
        except Exception as error:
            self.optimizer.set_gradient_accumulation_boundary(True)  # other ranks may be about to reduce
            self.optimizer.interrupt(error)
            raise
        finally:
            self.inside_no_sync_ctxt = False
        self.optimizer.set_gradient_accumulation_boundary(True)
        self.optimizer.reduce_gradients()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's: updates the weights at the accumulation boundary. Raises RuntimeError if no backward has run."""
        self.__dict__["_has_stepped"] = False
        super().step(*args, **kwargs)  # type: ignore[misc]

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """DeepSpeed's: another number of micro-batches from the next step on; that step is a whole one. Raises
        RuntimeError inside a step, ValueError for a size that is no multiple of all ranks' micro-batches."""
        if self.optimizer.has_begun:
            raise RuntimeError(
                f"set_train_batch_size({train_batch_size}) inside a step: gradients of some of its micro-batches are "
                "there; call it after the step, or after zero_grad()"
            )
        super().set_train_batch_size(train_batch_size)  # type: ignore[misc]
        self.micro_steps = 0  # DeepSpeed steps when this is a multiple of the micro-batches of a step

    def _take_model_step(self, *args: Any, **kwargs: Any) -> None:
        if not self.optimizer.has_begun:  # its gradients would be zeros, and weight decay and momentum change weights
            words = "engine.step() without a backward since the last step; call engine.backward(loss) first"
            self.optimizer.record_error(RuntimeError(words))
        self._refuse_unfrozen()
        with self.optimizer.reporting_previous_step():
            super()._take_model_step(*args, **kwargs)  # type: ignore[misc]
        self.__dict__["_has_stepped"] = True

    def _refuse_unfrozen(self) -> None:
        for name, param in self.__dict__["_frozen"]:
            if param.requires_grad:
                param.grad = None
                words = f"parameter {name!r} was frozen when the engine was built and is not trained by it; build the "
                self.optimizer.record_error(RuntimeError(words + "engine with it trainable, and freeze it after that"))

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` updated the weights. Waits for the device."""
        return bool(self.__dict__.get("_has_stepped")) and not self.optimizer.overflow

    def get_global_grad_norm(self) -> Any:
        """Of the last step, before clipping; None before the first. Waits for the device."""
        return self.optimizer._global_grad_norm

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because gradients were not finite, those before a resume included. Waits for the device."""
        optimizer = self.__dict__.get("optimizer")
        counted = optimizer.skipped_steps if isinstance(optimizer, EPZeroOptimizer) else 0
        return int(self.__dict__.get("_skipped_before", 0)) + counted

    @skipped_steps.setter
    def skipped_steps(self, value: int) -> None:
        optimizer = self.__dict__.get("optimizer")
        if not isinstance(optimizer, EPZeroOptimizer):
            self.__dict__["_skipped_before"] = value
        elif not optimizer.is_reporting_previous_step:  # inside, the engine counts what the optimizer counts itself
            self.__dict__["_skipped_before"] = value - optimizer.skipped_steps

    # ---- checkpoints

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, Any]:
        """DeepSpeed's; with ``checkpoint: {load_universal: true}`` a universal checkpoint, at any layout. Collective.

        Universal ones are read here and no file of theirs can run code (``deepspeed_ext.universal``); DeepSpeed's own
        files are pickles that DeepSpeed trusts. Gradients of a step that had begun are dropped. Returns (path, what the
        user saved), the path None if there is nothing to load. Raises ValueError, the same on every rank, for a
        universal checkpoint that is incomplete or of another model, and for optimizer files that a rank cannot read.
        """
        self.zero_grad()  # of the weights that are replaced
        self.micro_steps = 0
        if not self.load_universal_checkpoint():  # type: ignore[attr-defined]
            return super().load_checkpoint(  # type: ignore[misc]
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                load_module_only,
                custom_load_fn,
            )
        folder = run_on_all_ranks(lambda: universal.locate(load_dir, tag), world_group())
        require_same_on_all_ranks("the universal checkpoint to load", folder.name, world_group())
        universal.load_optimizer(self.optimizer, folder, load_optimizer_states and not load_module_only)
        client_state = universal.load_engine(
            self, folder, load_counters=not load_module_only, load_scheduler=load_lr_scheduler_states
        )
        return str(folder), client_state

    def _get_all_zero_checkpoints(self, load_dir: str, tag: str) -> Any:
        """DeepSpeed's; what one rank cannot read is an error on all, which would wait for it else."""
        read = super()._get_all_zero_checkpoints  # type: ignore[misc]
        found = run_on_all_ranks(lambda: read(load_dir, tag), world_group())
        require_same_on_all_ranks("whether the optimizer's file is there", found is not None, world_group())
        return found

    @torch.no_grad()
    def _broadcast_model(self) -> None:
        """Gives every rank of a group the weights of the group's first rank."""
        for param in self.module.parameters():  # type: ignore[attr-defined]
            group = self.zero_groups.of(expert_group_name(param))
            if len(ranks_of(group)) > 1:
                weight = param.data.contiguous()
                dist.broadcast(weight, group=group, group_src=0)
                param.data.copy_(weight)


class EPEngine(EPEngineMixin, DeepSpeedEngine):
    """DeepSpeedEngine with the EP-aware ZeRO optimizer; build it through ``deepspeed_ext.initialize``."""
