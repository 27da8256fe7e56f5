"""Rules across sections: every message names the values and what would work."""

import pytest

from megatron.optimus.config.checks import check, check_trainable, gradient_accumulation_steps
from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ConfigError, RunConfig
from megatron.optimus.describe import describe

MOE = "--num-experts 64 --eval-interval 0"
GRAPHS = "--cuda-graphs"


def config(flags: str) -> RunConfig:
    return load(flags.split()).config


STAGES = "--pipeline-model-parallel-size 2"
CHUNKS = "--virtual-pipeline-model-parallel-size 2"


@pytest.mark.parametrize(
    ("flags", "world", "parts"),
    [
        (f"{GRAPHS} --zero-stage 2", 1, ["cuda_graphs=True needs zero_stage=1, this run has zero_stage=2; leave"]),
        (
            f"{GRAPHS} --recompute-modules norm moe",
            1,
            ["needs recompute_modules=none, this run has", "=norm moe; leave"],
        ),
        (f"{GRAPHS} --reset-attention-mask", 1, ["needs reset_attention_mask=False"]),
        (f"{GRAPHS} --global-batch-size 2", 2, ["2 ranks leaves out", "it has 1; use a global_batch_size above 2"]),
        (
            f"{GRAPHS} {MOE} --moe-router-load-balancing-type global_aux_loss",
            2,
            ["needs moe_router_load_balancing_type="],
        ),
        ("--tensor-model-parallel-size 3", 8, ["size=3", "number of ranks 8", "multiple of 3", "1, 2, 4 or 8"]),
        ("--pipeline-model-parallel-size 16", 8, ["= 16", "number of ranks 8"]),
        (f"{MOE} --expert-model-parallel-size 12", 8, ["=12 must divide the data-parallel size 8; use 1, 2, 4 or 8"]),
        (
            f"{MOE} --expert-model-parallel-size 16 --tensor-model-parallel-size 2",
            8,
            ["=16 must divide the ranks of one pipeline stage 8; use 1, 2, 4 or 8"],
        ),
        (
            f"{MOE} --expert-model-parallel-size 8 --pipeline-model-parallel-size 2",
            8,
            ["=8 must divide the data-parallel size 4; use 1, 2 or 4"],
        ),
        (
            f"{MOE} --moe-shared-expert-intermediate-size 90 --tensor-model-parallel-size 4",
            8,
            ["=4 must divide moe_shared_expert_intermediate_size=90; use 1, 2, 3, 5"],
        ),
        (
            f"{MOE} --moe-layer-freq 2 --ffn-hidden-size 90 --tensor-model-parallel-size 4",
            8,
            ["=4 must divide ffn_hidden_size=90; use 1, 2, 3, 5"],
        ),
        ("--num-experts 10 --expert-model-parallel-size 4", 8, ["=4 must divide num_experts=10; use 1 or 2"]),
        ("--num-experts 6 --moe-router-topk 2 --expert-model-parallel-size 12", 8, ["size 8; use 1, 2, 4 or 8"]),
        (
            f"{MOE} --expert-model-parallel-size 8 --moe-token-dispatcher-type hierarchical "
            "--moe-hierarchical-node-size 3",
            8,
            ["the 3 ranks of a node", "divide the 8 ranks", "node_size to 2 or 4, or use alltoall"],
        ),
        (
            f"{MOE} --expert-model-parallel-size 4 --expert-tensor-parallel-size 4 --moe-token-dispatcher-type "
            "hierarchical --moe-hierarchical-node-size 2",
            16,
            ["multiple of expert_tensor_parallel_size=4", "node_size to 4 or 8"],
        ),
        (
            f"{MOE} --expert-model-parallel-size 4 --moe-dispatch-chunks 2",
            8,
            ["moe_dispatch_chunks=2 with moe_token_dispatcher_type=allgather", "use alltoall, or 1"],
        ),
        (
            f"{MOE} --expert-model-parallel-size 4 --moe-dispatch-chunks 2 --moe-token-dispatcher-type symmetric",
            8,
            ["moe_dispatch_chunks=2 with moe_token_dispatcher_type=symmetric"],
        ),
        (
            f"{MOE} --expert-model-parallel-size 4 --moe-token-dispatcher-type symmetric --device cpu",
            8,
            ["symmetric needs GPUs of CUDA", "device=cpu", "use allgather or alltoall"],
        ),
        (
            f"{MOE} --expert-model-parallel-size 4 --expert-tensor-parallel-size 2 --moe-token-dispatcher-type "
            "symmetric",
            8,
            ["needs whole experts", "expert_tensor_parallel_size=1 (it is 2), allgather or alltoall"],
        ),
        (
            "--tensor-model-parallel-size 2 --tp-comm-overlap --no-sequence-parallel",
            2,
            ["tp_comm_overlap=True", "sequence_parallel=False", "use tensor_model_parallel_size=2 or more with"],
        ),
        ("--tp-comm-overlap", 2, ["tensor_model_parallel_size=1", "or tp_comm_overlap=False"]),
        ("--expert-model-parallel-size 2", 8, ["expert_model_parallel_size=2", "num_experts=0", "use 1"]),
        ("--pipeline-model-parallel-size 8 --num-layers 6", 8, ["num_layers=6 is less than the 8 pipeline stages"]),
        (
            "--pipeline-model-parallel-size 4 --num-layers 12 --decoder-first-pipeline-num-layers 2",
            8,
            ["2 in the first", "leaves 10 layers for 3 stages"],
        ),
        ("--virtual-pipeline-model-parallel-size 2", 8, ["=2 needs a pipeline"]),
        (
            "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2 --num-layers 8",
            8,
            ["pipeline_schedule=1f1b; use 1"],
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-schedule zbv --num-layers 2",
            8,
            ["virtual_pipeline_model_parallel_size=1", "pipeline_schedule=zbv; use 2"],
        ),
        (
            f"{STAGES} --pipeline-schedule zbv --virtual-pipeline-model-parallel-size 3 --num-layers 6",
            8,
            ["pipeline_schedule=zbv; use 2"],
        ),
        (f"{STAGES} --pipeline-schedule interleaved-1f1b", 8, ["use 2 or more"]),
        (
            f"{STAGES} {CHUNKS} --pipeline-schedule interleaved-1f1b --global-batch-size 40 --num-layers 8",
            16,
            ["5 micro-batches", "multiple of 2"],
        ),
        (
            "--global-batch-size 64 --rampup-batch-size 16 12 999 --train-samples 9999 --micro-batch-size 2",
            8,
            ["=16 12 999 has a stage of 52 samples", "multiple of micro_batch_size=2 x data-parallel size 8 = 16"],
        ),
        (
            f"{STAGES} {CHUNKS} --pipeline-schedule interleaved-1f1b --global-batch-size 64 --num-layers 8 "
            "--rampup-batch-size 8 8 999 --train-samples 9999",
            16,
            ["7 micro-batches", "multiple of 2"],
        ),
        (
            "--lr-warmup-samples 9",
            1,
            ["lr_warmup_samples=9", "train_iters=1000; use lr_warmup_iters"],
        ),
        ("--train-samples 80 --lr-warmup-iters 11", 1, ["warm-up of 88 samples", "80", "lr_warmup_samples"]),
        (
            "--tensor-model-parallel-size 4 --num-attention-heads 2",
            8,
            ["=4 must divide num_attention_heads=2; use 1 or 2"],
        ),
        ("--tensor-model-parallel-size 4 --num-query-groups 2", 8, ["=4 must divide num_query_groups=2; use 1 or 2"]),
        ("--tensor-model-parallel-size 4 --vocab-size 50257", 8, ["vocab_size=50257; use vocab_size=50260"]),
        ("--tensor-model-parallel-size 4 --ffn-hidden-size 6", 8, ["ffn_hidden_size=6; use 1, 2, 3 or 6"]),
        (f"{MOE} --expert-tensor-parallel-size 4 --moe-ffn-hidden-size 6", 8, ["moe_ffn_hidden_size=6; use 1, 2, 3"]),
        ("--expert-tensor-parallel-size 2", 8, ["num_experts=0", "use 1"]),
        (f"{MOE} --expert-tensor-parallel-size 16", 8, ["=16 must divide the ranks of one pipeline stage 8"]),
        (
            f"{MOE} --expert-tensor-parallel-size 2 --expert-model-parallel-size 8",
            8,
            ["8 / expert_tensor", "1, 2 or 4"],
        ),
        (f"{MOE} --tensor-model-parallel-size 2 --sequence-parallel false", 8, ["use sequence_parallel=True"]),
        ("--tensor-model-parallel-size 2 --seq-length 255", 8, ["255 tokens must be a multiple", "=2"]),
        ("--context-parallel-size 4 --seq-length 254", 8, ["seq_length=254", "=4; use 252 or 256"]),
        ("--context-parallel-size 4 --cp-comm-type p2p --seq-length 252", 8, ["2 x context", "use 248 or 256"]),
        (
            "--context-parallel-size 4 --tensor-model-parallel-size 2 --num-attention-heads 4",
            8,
            ["the 2 attention heads", "use 1 or 2, or cp_comm_type=p2p"],
        ),
        ("--global-batch-size 20", 8, ["global_batch_size=20", "size 8 = 8", "16 or 24"]),
        ("--global-batch-size 20 --micro-batch-size 3", 8, ["=3 x data-parallel size 8 = 24; use 24"]),
        ("--seq-length 5000", 1, ["seq_length=5000", "max_position_embeddings=4096"]),
        ("--lr-warmup-iters 9 --train-iters 8", 1, ["lr_warmup_iters=9", "train_iters=8", "at most 8"]),
        ("--split 1,0,0", 1, ["eval_interval=100", "'1,0,0'", "969,30,1"]),
        ("--vocab-size 256 --tokenizer-type ByteLevelTokenizer", 1, ["vocab_size=256", "257"]),
        ("--device cpu --distributed-backend nccl", 1, ["nccl", "device=cpu", "auto"]),
        ("--device cuda --distributed-backend ccl", 1, ["ccl", "device=cuda", "auto"]),
        ("--device mps", 2, ["device=mps with 2 ranks", "start one process, or use cpu"]),
        ("--device mps --zero-stage 3", 1, ["device=mps with zero_stage=3: use zero_stage=1"]),
        (
            "--num-layers 3 --recompute-modules moe --recompute-num-layers 4",
            1,
            ["recompute_num_layers=4 exceeds num_layers=3; use at most 3"],
        ),
        (
            "--recompute-num-layers 2",
            1,
            ["recompute_num_layers=2 without recompute_modules", "--recompute-modules moe attention norm"],
        ),
        (
            "--num-layers 3 --cpu-offloading-num-layers 4",
            1,
            ["cpu_offloading_num_layers=4 exceeds num_layers=3; use at most 3, 0 for none"],
        ),
        (
            "--optimizer sophia --sophia-interval 10 --sophia-batch-size 6 --micro-batch-size 2",
            2,
            ["sophia_batch_size=6 must be a multiple of micro_batch_size x data parallel size = 4"],
        ),
        ("--optimizer sophia --sophia-interval 10 --sophia-batch-size 64", 1, ["=64", "at most global_batch_size"]),
        ("--optimizer muon --qk-clip-threshold 100", 1, ["=100.0 with qk_layernorm, which bounds", "threshold=0"]),
        (
            "--optimizer muon --qk-clip-threshold 100 --qk-layernorm false --clip-qkv 8",
            1,
            ["=100.0 with clip_qkv=8.0", "a model without clip_qkv"],
        ),
    ],
)
def test_impossible_combinations(flags: str, world: int, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as info:
        check(config(flags), world)
    for part in parts:
        assert part in str(info.value)


@pytest.mark.parametrize(
    ("flags", "world"),
    [
        ("", 8),
        (f"{MOE} --expert-model-parallel-size 8", 8),
        (f"{MOE} --expert-model-parallel-size 8 --tensor-model-parallel-size 2 --global-batch-size 4", 8),
        ("--context-parallel-size 4 --cp-comm-type p2p --num-attention-heads 2", 8),
        ("--tensor-model-parallel-size 2 --sequence-parallel false --seq-length 255", 8),
        (f"{MOE} --expert-tensor-parallel-size 2 --expert-model-parallel-size 4", 8),
        ("--lr-warmup-iters 9 --train-iters 8 --lr-decay-iters 100", 1),  # the first part of a longer schedule
        ("--split 1,0,0 --eval-interval 0", 1),
        ("--split 1,0,0 --valid-data-path web=x", 1),
        ("--split 1,0,0 --valid-data-path web=x --skip-train", 1),
        ("--train-samples 80 --lr-warmup-iters 11 --lr-decay-samples 88", 1),
        ("--global-batch-size 64 --rampup-batch-size 16 16 999 --train-samples 9999 --micro-batch-size 2", 8),
        ("--seq-length 4096", 1),
        ("--device cuda --distributed-backend nccl", 1),
        ("--device cuda --distributed-backend gloo", 1),
        ("--distributed-backend nccl", 1),
        ("--num-layers 3 --recompute-modules moe --recompute-num-layers 3 --cpu-offloading-num-layers 3", 1),
        ("--recompute-num-layers 0", 1),
    ],
)
def test_possible_combinations(flags: str, world: int) -> None:
    check(config(flags), world)


def test_gradient_accumulation_steps() -> None:
    run = config("--global-batch-size 48 --micro-batch-size 2 --pipeline-model-parallel-size 2")
    assert gradient_accumulation_steps(run, 8) == 6
    with pytest.raises(ConfigError, match="use 32 or 64"):
        gradient_accumulation_steps(run, 32)
    with pytest.raises(ConfigError, match="number of ranks 7"):
        gradient_accumulation_steps(run, 7)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (
            "--data-path x --optimizer galore --galore-rank 5000",
            "galore_rank=5000 exceeds the shorter side of every matrix of the model; use at most",
        ),
        ("--data-path x --zero-stage 3 --optimizer muon", "zero_stage=3 needs optimizer=adam, not muon"),
        ("--data-path x --zero-stage 0", "zero_stage=0"),
        (
            "--data-path x --optimizer-cpu-offload",
            "optimizer_cpu_offload needs zero_stage=3, this run has zero_stage=1",
        ),
        ("--data-path x --zero-stage 2 --param-cpu-offload", "param_cpu_offload needs zero_stage=3"),
        (
            "--data-path x --zero-stage 3 --num-experts 8 --expert-model-parallel-size 2",
            "but expert_model_parallel_size=2; use 1",
        ),
        ("--data-path x --zero-stage 3 --tensor-model-parallel-size 2", "but tensor_model_parallel_size=2; use 1"),
        ("--data-path x --zero-stage 3 --optimizer lion", "zero_stage=3 needs optimizer=adam, not lion"),
        ("--data-path x --zero-stage 3 --optimizer-state-dtype bf16", "not optimizer_state_dtype=bf16"),
        ("", "--data-path data/corpus"),
    ],
)
def test_what_this_version_cannot_train(flags: str, part: str) -> None:
    run = config(flags)
    check(run, 8)
    with pytest.raises(ConfigError) as info:
        check_trainable(run)
    assert part in str(info.value)
    if flags:
        with pytest.raises(ConfigError, match=part):
            describe(run, 8)
    else:  # data may still be missing
        assert "layout of 8 ranks" in describe(run, 8)


def test_trainable() -> None:
    check_trainable(config("--data-path x --tensor-model-parallel-size 2 --context-parallel-size 2"))
    check_trainable(config("--skip-train --valid-data-path web=x"))
    with pytest.raises(ConfigError, match="data_path is empty"):
        check_trainable(config("--valid-data-path web=x"))


@pytest.mark.parametrize(
    ("flags", "ranks", "part"),
    [
        ("--global-batch-size 8 --micro-batch-size 8", 1, "a step has one of each; use a global_batch_size above 8"),
        (
            "--pipeline-model-parallel-size 2 --global-batch-size 8",
            2,
            "compares data-parallel ranks, and this run has one",
        ),
        ("--zero-stage 3 --global-batch-size 8", 2, "needs zero_stage=1 or 2, this run has zero_stage=3"),
        ("--global-batch-size 8 --micro-batch-size 4", 1, None),
        ("--global-batch-size 8 --micro-batch-size 4", 2, None),
    ],
)
def test_noise_needs_two_gradients_a_step(flags: str, ranks: int, part: str | None) -> None:
    run = config("--log-gradient-noise-scale " + flags)
    if part is None:
        check(run, ranks)
        return
    with pytest.raises(ConfigError) as info:
        check(run, ranks)
    assert part in str(info.value)
