"""The ordered list of what is done to a serial model so that it runs on many ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megatron.optimus.config.placement import LayerPlacement
from megatron.optimus.config.schema import ParallelConfig
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.parallel.context import apply_context_parallelism
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
) -> None:
    """Cuts the model to this rank's share, in place. Call it on the meta device, before weights exist.

    ``seq_length``: of the sequences in training, by which a pipeline's layers are split. ``placements``: of the experts
    of each MoE layer, in place of the regular one of ``config``. ``register_gradient_sums`` follows when weights exist.
    """
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
        _report_experts(len(moe_layers[0].experts.gate_up_weight), model, mesh, config)


def _report_experts(num_experts: int, model: Decoder, mesh: Mesh, config: ParallelConfig) -> None:
    of_model = model.config
    logger.info(
        "expert parallelism: %d of %d experts per layer on each rank, %s, %s ownership%s",
        num_experts,
        of_model.num_experts,
        config.moe_token_dispatcher_type.value if mesh.size("experts") > 1 else "no exchange",
        config.moe_expert_placement_file or config.moe_expert_placement.value,
        f"; {len(of_model.moe_layers)} of {of_model.num_layers} layers have experts" * of_model.has_dense_layers,
    )
