"""Turns a serial model into one rank's part of it, one kind of parallelism after the other.

To add a kind: a file here with a function ``apply_<kind>`` that changes the model in place, its call in ``parallelize``
at the right place of the order, and its collectives in traffic.py, which planner/communication.py adds up.

Order: model converters, tensor parallelism, context parallelism, expert parallelism, pipeline stages, recomputation,
offloading. It runs on the meta device, before weights exist. When they do, ``tensor.register_gradient_sums`` follows:
hooks do not survive the materialisation of weights.

A precision or another replacement of modules (fp8 linear layers, say) is a model converter: a function in a file of
parallel/converters that changes a ``Decoder`` in place and returns nothing. It sees the whole serial model on the meta
device. It must keep the parameters' names, by which checkpoints and initial weights find them, and ``nn.Linear`` (or a
class derived from it) where tensor parallelism splits projections (parallel/tensor.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megatron.optimus.config.placement import LayerPlacement
from megatron.optimus.config.schema import ParallelConfig
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.parallel.context import apply_context_parallelism
from megatron.optimus.parallel.converters import ModelConverter
from megatron.optimus.parallel.expert import apply_expert_parallelism
from megatron.optimus.parallel.pipeline_stages import keep_local_stages, local_stages, stage_plan
from megatron.optimus.parallel.recompute import apply_offloading, apply_recomputation
from megatron.optimus.parallel.tensor import apply_tensor_parallelism
from megatron.optimus.platform.mesh import Mesh

logger = logging.getLogger("optimus")


def parallelize(
    model: Decoder,
    mesh: Mesh,
    config: ParallelConfig,
    seq_length: int,
    placements: Sequence[LayerPlacement] | None = None,
    converters: Sequence[ModelConverter] = (),
) -> None:
    """Cuts the model to this rank's part, in place.

    Args:
        model: the whole serial model, on the meta device.
        mesh: this rank's groups.
        config: sizes and options of every kind of parallelism.
        seq_length: tokens of a sequence in training, by which a pipeline's layers are balanced.
        placements: experts of each rank for each MoE layer; None: the placement that ``config`` names.
        converters: applied first, in this order.
    """
    for convert in converters:
        convert(model)
    apply_tensor_parallelism(model, config, mesh)
    apply_context_parallelism(model, config, mesh)
    moe_layers = model.moe_layers()
    for number, layer in enumerate(moe_layers):
        apply_expert_parallelism(layer, config, mesh, None if placements is None else placements[number])
    plan = stage_plan(model.config, config, seq_length, mesh.index("pp")) if mesh.size("pp") > 1 else None
    if plan is not None:
        keep_local_stages(model, plan)
    stages = local_stages(model, plan)
    apply_recomputation(stages, config)  # inside the regions that communicate
    apply_offloading(stages, config)  # around all of a layer
    if moe_layers:
        _log_experts(len(moe_layers[0].experts.gate_up_weight), model, mesh, config)


def _log_experts(num_experts: int, model: Decoder, mesh: Mesh, config: ParallelConfig) -> None:
    of_model = model.config
    logger.info(
        "expert parallelism: %d of %d experts per layer on each rank, %s, %s ownership%s",
        num_experts,
        of_model.num_experts,
        config.moe_token_dispatcher_type.value if mesh.size("experts") > 1 else "no exchange",
        config.moe_expert_placement_file or config.moe_expert_placement.value,
        f"; {len(of_model.moe_layers)} of {of_model.num_layers} layers have experts" * of_model.has_dense_layers,
    )
