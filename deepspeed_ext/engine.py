"""DeepSpeed's engine with the sharded optimizer of deepspeed_ext, without its waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_ext import universal, versions
from deepspeed_ext.groups import ZeroGroups, expert_group_name, ranks_of, world_group
from deepspeed_ext.zero.optimizer import EPZeroOptimizer
from deepspeed_ext.zero.options import ZeroOptions
from deepspeed_ext.zero.sync_errors import InvalidCall, require_same_on_all_ranks, run_on_all_ranks


class EPEngineMixin:
    """Mixin that gives a DeepSpeed engine class the EP-aware ZeRO optimizer, for ZeRO stages 1 and 2.

    DeepSpeed does not know of the experts (``has_moe_layers`` is False for MoE classes that are not its own): its
    norm, reduction and checkpoint code for them is not used; the sharded optimizer reads the parameters' attributes.

    After a step DeepSpeed's engine asks whether it was skipped, which would make the host wait for the device. Here the
    answer is that of the step before, so ``lr_scheduler`` corrects a skipped step one step late: after an applied step
    it has been stepped as often as steps were applied, or once more right after a skipped one.
    ``get_global_grad_norm``, ``skipped_steps`` and ``was_step_applied`` are exact and wait.
    """

    zero_groups: ZeroGroups
    zero_options: ZeroOptions
    optimizer: EPZeroOptimizer

    def __init__(self, *args: Any, zero_groups: ZeroGroups, zero_options: ZeroOptions, **kwargs: Any) -> None:
        # DeepSpeed's constructor builds the optimizer, and nn.Module forbids attributes before its own has run.
        self.__dict__["zero_groups"] = zero_groups
        self.__dict__["zero_options"] = zero_options
        super().__init__(*args, **kwargs)
        named = self.module.named_parameters()  # type: ignore[attr-defined]
        self.__dict__["_frozen"] = [(name, param) for name, param in named if not param.requires_grad]

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
        # DeepSpeed would choose BF16_Optimizer for bf16 with fp32 accumulation and refuse optimizers it has not tested.
        return "zero_optimization"

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer) -> EPZeroOptimizer:
        return EPZeroOptimizer(
            optimizer,
            self.param_names,  # type: ignore[attr-defined]
            groups=self.zero_groups,
            options=replace(self.zero_options, average=self.gradient_average),  # type: ignore[attr-defined]
            module=self.module,  # type: ignore[attr-defined]
        )

    # ---- training step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module's forward."""
        self.optimizer.wait_before_forward()
        return super().forward(*inputs, **kwargs)  # type: ignore[misc]

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        """Runs backward as DeepSpeed's engine does.

        Raises:
            InvalidCall: the loss is no scalar tensor, or requires no gradient.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"{tuple(loss.shape)}, requires_grad={loss.requires_grad}" if torch.is_tensor(loss) else repr(loss)
            raise InvalidCall(f"engine.backward needs a scalar tensor that forward computed with gradients, got {what}")
        self.optimizer.end_interrupted_backward()
        # DeepSpeed sets this in a hook on the engine's outputs; a loss that does not depend on them would bypass it.
        self.optimizer.set_gradient_accumulation_boundary(self.is_gradient_accumulation_boundary())  # type: ignore[attr-defined]
        if not scale_wrt_gas:  # the hook on the outputs of forward would divide by the accumulation steps all the same
            loss = loss.clone()
        try:
            return super().backward(loss, retain_graph, scale_wrt_gas)  # type: ignore[misc]
        except Exception as error:
            self.optimizer.interrupt(error)
            raise

    def zero_grad(self) -> None:
        """Drops all gradients since the last step, accumulated ones too."""
        super().zero_grad()  # type: ignore[misc]
        self.optimizer.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backwards accumulate gradients without reducing them."""
        with super().no_sync(), self.optimizer.hold_reductions():  # type: ignore[misc]
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Context in which backwards accumulate gradients; one reduction follows at its end, then comes a step.

        With stage 2, full-size gradients exist inside.

        Raises:
            InvalidCall: inside another such context or ``no_sync``, or without managed gradient accumulation.
            NotImplementedError: under pipeline parallelism, whose schedule reduces.
        """
        if self.pipeline_parallelism:  # type: ignore[attr-defined]
            raise NotImplementedError("coalesce_grad_reduction() is not for pipeline parallelism: its schedule reduces")
        if self.inside_no_sync_ctxt or not versions.manages_accumulation(self):  # type: ignore[has-type]
            raise InvalidCall(
                "coalesce_grad_reduction() cannot be nested, in no_sync() or another, and is not for "
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

    @contextmanager
    def discarding_gradients(self) -> Iterator[None]:
        """Context in which backwards leave this rank's gradients in ``optimizer.local_gradients()``.

        Its end drops them. Between steps, with stage 1.
        """
        self.inside_no_sync_ctxt = True
        try:
            with self.optimizer.hold_reductions():
                yield
        finally:
            self.inside_no_sync_ctxt = False
            self.zero_grad()
            self.micro_steps = 0

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Updates the weights at the accumulation boundary. Raises RuntimeError if no backward has run."""
        self.__dict__["_has_stepped"] = False
        super().step(*args, **kwargs)  # type: ignore[misc]

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Sets the global batch size, and so the number of micro-batches, of the steps that follow.

        Raises:
            RuntimeError: inside a step.
            ValueError: the size is no multiple of the micro-batches of all ranks.
        """
        if self.optimizer.has_begun:
            raise RuntimeError(
                f"set_train_batch_size({train_batch_size}) inside a step: gradients of some of its micro-batches are "
                "there; call it after the step, or after zero_grad()"
            )
        super().set_train_batch_size(train_batch_size)  # type: ignore[misc]
        self.micro_steps = 0  # DeepSpeed steps when this is a multiple of the micro-batches of a step

    def _take_model_step(self, *args: Any, **kwargs: Any) -> None:
        if not self.optimizer.has_begun:  # weight decay and momentum would change weights
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
        """Returns the gradient norm of the last step before clipping, None before the first. Waits for the device."""
        return self.optimizer._global_grad_norm

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped for gradients that were not finite, also before a resume. Waits for the device."""
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

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Saves as DeepSpeed does; a schedule-free optimizer's module file has the averaged weights. Collective."""
        with self.optimizer.master_parameters():
            return super().save_checkpoint(*args, **kwargs)  # type: ignore[misc]

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
        """Loads a checkpoint of DeepSpeed's, or with ``checkpoint: {load_universal: true}`` a universal checkpoint.

        A universal checkpoint loads at any layout, and no file of it can run code (``deepspeed_ext.universal``).
        DeepSpeed's own files are pickles, which it trusts; without optimizer states, experts spread over ranks are read
        from the optimizer's files all the same. Gradients of a step that had begun are dropped. Collective over all
        ranks; the arguments are those of DeepSpeed.

        Returns:
            The path, None if there is nothing to load, and what the user saved.

        Raises:
            ValueError: a universal checkpoint is incomplete or of another model, or a rank cannot read its optimizer
                file; the same on every rank.
        """
        self.zero_grad()  # of the weights that are replaced
        self.micro_steps = 0
        if not self.load_universal_checkpoint():  # type: ignore[attr-defined]
            try:
                return super().load_checkpoint(  # type: ignore[misc]
                    load_dir,
                    tag,
                    load_module_strict,
                    load_optimizer_states,
                    load_lr_scheduler_states,
                    load_module_only,
                    custom_load_fn,
                )
            finally:
                self.optimizer.read_files = None
        folder = run_on_all_ranks(lambda: universal.locate(load_dir, tag), world_group())
        require_same_on_all_ranks("the universal checkpoint to load", folder.name, world_group())
        universal.load_optimizer(self.optimizer, folder, load_optimizer_states and not load_module_only)
        client_state = universal.load_engine(
            self, folder, load_counters=not load_module_only, load_scheduler=load_lr_scheduler_states
        )
        return str(folder), client_state

    def _load_checkpoint(self, load_dir: str, tag: str, **options: Any) -> tuple[str | None, Any]:
        self.optimizer.read_files = cache(lambda: self._get_all_zero_checkpoints(load_dir, tag))
        return super()._load_checkpoint(load_dir, tag, **options)  # type: ignore[misc]

    def _get_all_zero_checkpoints(self, load_dir: str, tag: str) -> Any:
        """Reads as DeepSpeed does; a file that one rank cannot read raises on all, which would wait for it."""
        read = super()._get_all_zero_checkpoints  # type: ignore[misc]
        found = run_on_all_ranks(lambda: read(load_dir, tag), world_group())
        require_same_on_all_ranks("whether the optimizer's file is there", found is not None, world_group())
        return found

    @torch.no_grad()
    def _broadcast_model(self) -> None:
        """Broadcasts the weights of each group's first rank to the group."""
        for param in self.module.parameters():  # type: ignore[attr-defined]
            group = self.zero_groups.of(expert_group_name(param))
            if len(ranks_of(group)) > 1:
                weight = param.data.contiguous()
                dist.broadcast(weight, group=group, group_src=0)
                param.data.copy_(weight)


class EPEngine(EPEngineMixin, versions.BaseEngine):
    """DeepSpeedEngine with the EP-aware ZeRO optimizer; build it through ``deepspeed_ext.initialize``."""
