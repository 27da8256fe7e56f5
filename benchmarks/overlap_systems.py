"""The systems that overlap.py compares: one model, each system's engine around it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

LR = 1e-4
OURS = ("ours", "ours16", "plain", "stage2")  # the training program's engine


def run_config(args: argparse.Namespace) -> Any:
    from megatron.optimus.config.load import load

    words = [
        *("--preset", args.preset, "--data-path", "RANDOM_TOKENS", "--train-iters", "100", "--lr-warmup-iters", "0"),
        *("--seq-length", str(args.seq_length), "--micro-batch-size", str(args.micro_batch_size)),
        *("--global-batch-size", str(args.micro_batch_size * args.ranks), "--pipeline-model-parallel-size", "1"),
        *("--expert-model-parallel-size", str(args.expert_parallel), "--params-dtype", args.dtype),
        *("--lr", str(LR), "--min-lr", str(LR), "--eval-interval", "0", "--device", args.device),
    ]
    if args.num_layers:
        words += ["--num-layers", str(args.num_layers)]
    if args.num_experts:
        words += ["--num-experts", str(args.num_experts)]
    if args.bucket_size:
        words += ["--ddp-bucket-size", str(args.bucket_size)]
    if args.reduce_in_bf16:
        words += ["--grad-reduce-in-bf16"]
    return load(words).config


def build(system: str, config: Any, mesh: Any, device: torch.device) -> Any:
    """The engine of a system around a fresh model."""
    from megatron.optimus.context import RunContext
    from megatron.optimus.training.engine import build_engine

    model = build_model(config, mesh, device)
    if system == "nudged" and dist.get_rank() == 0:  # the engine gives others the first rank's dense weights
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if "layers.0" in n and p.dim() > 1).view(-1)[0].mul_(1 + 2**-7)
    if system.startswith("deepspeed"):
        return build_stock(int(system[-1]), model, config, mesh)
    if system == "so":
        return build_so(model, config, mesh)
    return build_engine(RunContext.of(config_of(system, config), mesh, device), model)


def config_of(system: str, config: Any) -> Any:
    """The configuration of one of OURS."""
    overlap, stage = system != "plain", 2 if system == "stage2" else 1
    if system == "ours16":
        config = replace(config, optimizer=replace(config.optimizer, grad_reduce_in_bf16=True))
    options = replace(config.optimizer, zero_stage=stage, overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    return replace(config, optimizer=options)


def build_model(config: Any, mesh: Any, device: torch.device) -> Any:
    """The training program's model with weights drawn on the device: its own, drawn on the host, take minutes."""
    from megatron.optimus.context import DTYPES
    from megatron.optimus.models.decoder import Decoder
    from megatron.optimus.models.initialize import materialize
    from megatron.optimus.parallel.apply import parallelize
    from megatron.optimus.parallel.tensor import register_gradient_sums

    with torch.device("meta"):
        model = Decoder(config.model)
    parallelize(model, mesh, config.parallel, config.training.seq_length)
    materialize(model, device, DTYPES[config.training.params_dtype])
    generator = torch.Generator(device=device).manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0) if param.dim() == 1 else param.normal_(0.0, 0.02, generator=generator)
    register_gradient_sums(model, mesh)
    return model


def build_so(model: torch.nn.Module, config: Any, mesh: Any) -> Any:
    """States of all parameters sharded over the expert-data-parallel ranks; dense gradients summed over their peers."""
    from deepspeed.runtime.config import DeepSpeedConfig

    import deepspeed_ext
    from megatron.optimus.training.engine import deepspeed_config, param_groups

    peers = mesh.group("ep")

    class Optimizer(deepspeed_ext.EPZeroOptimizer):
        def finish_reduction(self) -> None:
            super().finish_reduction()
            dense = [flat_buffer for flat_buffer in self.flat_buffers if flat_buffer.key.expert_group is None]
            for flat_buffer in dense:
                flat_buffer.in_norm = mesh.index("ep") == 0
            buckets = [bucket for flat_buffer in dense for bucket in flat_buffer.buckets]
            for work in [dist.all_reduce(b.shard.grad, group=peers, async_op=True) for b in buckets]:
                work.wait()

    class Engine(deepspeed_ext.EPEngine):
        def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
            options = replace(self.zero_options, average=False)
            built = Optimizer(optimizer, self.param_names, groups=groups, options=options, module=self.module)
            built._state._divisor = dist.get_world_size()
            return built

    replicas = mesh.group("edp")
    names = {str(p.group_name) for p in model.parameters() if hasattr(p, "group_name")}
    # Without replicas there is one rank to shard over; None is that rank, and for the norm all ranks.
    groups = deepspeed_ext.ZeroGroups(dense=replicas, expert=dict.fromkeys(names, replicas))
    ds_config = deepspeed_config(config, 1)
    ds_config["deepspeed_ext"] = {}
    return Engine(
        args=None,
        model=model,
        optimizer=torch.optim.AdamW(param_groups(model, config.optimizer)),
        config=ds_config,
        config_class=DeepSpeedConfig(ds_config),
        zero_groups=groups,
        zero_options=deepspeed_ext.ds_config.zero_options(ds_config),
    )


def build_stock(stage: int, model: torch.nn.Module, config: Any, mesh: Any) -> Any:
    """DeepSpeed's own ZeRO, overlap on, experts marked its way where they are spread over ranks."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import groups

    from megatron.optimus.training.engine import param_groups

    experts = [p for p in model.parameters() if hasattr(p, "group_name")]
    spread = mesh.size("ep") > 1

    class Engine(DeepSpeedEngine):
        def _configure_distributed_model(self, *args: Any) -> None:
            super()._configure_distributed_model(*args)
            if spread:  # it looks for its own MoE class only
                self.has_moe_layers = True
                self.num_experts = [config.model.num_experts]
                self.expert_parallel_group = groups._get_expert_parallel_group_dict()
                self.expert_data_parallel_group = groups._get_expert_data_parallel_group_dict()

    if spread:
        groups._create_expert_and_data_parallel(mesh.size("ep"))
    else:
        for param in experts:
            del param.allreduce, param.group_name
    spread_ids = {id(p) for p in experts} if spread else set()
    groups_of: list[dict[str, Any]] = []  # those of ours, experts apart
    for index, group in enumerate(param_groups(model, config.optimizer)):
        dense = [p for p in group["params"] if id(p) not in spread_ids]
        if dense:
            groups_of.append(group | {"params": dense, "name": f"dense {index}"})
        if len(dense) < len(group["params"]):  # one such group: DeepSpeed finds its process group by this name
            params = [p for p in group["params"] if id(p) in spread_ids]
            groups_of.append(group | {"params": params, "moe": True, "name": f"ep_size_{mesh.size('ep')}"})
    optimizer = torch.optim.AdamW(groups_of, fused=True)
    ds_config = {
        "train_micro_batch_size_per_gpu": config.training.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.clip_grad,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_scatter": True},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": config.training.params_dtype.value == "bf16"},
        "timers": {"throughput": {"enabled": False}},
        "steps_per_print": 1_000_000_000,
    }
    if next(model.parameters()).device.type == "cpu":
        ds_config["zero_optimization"]["reduce_bucket_size"] = 1_000_000
    return Engine(
        args=None, model=model, optimizer=optimizer, config=ds_config, config_class=DeepSpeedConfig(ds_config)
    )


def first_step_differs(results: list[dict[str, Any]], dtype: str) -> list[str]:
    """A line if loss or gradient norm of the last result's first step differ from the first result's by more than one
    rounding of ``dtype`` ("bf16" or "fp32"), or 1e-5, by which sums in another order may differ."""
    if len(results) < 2 or results[-1]["system"] == "nudged":
        return []
    first, last, lines = results[0], results[-1], []
    tolerance = max(torch.finfo({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]).eps, 1e-5)
    for key in ("first_loss", "first_grad_norm"):
        a, b = first.get(key), last.get(key)
        if a is not None and b is not None and not abs(a - b) <= tolerance * abs(a):
            lines.append(f"{key} of {last['system']} is {b}, of {first['system']} {a}: more apart than {tolerance:.1g}")
    return lines
