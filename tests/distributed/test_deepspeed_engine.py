"""Our decoder on DeepSpeed's own engine, through deepspeed_ext: ZeRO-3, offload and AutoTP against one torch process.

Dense and MoE presets, every expert on every rank; spread experts are refused. On gloo ranks in fp32; on GPUs with NCCL
in fp32 and bf16, against one process on the CPU.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed_ext
from megatron.optimus.config.schema import ModelConfig, QKNormScope
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights
from tests.helpers import run_distributed, run_on_gpus

STEPS, MAX_NORM, BATCH, LENGTH, VOCABULARY, LR = 3, 0.5, 2, 16, 64, 1e-3
ON_CPU = {"device": "cpu"}
SHAPES: dict[str, dict[str, Any]] = {  # of mula-1b, of the Mula MoE models, and with a norm for each head (Qwen3-MoE)
    "dense": {"ffn_hidden_size": 64, "qk_layernorm": False, "normalization": "layernorm-nonparametric"},
    "moe": {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "qk_layernorm": True},
    "head norm": {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "qk_layernorm_scope": "head"},
}
SHAPES["shared"] = SHAPES["moe"] | {  # Qwen2-MoE
    "qk_layernorm": False,
    "moe_shared_expert_intermediate_size": 20,
    "moe_shared_expert_gate": True,
    "add_qkv_bias": True,
}
# Below the threshold of parameters that stage 3 leaves whole there would be nothing to test.
STAGE_3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
ZERO = {
    "stage 3": STAGE_3,
    "stage 3, states and parameters in host memory": {
        **STAGE_3,
        "offload_optimizer": ON_CPU,
        "offload_param": ON_CPU,
    },
    "stage 1, states in host memory": {"stage": 1, "offload_optimizer": ON_CPU},
    "stage 2, states in host memory": {"stage": 2, "offload_optimizer": ON_CPU},
}


def _config(shape: str) -> ModelConfig:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    options = dict(SHAPES[shape])
    if "qk_layernorm_scope" in options:
        options["qk_layernorm_scope"] = QKNormScope(options["qk_layernorm_scope"])
    return ModelConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **options)


def _device() -> torch.device:
    """This rank's: a GPU where the ranks speak NCCL."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _model(shape: str) -> Decoder:
    with torch.device("meta"):
        model = Decoder(_config(shape))
    initialize_weights(model, seed=1, device=torch.device("cpu"), dtype=torch.float32)
    return model.to(_device())


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)


def _loss(model: nn.Module, config: ModelConfig, step: int, replica: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + replica)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator).to(_device())
    output = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    loss = output.loss_sum / (BATCH * LENGTH)
    return loss + config.moe_aux_loss_coeff * output.aux_loss + config.moe_z_loss_coeff * output.z_loss


@functools.cache
def _expected(shape: str, replicas: int) -> tuple[list[list[float]], list[float], dict[str, torch.Tensor]]:
    """Losses by step and replica, norms and final weights of one process that sees all batches."""
    model = _model(shape)
    optimizer = _adamw(model)
    losses, norms = [], []
    for step in range(STEPS):
        each = [_loss(model, model.config, step, replica) for replica in range(replicas)]
        (sum(each) / replicas).backward()  # type: ignore[union-attr]
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return losses, norms, {name: param.detach() for name, param in model.named_parameters()}


Run = tuple[str, dict[str, Any]]  # shape, additions to DeepSpeed's configuration


def _train(shape: str, additions: dict[str, Any], replica: int) -> dict[str, Any]:
    import deepspeed
    from deepspeed.module_inject.layers import GatherReplacedLayerParams

    model = _model(shape)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": MAX_NORM,
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's compiles C++ when it is built
        **additions,
    }
    engine, *_ = deepspeed_ext.initialize(model=model, optimizer=_adamw(model), config=config)
    losses, norms = [], []
    for step in range(STEPS):
        loss = _loss(engine, model.config, step, replica)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    weights, held = {}, 0
    for name, param in engine.module.named_parameters():
        held += param.numel()
        over_data = deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id"))
        with over_data, GatherReplacedLayerParams([param], engine.module, enabled=True):
            weights[name] = param.detach().float().cpu()
    return {"losses": losses, "norms": norms, "weights": weights, "held": held}


def _train_each(rank: int, world: int, runs: list[Run], ranks_per_replica: int) -> list[dict[str, Any]]:
    deepspeed_ext.init_distributed()
    results = [_train(shape, additions, rank // ranks_per_replica) for shape, additions in runs]
    deepspeed_ext.shutdown()
    return results


class Limits(NamedTuple):
    """Largest errors: of losses and norms relative; of weights relative to the largest of a tensor, plus ``steps``."""

    losses: float
    norms: float
    weights: float
    steps: float = 0.0  # absolute


# AdamW divides by the gradient's size: one element of 512 whose gradient is nearly nothing shows rounding, of 2.2e-5.
EXACT = Limits(1e-6, 1e-6, 4e-5)
ON_GPU = Limits(1e-5, 1e-4, 2e-4)  # other kernels than the CPU's, other orders of sums
# Weights are rounded to 8 bits, and a gradient that is nothing but rounding moves a weight by lr in either direction.
IN_BF16 = Limits(2e-2, 5e-2, 2**-8, steps=2 * STEPS * LR)


def _check(
    shape: str, what: str, results: list[dict[str, Any]], ranks_per_replica: int, limits: Limits = EXACT
) -> None:
    losses, norms, weights = _expected(shape, len(results) // ranks_per_replica)
    for rank, result in enumerate(results):
        where = f"{shape}, {what}, rank {rank}"
        own = [each[rank // ranks_per_replica] for each in losses]
        assert result["losses"] == pytest.approx(own, rel=limits.losses), where
        assert result["norms"] == pytest.approx(norms, rel=limits.norms), where
        assert result["weights"].keys() == weights.keys()
        for name, weight in weights.items():
            error, largest = (result["weights"][name] - weight).abs().max().item(), weight.abs().max().item()
            assert error <= limits.weights * largest + limits.steps, f"{where}: {name} differs by {error / largest:.1e}"


def test_zero_3_and_offload_equal_one_process() -> None:
    cases = [(shape, what) for shape in ("dense", "moe") for what in ZERO] + [("shared", "stage 3")]
    runs = [(shape, {"zero_optimization": ZERO[what]}) for shape, what in cases]
    by_rank = run_distributed(_train_each, 2, runs, 1)
    for index, (shape, what) in enumerate(cases):
        _check(shape, what, [results[index] for results in by_rank], 1)
    whole = sum(param.numel() for param in _expected("moe", 2)[2].values())
    assert by_rank[0][cases.index(("moe", "stage 3"))]["held"] == 0, "parameters were not sharded"
    assert by_rank[0][cases.index(("moe", "stage 1, states in host memory"))]["held"] == whole


BF16 = {"bf16": {"enabled": True}}


def _on_gpus(ranks_per_replica: int, cases: list[tuple[str, str, dict[str, Any]]], device: str, world: int) -> None:
    """Each case in fp32 and bf16, one group of ranks for all."""
    runs = [(shape, additions | dtype) for dtype in ({}, BF16) for shape, _, additions in cases]
    by_rank = run_on_gpus(_train_each, world, runs, ranks_per_replica, timeout=180, device=device)
    for index, (limits, (shape, what, _)) in enumerate(
        (limits, case) for limits in (ON_GPU, IN_BF16) for case in cases
    ):
        name = f"{what}, {'fp32' if limits is ON_GPU else 'bf16'}"
        _check(shape, name, [results[index] for results in by_rank], ranks_per_replica, limits)


def zero_3_on_gpus(device: str = "cuda") -> None:
    cases = [
        (shape, what, {"zero_optimization": ZERO[what]})
        for shape, what in (
            ("dense", "stage 3"),
            ("moe", "stage 3"),
            ("moe", "stage 3, states and parameters in host memory"),
            ("moe", "stage 1, states in host memory"),
        )
    ]
    _on_gpus(1, cases, device, 2)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")


@pytest.mark.gpu
@two_gpus
def test_zero_3_and_offload_on_gpus_equal_one_process() -> None:
    zero_3_on_gpus()


def _spread_experts(rank: int, world: int) -> list[str]:
    deepspeed_ext.init_distributed()
    messages = []
    for zero in ({"stage": 3}, {"stage": 1, "offload_optimizer": ON_CPU}, {"stage": 0}):
        model = _model("moe")
        config = {"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": zero}
        try:
            deepspeed_ext.initialize(
                model=model,
                optimizer=_adamw(model),
                config=config,
                is_expert=lambda name: "ep_size_2" if ".experts." in name else None,
            )
        except ValueError as error:
            messages.append(str(error))
    deepspeed_ext.shutdown()
    return messages


def test_spread_experts_are_refused_where_deepspeed_would_mix_them() -> None:
    for messages in run_distributed(_spread_experts, 2):
        assert len(messages) == 3
        for message, reason in zip(messages, ("ZeRO stage 3", "offload", "ZeRO stage 0"), strict=True):
            assert reason in message and "ep_size_2" in message and "layers.0.moe.experts.gate_up_weight" in message
            assert "stage 1 or 2 without offload" in message
