"""Expert parallelism: cuts the experts of a layer over ranks; which rank owns which is in placement.py, how tokens get
there in transport.py.

Every rank of an expert-parallel group has tokens of its own (experts cost no extra batch replication).

An expert may also be split along its inner width over the ranks of an expert-tensor-parallel group ("shards"): each of
them sees all the expert's tokens and gives a part of their outputs, and the sum that puts a token's experts together
puts the parts together as well. A group of dispatch is therefore all ranks that hold each expert once, shards included.

Gradients: a rank's loss reaches the experts of every rank of its group, so an expert's gradient already is the sum over
the group's losses. It is summed over the expert's replicas later and divided by the whole data-parallel size, as every
other gradient is.
"""

from __future__ import annotations

from torch import nn

from megatron.optimus.config.placement import LayerPlacement, regular_placement
from megatron.optimus.config.schema import LoadBalancing, ParallelConfig
from megatron.optimus.models.partition import split_parameter
from megatron.optimus.moe.dispatch.collective import ChunkedExpertPass, build_dispatcher
from megatron.optimus.moe.dispatch.ownership import Ownership
from megatron.optimus.moe.layer import MoE
from megatron.optimus.platform.mesh import Mesh


def apply_expert_parallelism(
    layer: MoE, config: ParallelConfig, mesh: Mesh, placement: LayerPlacement | None = None
) -> None:
    """Keeps this rank's experts of a layer, or its part of them, and connects it to the others.

    ``placement``: which rank has which expert; None: as ``config`` says.

    Expert weights get DeepSpeed's marks (``allreduce``, ``group_name``) and ``expert_ids``, the global number of each
    row of dim 0, from which checkpoints and the initialisation derive what a row is; split ones those of partition.py.
    """
    num_shards, shard = mesh.size("etp"), mesh.index("etp")
    num_experts = layer.experts.gate_up_weight.shape[0]
    placement = placement or regular_placement(num_experts, mesh.size("ep"), config.moe_expert_placement)
    ownership = Ownership(placement, num_shards)
    expert_ids = ownership.expert_ids(mesh.index("ep"))
    for name, weight in list(layer.experts.named_parameters()):
        local = nn.Parameter(weight.detach()[list(expert_ids)].clone())
        if num_shards > 1:  # along the inner width, which holds gate and up in the first weight
            dim, stride = (1, 2) if name == "gate_up_weight" else (2, 1)
            local = split_parameter(local, dim, shard, num_shards, stride=stride, whole=weight.shape, rows=expert_ids)
        if mesh.size("tp") > 1:  # tensor-parallel ranks have different experts, or replicas whose states are split
            local.tensor_model_parallel = True  # type: ignore[attr-defined]
        local.expert_ids = expert_ids  # type: ignore[attr-defined]
        local.allreduce = False  # type: ignore[attr-defined]
        local.group_name = f"ep_size_{ownership.num_ranks}"  # type: ignore[attr-defined]
        setattr(layer.experts, name, local)
    layer.dispatcher = build_dispatcher(config.moe_token_dispatcher_type, mesh, ownership)
    if config.moe_dispatch_chunks > 1 and mesh.group("experts") is not None:
        layer.expert_pass = ChunkedExpertPass(config.moe_dispatch_chunks)
    layer.is_first_shard = shard == 0
    is_global = layer.router.balancing is LoadBalancing.GLOBAL_AUX_LOSS
    layer.router.balance_group = mesh.group("stage" if is_global else "sequence")
