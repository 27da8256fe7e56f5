"""The same decoder and optimizer step in torchtitan and OLMo-core, for training_step.py, on one device.

Both get what they recommend: fp32 parameters under FSDP2 with MixedPrecisionPolicy (bf16 parameters, fp32 reduction),
here over one rank, torch.compile of each block and of the loss, no activation checkpointing. Weights are drawn by this
file, alike for both, after their own initialisation of buffers.

torchtitan   its Qwen3 model (RMSNorm, SDPA, rotated halves), dense or with its MoE over torch._grouped_mm: softmax
             router, no shared expert, balanced by its bias hook; loss from whole logits in fp32; its clipping; torch's
             fused AdamW. Written for 0.2.x, the last series that runs with torch 2.11.
  -autocast  without FSDP2: autocast, which its trainer takes on one device. The residual stream is then fp32.
olmo-core    its Llama-like decoder (RMSNorm), its TransformerTrainModule and SkipStepAdamW (foreach). Its two dropless
             MoE layers need packages that cannot be installed from wheels alone (grouped_gemm; Transformer Engine), so
             its MoE is the one with a capacity, factor 1: never more work than the others', and tokens beyond an
             expert's capacity are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from layout_speed_programs import LR, Program, random_tokens
from torch import Tensor, nn

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.99), 0.1, 1.0  # those of the project's presets


def count(model: nn.Module) -> dict[str, int]:
    """Parameters of products and look-ups, which are to be equal in all systems, and those of norms, which differ."""
    found = {"parameters": 0, "norm_parameters": 0}
    for name, param in model.named_parameters():
        found["norm_parameters" if "norm" in name else "parameters"] += param.numel()
    return found


def draw(model: nn.Module, device: torch.device) -> None:
    """Normal weights of deviation 0.02 and norms of ones, as weights_on_device.py draws the project's."""
    generator = torch.Generator(device=device).manual_seed(1234)
    with torch.no_grad():
        for name, param in model.named_parameters():
            local = param.to_local() if hasattr(param, "to_local") else param
            local.fill_(1.0) if "norm" in name else local.normal_(0.0, 0.02, generator=generator)


# ---- torchtitan


@dataclass(frozen=True)
class TorchtitanParts:
    """What its trainer trains with."""

    model: nn.Module
    optimizers: Any
    loss_fn: Callable[[Tensor, Tensor], Tensor]  # the sum over labels
    clip: Callable[[], Tensor]
    about: dict[str, Any]


def torchtitan_parts(
    config: Any, device: torch.device, compiled: bool, autocast: bool = False, float8: bool = False
) -> TorchtitanParts:
    """``config``: the project's, of one rank and one micro-batch."""
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.models.llama4.infra.parallelize import apply_compile, apply_fsdp
    from torchtitan.models.qwen3.model.model import Qwen3Model

    if device.type == "cpu":
        _make_fit_for_cpu()
    job = JobConfig()
    job.compile.enable = compiled
    job.optimizer.lr, job.optimizer.weight_decay = LR, config.optimizer.weight_decay
    job.optimizer.beta1, job.optimizer.beta2 = config.optimizer.adam_beta1, config.optimizer.adam_beta2
    with torch.device("meta"):
        model = Qwen3Model(_qwen3(config, device))
    counted = count(model)
    if float8:
        _float8(model, device)
    if compiled:
        apply_compile(model, job.compile, ep_enabled=False)
    if not autocast:
        mesh = torch.distributed.init_device_mesh(device.type, (1,), mesh_dim_names=("fsdp",))
        apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False, reshard_after_forward_policy="never")
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights()
    draw(model, device)
    model.train()
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    optimizers = build_optimizers_with_moe_load_balancing([model], job.optimizer, dims)
    params = list(model.parameters())
    precision = "fp32 parameters under autocast" if autocast else "FSDP2 over one rank, parameters cast to bf16"
    about = {"system_version": f"torchtitan {version('torchtitan')}", "precision": precision, "norm": "RMSNorm"}
    about |= {"optimizer": "torch AdamW, fused, on fp32 parameters"} | counted
    if float8:
        about["precision"] += f", float8 linear layers of torchao {version('torchao')}, one scale a matrix"
    clip = partial(clip_grad_norm_, params, CLIP, foreach=True)
    return TorchtitanParts(model, optimizers, build_cross_entropy_loss(job), clip, about)


def _float8(model: nn.Module, device: torch.device) -> None:
    """As torchtitan's converter does by default: all linear layers but the output layer, tensorwise dynamic scales."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=device.type == "cpu")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "output")


def torchtitan(
    config: Any, device: torch.device, compiled: bool, autocast: bool = False, float8: bool = False
) -> Program:
    """``config``: the project's, of one rank and one micro-batch."""
    parts = torchtitan_parts(config, device, compiled, autocast, float8)
    tokens_BS, labels_BS = random_tokens(config, config.training.micro_batch_size, 0, device)

    def queue() -> Callable[[], float]:
        parts.optimizers.zero_grad()
        with torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext():
            loss = parts.loss_fn(parts.model(tokens_BS), labels_BS) / labels_BS.numel()
        loss.backward()
        parts.clip()
        parts.optimizers.step()
        return loss.detach().item

    return Program.queued(queue, labels_BS.numel(), about=parts.about)


def _qwen3(config: Any, device: torch.device) -> Any:
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs

    model = config.model
    experts = MoEArgs(
        num_experts=max(1, model.num_experts),
        num_shared_experts=0,
        score_func="softmax",
        route_norm=model.moe_router_norm_topk_prob,
        score_before_experts=False,
        top_k=model.moe_router_topk,
        use_grouped_mm=device.type == "cuda",  # its padding for grouped products is a Triton kernel
    )
    experts._debug_force_load_balance = model.moe_router_force_load_balancing
    return Qwen3ModelArgs(
        dim=model.hidden_size,
        n_layers=model.num_layers,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.num_kv_heads,
        vocab_size=model.vocab_size,
        head_dim=model.head_dim,
        hidden_dim=model.ffn_hidden_size,
        norm_eps=model.norm_epsilon,
        rope_theta=model.rotary_base,
        qk_norm=model.qk_layernorm,
        max_seq_len=config.training.seq_length,
        moe_enabled=model.is_moe,
        moe_inter_dim=model.moe_ffn_hidden_size,
        moe_args=experts,
    )


def _make_fit_for_cpu() -> None:
    """Here torch.histc, which counts the tokens of experts, refuses integers, and meshes would still be CUDA's."""
    from torchtitan.distributed import parallel_dims

    parallel_dims.device_type = "cpu"
    histc = torch.histc
    torch.histc = lambda values, **options: histc(values.float(), **options).to(values.dtype)


def torchtitan_autocast(config: Any, device: torch.device, compiled: bool) -> Program:
    return torchtitan(config, device, compiled, autocast=True)


def torchtitan_float8(config: Any, device: torch.device, compiled: bool) -> Program:
    return torchtitan(config, device, compiled, float8=True)


# ---- OLMo-core


class _Trainer:
    """What OLMo-core's train module tells its trainer: the loss is kept, other metrics are not."""

    def __init__(self) -> None:
        self.loss = torch.zeros(())

    def record_ce_loss(self, value: Tensor, reduce_type: Any = None) -> None:
        self.loss = value

    def record_metric(self, *args: Any, **kwargs: Any) -> None:
        pass


def olmo_core(config: Any, device: torch.device, compiled: bool) -> Program:
    """``config``: the project's, of one rank and one micro-batch."""
    from olmo_core.config import DType
    from olmo_core.distributed.parallel import DataParallelType
    from olmo_core.optim import SkipStepAdamWConfig
    from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig

    tokens_BS, labels_BS = random_tokens(config, config.training.micro_batch_size, 0, device)
    model = _llama_like(config).build(init_device="meta")
    counted = count(model)
    module: Any = TransformerTrainModuleConfig(
        rank_microbatch_size=labels_BS.numel(),
        max_sequence_length=config.training.seq_length,
        optim=SkipStepAdamWConfig(lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY),
        compile_model=compiled,
        dp_config=TransformerDataParallelConfig(
            name=DataParallelType.fsdp, param_dtype=DType.bfloat16, reduce_dtype=DType.float32
        ),
        max_grad_norm=CLIP,
    ).build(model, device)
    module._trainer = trainer = _Trainer()
    draw(module.model, device)

    def queue() -> Callable[[], float]:
        module.zero_grads()
        module.train_batch({"input_ids": tokens_BS, "labels": labels_BS})
        module.optim_step()
        return trainer.loss.item

    about = {
        "system_version": f"OLMo-core {version('ai2-olmo-core')}",
        "precision": "FSDP2 over one rank, parameters cast to bf16",
        "norm": "RMSNorm",
        "optimizer": "SkipStepAdamW, foreach, on fp32 parameters",
    }
    if config.model.is_moe:
        about["experts"] = "capacity factor 1: tokens beyond it are dropped"
    return Program.queued(queue, labels_BS.numel(), about=about | counted)


def _llama_like(config: Any) -> Any:
    from olmo_core.nn.feed_forward import FeedForwardConfig
    from olmo_core.nn.moe import MoEConfig, MoERouterConfig, MoEType
    from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig, TransformerType

    model = config.model
    dense: dict[str, Any] = {"feed_forward": FeedForwardConfig(hidden_size=model.ffn_hidden_size, bias=False)}
    router = MoERouterConfig(
        top_k=model.moe_router_topk,
        normalize_expert_weights=1.0 if model.moe_router_norm_topk_prob else None,
        uniform_expert_assignment=model.moe_router_force_load_balancing,
    )
    experts = MoEConfig(
        name=MoEType.default,
        num_experts=max(1, model.num_experts),
        hidden_size=model.moe_ffn_hidden_size,
        capacity_factor=1.0,
        router=router,
        lb_loss_weight=model.moe_aux_loss_coeff,
    )
    moe = {"name": TransformerType.moe, "block_name": TransformerBlockType.moe, "feed_forward_moe": experts}
    return TransformerConfig.llama_like(
        d_model=model.hidden_size,
        vocab_size=model.vocab_size,
        n_layers=model.num_layers,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.num_kv_heads,
        qk_norm=model.qk_layernorm,
        layer_norm_eps=model.norm_epsilon,
        rope_theta=int(model.rotary_base),
        **(moe if model.is_moe else dense),
    )


PEERS: dict[str, Callable[[Any, torch.device, bool], Program]] = {
    "torchtitan": torchtitan,
    "torchtitan-autocast": torchtitan_autocast,
    "torchtitan-float8": torchtitan_float8,
    "olmo-core": olmo_core,
}
