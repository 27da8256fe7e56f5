"""DeepSpeed's own pipeline and its own MoE layers around the project's blocks, for layout_speed.py.

The pipeline is deepspeed.pipe.PipelineModule over embedding, blocks, and final norm with the output projection; the
loss is the project's. Of DeepSpeed's two MoE layers, AutoEP (its configuration's section "expert_parallel") replaces a
block with a linear gate and fused experts by its own dropless layer, and deepspeed.moe.layer.MoE is the older one: its
capacity factor is 1 here, so it drops tokens where experts are not equally busy, and never computes more than ours.
Neither gets an auxiliary loss. All train with ZeRO stage 1 and torch's fused AdamW; with MoE layers gradients are added
up and reduced in the weights' dtype, DeepSpeed's default, where ours do both in fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from layout_speed_programs import LR, Program, random_tokens, run_config
from torch import Tensor, nn

from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.context import DTYPES
from megatron.optimus.layers.loss import LMHead
from megatron.optimus.layers.norm import build_norm
from megatron.optimus.layers.rope import rope_table
from megatron.optimus.models.decoder import Block, Decoder

# ---- the pipeline


class Embed(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.model.vocab_size, config.model.hidden_size)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.embedding(tokens_BS)


class OneBlock(nn.Module):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.config, self.block = config, Block(config.model, is_moe=number in config.model.moe_layers)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.block(x_BSD, rope_table(x_BSD.shape[1], self.config.model, x_BSD.device))[0]


class Tail(nn.Module):
    """The final norm; the output projection is applied by the loss, which never builds all logits."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.final_norm = build_norm(config.model)
        self.lm_head = LMHead(config.model.hidden_size, config.model.vocab_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.final_norm(x_BSD)


def pipeline(words: Sequence[str], device: torch.device, accumulate: str) -> Program:
    """DeepSpeed's 1F1B over all ranks; ``accumulate``: the dtype in which it adds gradients up, "fp32" or "bf16"."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    config = run_config(words, device)
    size = config.training.micro_batch_size
    micro_batches = config.training.global_batch_size // size

    def loss(hidden_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        tail = next(layer for layer in module.forward_funcs if isinstance(layer, Tail))
        return tail.lm_head(hidden_BSD, labels_BS) / labels_BS.numel()

    blocks = [LayerSpec(OneBlock, config, number) for number in range(config.model.num_layers)]
    with torch.device(device):
        module = PipelineModule(
            layers=[LayerSpec(Embed, config), *blocks, LayerSpec(Tail, config)],
            num_stages=dist.get_world_size(),
            loss_fn=loss,
            partition_method="parameters",
        )
    draw(module)
    ds_config = stock_config(config, micro_batches) | {"data_types": {"grad_accum_dtype": accumulate}}
    engine, *_ = deepspeed.initialize(model=module, optimizer=adamw(module.parameters(), device), config=ds_config)
    tokens_BS, labels_BS = random_tokens(config, size * micro_batches, 0, device)
    parts = list(zip(tokens_BS.split(size), labels_BS.split(size), strict=True))

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from parts

    engine.set_dataiterator(batches())
    stages = [int(module.parts[stage + 1] - module.parts[stage]) for stage in range(module.num_stages)]
    about = {
        "layout": f"deepspeed.pipe, {stages} layers a stage, embedding and head among them",
        "micro_batches": micro_batches,
        "num_layers": config.model.num_layers,
        "optimizer": type(engine.optimizer).__name__,
    }
    tokens = config.training.global_batch_size * config.training.seq_length
    return Program(lambda: float(engine.train_batch()), tokens, close=engine.destroy, about=about)


# ---- Mixture of Experts


class FusedExperts(nn.Module):
    """The weights as transformers' MoE models keep them, where AutoEP takes them from."""

    def __init__(self, num_experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(num_experts, width, inner))


class ForAutoEP(nn.Module):
    """A block that AutoEP replaces; it is never run itself."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = FusedExperts(config.num_experts, config.hidden_size, config.moe_ffn_hidden_size)


class Expert(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Wrapped(nn.Module):
    """DeepSpeed's layer in the place of ours, whose blocks expect statistics of the router as well."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, None]:
        y = self.layer(x_BSD)
        return (y[0] if isinstance(y, tuple) else y).view_as(x_BSD), None


def deepspeed_moe(config: ModelConfig, kind: str, ranks: int, device: torch.device) -> Decoder:
    from deepspeed.moe.layer import MoE

    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device=device)
    with torch.device(device):
        for block in model.layers:
            if kind == "autoep":
                layer: nn.Module = ForAutoEP(config)
            else:
                expert = Expert(config.hidden_size, config.moe_ffn_hidden_size)
                experts = {"num_experts": config.num_experts, "ep_size": ranks, "k": config.moe_router_topk}
                layer = MoE(config.hidden_size, expert, capacity_factor=1.0, **experts)
            block.moe = Wrapped(layer)
    draw(model)
    return model


def autoep_section(config: ModelConfig, ranks: int, device: torch.device) -> dict[str, Any]:
    """The section of DeepSpeed's configuration."""
    return {
        "enabled": True,
        "autoep_size": ranks,
        "moe_layer_pattern": r"layers\.\d+\.moe\.layer",
        "router_pattern": "gate",
        "expert_pattern": "experts",
        "expert_w1": "gate_up_proj",
        "expert_w2": "down_proj",
        "expert_w3": None,
        "num_experts_attr": "num_experts",
        "top_k": config.moe_router_topk,
        "score_func": "softmax",
        "score_apply": "post",
        "route_norm": True,
        "use_grouped_mm": device.type != "cpu",
    }


def moe(words: Sequence[str], device: torch.device, kind: str) -> Program:
    """The decoder with DeepSpeed's MoE layers, all ranks in one expert-parallel group; ``kind``: autoep or native."""
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    config, ranks = run_config(words, device), dist.get_world_size()
    model_config, size = config.model, config.training.micro_batch_size
    model = deepspeed_moe(model_config, kind, ranks, device).to(DTYPES[config.training.params_dtype])
    ds_config = stock_config(config, 1)
    if kind == "autoep":
        ds_config["expert_parallel"] = autoep_section(model_config, ranks, device)

    def optimizer(_: Any) -> torch.optim.Optimizer:  # called when the layers are DeepSpeed's
        whole = {"params": [p for p in model.parameters() if p.requires_grad], "name": "all"}
        return adamw(split_params_into_different_moe_groups_for_optimizer(whole), device)

    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=list(model.parameters()), config=ds_config
    )
    tokens_BS, labels_BS = random_tokens(config, size, dist.get_rank(), device)

    def step() -> float:
        loss = engine(tokens_BS, labels_BS).loss_sum / labels_BS.numel()
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    replaced = sum(type(module).__name__ == "AutoEPMoELayer" for module in model.modules())
    if kind == "autoep" and replaced != model_config.num_layers:
        raise RuntimeError(f"AutoEP took {replaced} of {model_config.num_layers} layers")
    kinds = {"autoep": "AutoEP", "native": "deepspeed.moe.layer.MoE, capacity factor 1"}
    about = {"layout": f"{kinds[kind]}, ep={ranks}", "optimizer": type(engine.optimizer).__name__}
    tokens = config.training.global_batch_size * config.training.seq_length
    return Program(step, tokens, close=engine.destroy, about=about | {"num_layers": model_config.num_layers})


# ---- both


def draw(module: nn.Module) -> None:
    """Small random weights; norms are ones."""
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(1.0) if param.dim() == 1 else param.normal_(0.0, 0.02)


def adamw(params: Any, device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, betas=(0.9, 0.99), weight_decay=0.1, fused=device.type == "cuda")


def stock_config(config: Any, micro_batches: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": config.training.micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": config.optimizer.clip_grad,
        "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_scatter": True},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": config.training.params_dtype.value == "bf16"},
        "timers": {"throughput": {"enabled": False}},
        "steps_per_print": 1_000_000_000,
    }
