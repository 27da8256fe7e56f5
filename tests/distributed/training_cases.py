"""Layouts and models of test_training_layouts.py: what each case trains, over how many ranks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.optimus.config.schema import (
    ContextCommunication,
    LoadBalancing,
    OptimizerConfig,
    ParallelConfig,
    Parametrization,
    PipelineSchedule,
    Precision,
    Recompute,
    RunConfig,
    TokenDispatcherType,
    TrainingConfig,
)
from tests.distributed.layouts import BATCH, LENGTH, model_config

STEPS, SEQUENCES = 3, 8  # of the global batch
PLACED = "its name is put here by the test"


class Case(NamedTuple):
    parallel: dict[str, Any]
    model: str = "moe"
    optimizer: Mapping[str, Any] = MappingProxyType({})


MOE = dict(
    num_experts=8,
    moe_z_loss_coeff=0.1,
    moe_router_load_balancing_type=LoadBalancing.AUX_LOSS,  # of each micro-batch: the same ones at any layout
    moe_aux_loss_coeff=0.3,
)
SHARED = MOE | dict(moe_shared_expert_intermediate_size=20, moe_shared_expert_gate=True, add_qkv_bias=True)
COMPLETEP = dict(
    parametrization=Parametrization.COMPLETEP,
    base_hidden_size=8,
    base_num_layers=1,
    base_ffn_hidden_size=8,
    base_moe_ffn_hidden_size=6,
)
TIED = dict(untie_embeddings_and_output_weights=False)
MODELS = {
    "moe": MOE,
    "moe, documents": MOE,
    "moe, four layers": MOE | dict(num_layers=4),
    "moe, shared experts": SHARED,
    "moe, shared experts, four layers": SHARED | dict(num_layers=4),
    "moe, tied": MOE | TIED,
    "moe, four layers, tied": MOE | TIED | dict(num_layers=4),
    "dense, tied": TIED,
    "dense layers first": SHARED | dict(num_layers=4, moe_layer_freq=[0, 0, 1, 1], moe_router_enable_expert_bias=True),
    "completep": SHARED | COMPLETEP,
    "every second layer": MOE | dict(num_layers=4, moe_layer_freq=[0, 1, 0, 1]),
}
PP2 = dict(pipeline_model_parallel_size=2)
CHUNKS = PP2 | dict(virtual_pipeline_model_parallel_size=2)
SMALL_BUCKETS = dict(ddp_bucket_size=500)  # so that many are under way when the last backward ends
CASES = {
    "tp 2 x cp 2 (ring), ep 4, recomputed": Case(
        dict(
            tensor_model_parallel_size=2,
            context_parallel_size=2,
            cp_comm_type=ContextCommunication.P2P,
            expert_model_parallel_size=4,
            recompute_modules=list(Recompute),
        )
    ),
    "tp 2 x dp 2, ep 2 x etp 2": Case(
        dict(
            tensor_model_parallel_size=2,
            expert_model_parallel_size=2,
            expert_tensor_parallel_size=2,
            moe_token_dispatcher_type=TokenDispatcherType.ALLTOALL,
        )
    ),
    "cp 2 (ulysses) x dp 2, ep 2": Case(dict(context_parallel_size=2, expert_model_parallel_size=2)),
    "ep 4, hierarchical over nodes of 2, experts placed by a file": Case(
        dict(
            expert_model_parallel_size=4,
            moe_token_dispatcher_type=TokenDispatcherType.HIERARCHICAL,
            moe_hierarchical_node_size=2,
            moe_expert_placement_file=PLACED,
        )
    ),
    "ep 4, all-to-all in 2 parts, recomputed": Case(
        dict(
            expert_model_parallel_size=4,
            moe_token_dispatcher_type=TokenDispatcherType.ALLTOALL,
            moe_dispatch_chunks=2,
            recompute_modules=list(Recompute),
        ),
        optimizer=SMALL_BUCKETS,
    ),
    "dp 4, ep 2, the transport chosen by a probe": Case(
        dict(expert_model_parallel_size=2, moe_token_dispatcher_type=TokenDispatcherType.AUTO)
    ),
    "tp 4, experts on every rank": Case(dict(tensor_model_parallel_size=4)),
    "pp 2 x dp 2, ep 2": Case(PP2 | dict(expert_model_parallel_size=2), optimizer=SMALL_BUCKETS),
    "pp 2 x dp 2, ep 2, zero 2": Case(
        PP2 | dict(expert_model_parallel_size=2), optimizer=SMALL_BUCKETS | dict(zero_stage=2)
    ),
    "pp 2 x dp 2, ep 2, zero bubble, recomputed": Case(
        PP2
        | dict(
            virtual_pipeline_model_parallel_size=2,
            pipeline_schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE,
            expert_model_parallel_size=2,
            recompute_modules=list(Recompute),
        ),
        "moe, four layers",
        SMALL_BUCKETS,
    ),
    "tp 2 x dp 2, ep 4, all-to-all, shared experts": Case(
        dict(
            tensor_model_parallel_size=2,
            expert_model_parallel_size=4,
            moe_token_dispatcher_type=TokenDispatcherType.ALLTOALL,
        ),
        "moe, shared experts",
        SMALL_BUCKETS,
    ),
    "pp 2 x dp 2, ep 2, zero 2, shared experts": Case(
        PP2 | dict(expert_model_parallel_size=2), "moe, shared experts", SMALL_BUCKETS | dict(zero_stage=2)
    ),
    "pp 2 zero bubble x tp 2, ep 2, shared experts, recomputed": Case(
        CHUNKS
        | dict(
            pipeline_schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE,
            tensor_model_parallel_size=2,
            expert_model_parallel_size=2,
            recompute_modules=list(Recompute),
        ),
        "moe, shared experts, four layers",
    ),
    "pp 2 interleaved x dp 2, ep 2": Case(
        CHUNKS | dict(pipeline_schedule=PipelineSchedule.INTERLEAVED_1F1B, expert_model_parallel_size=2),
        "moe, four layers",
        SMALL_BUCKETS,
    ),
    "pp 2 interleaved x dp 2, ep 2, zero 2": Case(
        CHUNKS | dict(pipeline_schedule=PipelineSchedule.INTERLEAVED_1F1B, expert_model_parallel_size=2),
        "moe, four layers",
        SMALL_BUCKETS | dict(zero_stage=2),
    ),
    "pp 2 zero bubble x dp 2, tied, zero 2": Case(
        CHUNKS | dict(pipeline_schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE),
        "moe, four layers, tied",
        dict(zero_stage=2, ddp_bucket_size=3000),
    ),
    "pp 2 x dp 2, documents": Case(PP2, "moe, documents"),
    "pp 2 x cp 2 (ring), documents, ep 2": Case(
        PP2 | dict(context_parallel_size=2, cp_comm_type=ContextCommunication.P2P, expert_model_parallel_size=2),
        "moe, documents",
    ),
    "pp 2 x dp 2, ep 2, tied": Case(PP2 | dict(expert_model_parallel_size=2), "moe, tied", SMALL_BUCKETS),
    "pp 2 x dp 2, ep 2, tied, zero 2": Case(
        PP2 | dict(expert_model_parallel_size=2), "moe, tied", SMALL_BUCKETS | dict(zero_stage=2)
    ),
    "pp 2 x dp 2, ep 2, a stage without experts": Case(
        PP2 | dict(expert_model_parallel_size=2), "dense layers first", SMALL_BUCKETS
    ),
    "tp 2 x dp 2, ep 4, dense layers first, recomputed": Case(
        dict(
            tensor_model_parallel_size=2,
            expert_model_parallel_size=4,
            moe_token_dispatcher_type=TokenDispatcherType.ALLTOALL,
            recompute_modules=list(Recompute),
        ),
        "dense layers first",
    ),
    "pp 2 interleaved x dp 2, ep 2, zero 2, dense layers between": Case(
        CHUNKS | dict(pipeline_schedule=PipelineSchedule.INTERLEAVED_1F1B, expert_model_parallel_size=2),
        "every second layer",
        SMALL_BUCKETS | dict(zero_stage=2),
    ),
    "tp 2 x dp 2, ep 2 x etp 2, completep": Case(
        dict(
            tensor_model_parallel_size=2,
            expert_model_parallel_size=2,
            expert_tensor_parallel_size=2,
            moe_token_dispatcher_type=TokenDispatcherType.ALLTOALL,
        ),
        "completep",
        SMALL_BUCKETS,
    ),
    "pp 2 x dp 2, ep 2, zero 2, completep": Case(
        PP2 | dict(expert_model_parallel_size=2), "completep", SMALL_BUCKETS | dict(zero_stage=2)
    ),
    "pp 2 x tp 2, tied": Case(PP2 | dict(tensor_model_parallel_size=2), "dense, tied"),
}

EIGHT = {
    "tp 2 x pp 2 x dp 2, ep 4, shared experts": Case(
        PP2 | dict(tensor_model_parallel_size=2, expert_model_parallel_size=4), "moe, shared experts", SMALL_BUCKETS
    ),
    "tp 2 x pp 2 x dp 2, ep 4": Case(
        PP2 | dict(tensor_model_parallel_size=2, expert_model_parallel_size=4), optimizer=SMALL_BUCKETS
    ),
    "pp 2 interleaved x cp 2 (ulysses) x dp 2, ep 4, all-to-all, recomputed": Case(
        PP2
        | dict(
            pipeline_schedule=PipelineSchedule.INTERLEAVED_1F1B,
            virtual_pipeline_model_parallel_size=2,
            context_parallel_size=2,
            expert_model_parallel_size=4,
            moe_token_dispatcher_type=TokenDispatcherType.ALLTOALL,
            recompute_modules=list(Recompute),
        ),
        "moe, four layers",
    ),
}
LAYOUTS = {4: CASES, 8: EIGHT}


def run_config(case: Case) -> RunConfig:
    return RunConfig(
        model=model_config(MODELS[case.model]),
        parallel=ParallelConfig(**case.parallel),
        # eps: an update must not hang on the sign of a gradient that is smaller than rounding
        optimizer=OptimizerConfig(lr=3e-3, adam_eps=1e-2, clip_grad=0.5, **case.optimizer),
        training=TrainingConfig(
            micro_batch_size=BATCH, global_batch_size=SEQUENCES, seq_length=LENGTH, params_dtype=Precision.FP32, seed=3
        ),
    )
