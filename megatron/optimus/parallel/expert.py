"""Expert parallelism: each rank keeps some experts of a layer, or a shard of each.

Which rank owns which expert is in moe/dispatch/ownership.py, how tokens reach them in moe/dispatch/. Every rank of an
expert-parallel group has tokens of its own, so experts cost no additional replication of the batch.

An expert may also be split along its inner width over the ranks of an expert-tensor-parallel group, its shards. Each
shard computes all the expert's tokens and a part of their outputs, and the sum over a token's experts adds the parts as
well. The group over which tokens are dispatched is therefore all ranks that hold each expert once, shards included.

Gradients: a rank's loss reaches the experts of every rank of its group, so an expert's gradient is already the sum over
the group's losses. It is summed over the expert's replicas later and divided by the whole data-parallel size, as every
other gradient is.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron.optimus.config.placement import LayerPlacement, regular_placement
from megatron.optimus.config.schema import LoadBalancing, ParallelConfig
from megatron.optimus.models.partition import split_parameter
from megatron.optimus.moe.dispatch.ownership import Ownership
from megatron.optimus.moe.dispatch.select import build_dispatcher
from megatron.optimus.moe.layer import MoE
from megatron.optimus.platform.mesh import Mesh


def apply_expert_parallelism(
    layer: MoE, config: ParallelConfig, mesh: Mesh, placement: LayerPlacement | None = None
) -> None:
    """Keeps this rank's experts of a layer, or its shard of them, and puts the token dispatcher in. Collective.

    Expert weights get DeepSpeed's attributes (``allreduce``, ``group_name``) and ``expert_ids``, the number in the
    model of each row of dim 0, from which checkpoints and the initialisation derive what a row is. Shards also get the
    attributes of models/partition.py.

    Args:
        layer: the whole layer; changed in place.
        config: its ``moe_token_dispatcher_type`` names a dispatcher, as ``select_dispatcher`` leaves it.
        mesh: this rank's groups.
        placement: which rank has which expert; None: as ``config`` says.
    """
    num_shards, shard = mesh.size("etp"), mesh.index("etp")
    num_experts = layer.experts.gate_up_weight.shape[0]
    placement = placement or regular_placement(num_experts, mesh.size("ep"), config.moe_expert_placement)
    ownership = Ownership(placement, num_shards)
    expert_ids = ownership.expert_ids(mesh.index("ep"))
    for name, weight in list(layer.experts.named_parameters()):
        rows = torch.tensor(expert_ids, device=weight.device)
        local = nn.Parameter(weight.detach().index_select(0, rows))
        if num_shards > 1:  # along the inner width, where the first weight has gate and up
            dim, stride = (1, 2) if name == "gate_up_weight" else (2, 1)
            local = split_parameter(local, dim, shard, num_shards, stride=stride, whole=weight.shape, rows=expert_ids)
        if mesh.size("tp") > 1:  # tensor-parallel ranks have different experts, or replicas whose states are split
            local.tensor_model_parallel = True  # type: ignore[attr-defined]
        local.expert_ids = expert_ids  # type: ignore[attr-defined]
        local.allreduce = False  # type: ignore[attr-defined]
        local.group_name = f"ep_size_{ownership.num_ranks}"  # type: ignore[attr-defined]
        setattr(layer.experts, name, local)
    layer.dispatcher = build_dispatcher(config, mesh, ownership)
    layer.is_first_shard = shard == 0
    is_global = layer.router.balancing is LoadBalancing.GLOBAL_AUX_LOSS
    layer.router.balance_group = mesh.group("stage" if is_global else "sequence")
