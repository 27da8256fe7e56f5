"""A peer's training loop for time_to_loss.py: the project's samples and schedule, everything else the peer's.

    python benchmarks/time_to_loss_peers.py SYSTEM FOLDER SECONDS -- OPTIONS...

OPTIONS are the training program's. FOLDER gets metrics.jsonl, with the fields that time_to_loss.py reads, and
about.json. SECONDS of training end the run early; 0: never.

transformers   Qwen3ForCausalLM or Qwen3MoeForCausalLM as a plain loop has it: fp32 weights under bf16 autocast, SDPA,
               experts by grouped_mm, its auxiliary loss, torch's fused AdamW.
nanochat       the same loop with its optimizers: torch.optim.Muon for matrices of layers (rate 0.02, momentum 0.95,
               no weight decay), AdamW for embedding (0.2) and head (0.004), both by 1/sqrt(hidden size / 768); no
               warm-up, constant, then linear to 0 over the last 40%. The given rate scales all of these: 1 is theirs.
torchtitan     training_step_peers.py's model, under FSDP2 and compiled as it recommends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from layout_speed_programs import run_config
from training_step_peers import torchtitan_parts

from megatron.optimus.config.checks import check
from megatron.optimus.context import RunContext
from megatron.optimus.layers import NO_LABEL
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.training.data import VALIDATION, build_data
from megatron.optimus.training.lr_schedule import RateSchedule

Losses = tuple[Tensor, Tensor]  # what is minimised, and the cross-entropy alone: means over labels


@dataclass
class Peer:
    """A model that trains."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Losses]  # of tokens and labels
    optimizers: list[torch.optim.Optimizer]
    clip: Callable[[], Tensor]  # clips the gradients' norm and returns it
    about: dict[str, Any]
    autocast: bool = True
    set_rates: Callable[[float, float], None] | None = None  # (the schedule's rate, progress); default: every group


def transformers(config: Any, device: torch.device) -> Peer:
    import transformers as library

    model = config.model
    common = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": config.training.seq_length,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    if model.is_moe:
        experts = {
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.moe_router_topk,
            "moe_intermediate_size": model.moe_ffn_hidden_size,
            "norm_topk_prob": model.moe_router_norm_topk_prob,
            "router_aux_loss_coef": model.moe_aux_loss_coeff,
            "output_router_logits": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "experts_implementation": "grouped_mm" if device.type == "cuda" else "eager",
        }
        built: Any = library.Qwen3MoeForCausalLM(library.Qwen3MoeConfig(**common, **experts))
    else:
        built = library.Qwen3ForCausalLM(library.Qwen3Config(**common, intermediate_size=model.ffn_hidden_size))
    built.to(device).train()

    def loss(tokens_BS: Tensor, labels_BS: Tensor) -> Losses:
        out = built(input_ids=tokens_BS)
        logits, labels = out.logits.flatten(0, 1).float(), labels_BS.flatten()
        found = nn.functional.cross_entropy(logits, labels, ignore_index=NO_LABEL)
        return found + (model.moe_aux_loss_coeff * out.aux_loss if model.is_moe else 0.0), found

    options = config.optimizer
    decayed = [param for param in built.parameters() if param.ndim > 1]
    others = [param for param in built.parameters() if param.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(options.adam_beta1, options.adam_beta2),
        fused=device.type == "cuda",
    )
    params = list(built.parameters())
    about = {"system_version": f"transformers {library.__version__}, torch {torch.__version__}"}
    return Peer(built, loss, [optimizer], lambda: nn.utils.clip_grad_norm_(params, options.clip_grad), about)


def nanochat(config: Any, device: torch.device) -> Peer:
    if config.model.is_moe:
        raise SystemExit("nanochat's recipe has no experts: torch.optim.Muon takes matrices, not stacks of them")
    peer = transformers(config, device)
    named = dict(peer.model.named_parameters())
    scale = (config.model.hidden_size / 768) ** -0.5
    head = [param for name, param in named.items() if "lm_head" in name]
    embedding = [param for name, param in named.items() if "embed_tokens" in name]
    norms = [param for param in named.values() if param.ndim < 2]
    matrices = [p for name, p in named.items() if p.ndim == 2 and "lm_head" not in name and "embed" not in name]
    adam = torch.optim.AdamW(
        [
            {"params": embedding, "base": 0.2 * scale},
            {"params": head, "base": 0.004 * scale},
            {"params": norms, "base": 0.004 * scale},
        ],
        betas=(0.8, 0.95),
        eps=1e-10,
        weight_decay=0.0,
        fused=device.type == "cuda",
    )
    muon = torch.optim.Muon([{"params": matrices, "base": 0.02}], momentum=0.95, weight_decay=0.0)
    adam.param_groups[:] = [group for group in adam.param_groups if group["params"]]
    peer.optimizers = [adam, muon]

    def set_rates(rate: float, progress: float) -> None:
        left = min(1.0, (1.0 - progress) / 0.4)
        for group in (*adam.param_groups, *muon.param_groups):
            group["lr"] = config.optimizer.lr * group["base"] * left

    peer.set_rates = set_rates
    return peer


def torchtitan(config: Any, device: torch.device) -> Peer:
    parts = torchtitan_parts(config, device, compiled=device.type == "cuda")

    def loss(tokens_BS: Tensor, labels_BS: Tensor) -> Losses:
        found = parts.loss_fn(parts.model(tokens_BS), labels_BS) / labels_BS.numel()
        return found, found

    return Peer(parts.model, loss, list(parts.optimizers), parts.clip, parts.about, autocast=False)


PEERS = {"transformers": transformers, "nanochat": nanochat, "torchtitan": torchtitan}


def train(system: str, folder: Path, seconds: float, options: list[str]) -> None:
    device = torch.device(options[options.index("--device") + 1])
    config = run_config(options, device)
    check(config, 1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = RunContext.of(config, Mesh(config.parallel, rank=0, world_size=1), device)
    data, rates = build_data(run), RateSchedule(config.optimizer, config.training)
    torch.manual_seed(config.training.seed)
    torch.set_float32_matmul_precision("high")
    peer = PEERS[system](config, device)
    count = sum(param.numel() for param in peer.model.parameters())
    (folder / "about.json").write_text(json.dumps(peer.about | {"num_parameters": count}))
    steps, size = config.training.train_iters, config.training.global_batch_size
    data.train.start(0, steps, set())
    trained = 0.0  # seconds
    with (folder / "metrics.jsonl").open("w", buffering=1) as out:
        for step in range(steps):
            began = time.perf_counter()
            batches = [batch.to(device) for batch in data.train.batch(step * size)]
            rate = rates.learning_rate(step, step * size)
            if peer.set_rates is not None:
                peer.set_rates(rate, step / steps)
            else:
                for optimizer in peer.optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = rate
            total = torch.zeros((), device=device)
            for batch in batches:
                objective, loss = _losses(peer, batch, device)
                (objective / len(batches)).backward()
                total += loss.detach() / len(batches)
            peer.clip()
            for optimizer in peer.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            line = {"step": step + 1, "consumed_tokens": (step + 1) * size * config.training.seq_length}
            line["loss"] = float(total)
            line["step_time_s"] = time.perf_counter() - began
            trained += line["step_time_s"] if step else 0.0
            ends = step + 1 == steps or (0 < seconds <= trained)
            if ends or (step + 1) % config.training.eval_interval == 0:
                line["valid_loss"] = evaluate(peer, data.valid[VALIDATION], size, device)
            out.write(json.dumps(line) + "\n")
            if (step + 1) % config.logging.log_interval == 0:
                print(f"{system}: step {step + 1}, loss {line['loss']:.4f}, {line['step_time_s']:.3f} s", flush=True)
            if ends:
                break
    dist.destroy_process_group()


def _losses(peer: Peer, batch: Any, device: torch.device) -> Losses:
    with torch.autocast(device.type, torch.bfloat16) if peer.autocast else contextlib.nullcontext():
        return peer.loss(batch.tokens_BS, batch.labels_BS)


@torch.no_grad()
def evaluate(peer: Peer, loader: Any, size: int, device: torch.device) -> float:
    """Mean loss over the held-out batches."""
    peer.model.eval()
    losses = []
    for number in range(loader.num_batches):
        losses += [float(_losses(peer, one.to(device), device)[1]) for one in loader.batch(number * size)]
    peer.model.train()
    return sum(losses) / len(losses)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=PEERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("options", nargs="+")
    args = parser.parse_args()
    train(args.system, args.folder, args.seconds, args.options)
