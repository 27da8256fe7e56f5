"""Pipeline parallelism: torch's schedules run this rank's stages (pipeline_stages.py).

A rank holds one or more chunks of consecutive layers; torch.distributed.pipelining sends activations and gradients
between them (asynchronous batched point-to-point) in the order of the chosen schedule.

Auxiliary losses stay on the stage that owns the layer: the chunk attaches them to its output, so that the backward of
the output also differentiates them, with the weight they have without a pipeline. Only activations travel.

Shapes: B sequences of a micro-batch, S positions (this rank's part of them), D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.torch_version import TorchVersion

from megatron.optimus.config.schema import ConfigError, PipelineSchedule
from megatron.optimus.layers.documents import Documents
from megatron.optimus.layers.rope import rope_at, rope_table
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.parallel.pipeline_stages import SPLIT_BACKWARDS, P2PGroups, StageLayers, StagePlan

_SCHEDULES = {
    PipelineSchedule.INTERLEAVED_1F1B: ScheduleInterleaved1F1B,
    PipelineSchedule.INTERLEAVED_ZERO_BUBBLE: ScheduleInterleavedZeroBubble,
    PipelineSchedule.ZBV: ScheduleZBVZeroBubble,
}


class _AttachLoss(torch.autograd.Function):
    """Returns x and differentiates ``loss`` with gradient 1 in its backward: the loss need not reach the last stage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()  # not a view: the zero-bubble schedules detach a stage's output in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_ones((), dtype=torch.float32)


class StageInput(Protocol):
    """A micro-batch (``Batch`` of data/loader.py); every stage gets all of it and reads what it needs."""

    @property
    def tokens_BS(self) -> Tensor:
        """Token ids, int64 [B, S]."""

    @property
    def labels_BS(self) -> Tensor:
        """The token to predict after each token, int64 [B, S], or NO_LABEL."""

    @property
    def documents(self) -> Documents | None:
        """Boundaries of documents; None: attention over whole rows."""

    @property
    def positions_BS(self) -> Tensor | None:
        """Positions, int64 [B, S]; None: 0 to S - 1 in every row."""


class ModelChunk(nn.Module):
    """The module of one stage: consecutive layers, with the embedding in the first and the final norm in the last."""

    def __init__(self, model: Decoder, stage: int, plan: StagePlan, positions: int) -> None:
        super().__init__()
        self.config = model.config
        self.positions = positions
        is_last = stage == plan.num_stages - 1
        self.embedding = model.embedding if stage == 0 else None
        self.layers = StageLayers({number: model.layers[number] for number in plan.layers[stage]})
        self.final_norm = model.final_norm if is_last else None
        # The loss applies it. It is a submodule here so that torch computes its gradient.
        self.lm_head = model.lm_head if is_last else None
        self.aux_weight = AuxWeight(0.0, 0.0)  # of the step; the pipeline sets it
        self.batch: StageInput | None = None  # the micro-batch of the next forward, for what its input does not hold

    def forward(self, x: Tensor) -> Tensor:
        """Applies the stage.

        Args:
            x: token numbers [B, S] in the first stage, hidden states in the others.

        Returns:
            Hidden states, in the last stage after the final norm.
        """
        assert self.batch is not None
        rope, documents = rope_table(self.positions, self.config, x.device), self.batch.documents
        if self.batch.positions_BS is not None:
            rope = rope_at(rope, self.batch.positions_BS)
        if self.embedding is not None:
            x = self.embedding(x)
        losses = []
        for layer in self.layers.children():
            x, router = layer(x, rope, documents)
            if router is not None:
                losses.append(self.aux_weight.aux * router.aux_loss + self.aux_weight.z * router.z_loss)
        if losses and torch.is_grad_enabled():
            x = _AttachLoss.apply(x, torch.stack(losses).sum())
        return x if self.final_norm is None else self.final_norm(x)


@dataclass(frozen=True)
class AuxWeight:
    """Weights of a layer's losses in the step's: coefficient / (MoE layers of the whole model x micro-batches)."""

    aux: float
    z: float


def check_torch_version(schedule: PipelineSchedule, num_micro_batches: int, num_stages: int) -> None:
    """Refuses a schedule that this version of torch cannot run.

    Raises:
        ConfigError: with the version that is needed.
    """
    if num_stages > 1 and TorchVersion(torch.__version__) < "2.10":
        raise ConfigError(
            f"pipeline_model_parallel_size={num_stages} needs torch 2.10, this is {torch.__version__}: its "
            "schedules send and receive in one process group only; use 1"
        )
    is_short = schedule is PipelineSchedule.ONE_F_ONE_B and num_micro_batches < num_stages
    if is_short and TorchVersion(torch.__version__) < "2.11":
        raise ConfigError(
            f"{num_micro_batches} micro-batches for {num_stages} pipeline stages: fewer than stages need torch 2.11, "
            f"this is {torch.__version__}; lower micro_batch_size, raise global_batch_size or use fewer stages"
        )
    if schedule in SPLIT_BACKWARDS and TorchVersion(torch.__version__) < "2.13":
        raise ConfigError(
            f"pipeline_schedule={schedule.value} needs torch 2.13, this is {torch.__version__}: earlier ones cannot "
            "split the backward of custom operations (seen with 2.11); use 1f1b or interleaved-1f1b"
        )


class BackwardHooks(Protocol):
    """Called at the start of a step, and around each backward of a micro-batch through a chunk.

    The backward leaves gradients in ``grad``. ``is_whole`` is False where it computes only the gradient of the chunk's
    input, and a later one those of its weights.
    """

    def begin(self, num_micro_batches: int) -> None:
        """Called once, before the first backward of a step."""

    def before(self, micro_batch: int, chunk: ModelChunk, *, is_whole: bool) -> None:
        """Called before a backward."""

    def after(self, micro_batch: int, chunk: ModelChunk, *, is_whole: bool) -> None:
        """Called after a backward."""


class _Stage(PipelineStage):
    """torch's stage, given the current micro-batch and the communicators of ``P2PGroups``."""

    def __init__(self, pipeline: Pipeline, chunk: ModelChunk, *args: Any, **kwargs: Any) -> None:
        super().__init__(chunk, *args, **kwargs)
        self._pipeline, self._chunk = pipeline, chunk

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        # Not as an argument of the schedule, which splits tensors along their first dim: documents are no tensor.
        self._chunk.batch = self._pipeline.batches[fwd_chunk_id]
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._over_group(super().get_fwd_recv_ops(fwd_chunk_id), self.stage_index - 1, is_gradient=False)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._over_group(super().get_fwd_send_ops(fwd_chunk_id), self.stage_index, is_gradient=False)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._over_group(super().get_bwd_recv_ops(bwd_chunk_id), self.stage_index, is_gradient=True)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._over_group(super().get_bwd_send_ops(bwd_chunk_id), self.stage_index - 1, is_gradient=True)

    def _over_group(self, ops: list[dist.P2POp], boundary: int, *, is_gradient: bool) -> list[dist.P2POp]:
        groups = self._pipeline.p2p_groups
        if groups is None:
            return ops
        group = groups.group(boundary, is_gradient=is_gradient)
        return [dist.P2POp(op.op, op.tensor, op.peer, group) for op in ops]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        return self._with_hooks(
            super().backward_one_chunk, kwargs.get("full_backward", True), bwd_chunk_id, *args, **kwargs
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        return self._with_hooks(super().backward_weight_one_chunk, True, bwd_chunk_id, *args, **kwargs)

    def _with_hooks(
        self, backward: Callable[..., Any], is_whole: bool, micro_batch: int, *args: Any, **kwargs: Any
    ) -> Any:
        hooks = self._pipeline.backward_hooks
        hooks.before(micro_batch, self._chunk, is_whole=is_whole)
        result = backward(micro_batch, *args, **kwargs)
        hooks.after(micro_batch, self._chunk, is_whole=is_whole)
        return result


class _AccumulateInGrad:
    """Gradients are accumulated in ``grad``."""

    def begin(self, num_micro_batches: int) -> None:
        pass

    def before(self, micro_batch: int, chunk: ModelChunk, *, is_whole: bool) -> None:
        pass

    after = before


class Pipeline:
    """Runs a step's micro-batches over the stages. Every method is collective over the pipeline's group."""

    def __init__(
        self,
        model: Decoder,
        plan: StagePlan,
        schedule: PipelineSchedule,
        group: dist.ProcessGroup,
        *,
        num_micro_batches: int,
        tokens_shape: tuple[int, int],
        hidden_shape: tuple[int, int, int],
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
        backward_hooks: BackwardHooks | None = None,
        p2p_groups: P2PGroups | None = None,
    ) -> None:
        """Makes the stages of this rank.

        Args:
            model: this rank's layers, after ``parallelize``.
            plan: the stages.
            schedule: which of torch's schedules.
            group: the ranks of the pipeline.
            num_micro_batches: of the first step; the schedule is made again when a step has another number.
            tokens_shape: [B, S] of a micro-batch on this rank.
            hidden_shape: of what travels between stages.
            positions: tokens of a whole sequence.
            dtype: of hidden states.
            device: of this rank.
            backward_hooks: called around every backward of a micro-batch through a chunk, so that gradients need not
                be accumulated in the weights' dtype.
            p2p_groups: communicators between stages; None: all messages use ``group``.
        """
        self.p2p_groups = p2p_groups
        self.model, self.plan, self.group, self.device = model, plan, group, device
        self.backward_hooks = backward_hooks or _AccumulateInGrad()
        self.batches: Sequence[StageInput] = ()
        self._loss_sums: list[Tensor] = []
        self._chunks = {stage: ModelChunk(model, stage, plan, positions) for stage in plan.local_stages}
        self._kind, self._v_shape = schedule, schedule is PipelineSchedule.ZBV
        self.labels_per_micro_batch: Tensor | float = 1
        self._tokens = torch.empty(tokens_shape, dtype=torch.int64, device="meta")
        # requires_grad: torch decides by this tensor alone whether a stage receives a gradient.
        self._hidden = torch.empty(hidden_shape, dtype=dtype, device="meta", requires_grad=True)
        self._plan_steps(num_micro_batches)

    def _plan_steps(self, num_micro_batches: int) -> None:
        """Makes the schedule of steps with so many micro-batches; no communication.

        Raises:
            ConfigError: where torch has none.
        """
        check_torch_version(self._kind, num_micro_batches, self.plan.num_stages)
        self.num_micro_batches = num_micro_batches
        stages: list[Any] = []
        for stage, chunk in self._chunks.items():
            shapes = {
                "input_args": (self._tokens if stage == 0 else self._hidden,),
                "output_args": (self._hidden,),
            }
            stages.append(_Stage(self, chunk, stage, self.plan.num_stages, self.device, group=self.group, **shapes))
        options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        self._schedule: Any
        if self._kind is PipelineSchedule.ONE_F_ONE_B:
            # With fewer micro-batches than stages 1F1B is GPipe: every forward comes before the first backward.
            one = Schedule1F1B if num_micro_batches >= self.plan.num_stages else ScheduleGPipe
            self._schedule = one(stages[0], num_micro_batches, **options)
        else:
            self._schedule = _SCHEDULES[self._kind](stages, num_micro_batches, **options)

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage and computes the loss."""
        return self.plan.num_stages - 1 in self._chunks

    def _loss(self, hidden_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        """The micro-batch's part of the step's mean cross-entropy."""
        loss_sum = self.model.lm_head(hidden_BSD, labels_BS)
        self._loss_sums.append(loss_sum.detach())
        return loss_sum / self.labels_per_micro_batch / self.num_micro_batches

    def forward_backward(
        self,
        batches: Sequence[StageInput],
        mean_labels_per_micro_batch: Tensor | float,
        *,
        with_router_losses: bool = True,
    ) -> list[Tensor]:
        """Runs forward and backward of all micro-batches and accumulates the gradients of their mean loss.

        The last stage computes the cross-entropy.

        Args:
            batches: the micro-batches of this rank, whose tokens and labels are [B, S].
            mean_labels_per_micro_batch: labels that count, on average; it divides each sum of losses.
            with_router_losses: whether the auxiliary losses of routers are part of it.

        Returns:
            The sum of cross-entropies of each micro-batch, fp32 scalars, on the rank of the last stage; elsewhere an
            empty list.

        Raises:
            ConfigError: where this version of torch cannot run the schedule with so many micro-batches.
        """
        if len(batches) != self.num_micro_batches:
            self._plan_steps(len(batches))
        config = self.model.config
        parts = max(1, len(config.moe_layers)) * len(batches)
        weight = AuxWeight(config.moe_aux_loss_coeff / parts, config.moe_z_loss_coeff / parts)
        for chunk in self._chunks.values():
            chunk.aux_weight = weight if with_router_losses else AuxWeight(0.0, 0.0)
        self.backward_hooks.begin(len(batches))
        self._loss_sums = []
        self.batches, self.labels_per_micro_batch = batches, mean_labels_per_micro_batch
        tokens = (torch.cat([batch.tokens_BS for batch in batches]),) if 0 in self._chunks else ()
        target = torch.cat([batch.labels_BS for batch in batches]) if self.is_last else None
        losses: list[Tensor] | None = [] if self.is_last else None
        self._schedule.step(*tokens, target=target, losses=losses, return_outputs=False)
        return self._loss_sums

    @torch.no_grad()
    def evaluate(self, batches: Sequence[StageInput]) -> list[Tensor]:
        """Runs the forward alone for any number of micro-batches: all of them through one stage, then the next.

        Not one of torch's schedules: the zero-bubble ones cannot run without their backward (seen with 2.13). Messages
        use ``p2p_groups``: over one communicator a rank that sends all of them before it receives one waits for a rank
        that sends each before it receives the next.

        Returns:
            The sum of losses of each micro-batch, on the rank of the last stage; elsewhere an empty list.
        """
        self._loss_sums = []
        sent: list[Any] = []
        kept: list[Tensor] = []  # until their sends are done
        local_inputs: dict[int, list[Tensor]] = {0: [batch.tokens_BS for batch in batches]}  # by stage
        for stage, chunk in sorted(self._chunks.items()):
            inputs = local_inputs.pop(stage, None)
            for number, batch in enumerate(batches):
                chunk.batch = batch
                output = chunk(self._receive(stage) if inputs is None else inputs[number])
                if stage == self.plan.num_stages - 1:
                    self._loss(output, batch.labels_BS)
                elif stage + 1 in self._chunks:
                    local_inputs.setdefault(stage + 1, []).append(output)
                else:
                    # Not a blocking send: with several chunks the receiver may itself be sending to us.
                    sent.append(dist.isend(output, group=self._group_of(stage), group_dst=self._rank_of(stage + 1)))
                    kept.append(output)
        for work in sent:
            work.wait()
        return self._loss_sums

    def _receive(self, stage: int) -> Tensor:
        hidden_BSD = torch.empty(self._hidden.shape, dtype=self._hidden.dtype, device=self.device)
        dist.recv(hidden_BSD, group=self._group_of(stage - 1), group_src=self._rank_of(stage - 1))
        return hidden_BSD

    def _group_of(self, boundary: int) -> dist.ProcessGroup:
        """The group over which activations cross a boundary."""
        return self.group if self.p2p_groups is None else self.p2p_groups.group(boundary, is_gradient=False)

    def _rank_of(self, stage: int) -> int:
        pp = dist.get_world_size(self.group)
        return 2 * pp - 1 - stage if self._v_shape and stage >= pp else stage % pp
