"""Checkpoints written and read by DeepSpeed itself (its own engine and optimizer, nothing of deepspeed_ext).

Every function runs on each gloo rank of ``tests.helpers.run_distributed``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 64
# A small model with Hugging Face's names; heads of 8, two experts per token.
SHAPE = dict(hidden=16, inner=12, layers=2, heads=2, kv_heads=1, experts=4)


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)  # gate
        self.w2 = nn.Linear(inner, width, bias=False)  # down
        self.w3 = nn.Linear(width, inner, bias=False)  # up

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        head = width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (p(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, ep_size: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        s = SHAPE
        self.input_layernorm = nn.RMSNorm(s["hidden"])
        self.self_attn = Attention(s["hidden"], s["heads"], s["kv_heads"])
        self.post_attention_layernorm = nn.RMSNorm(s["hidden"])
        expert = SwiGLU(s["hidden"], s["inner"])
        # DeepSpeed's native layer: mlp.deepspeed_moe.gate.wg and mlp.deepspeed_moe.experts.deepspeed_experts.<i>
        block = MoE(
            s["hidden"], expert, s["experts"], ep_size=ep_size, k=2, min_capacity=0, drop_tokens=False, use_rts=False
        )
        self.block_sparse_moe = block

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.block_sparse_moe(self.post_attention_layernorm(x))[0]


class MoEModel(nn.Module):
    """Mixtral's names around DeepSpeed's own MoE layer."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, SHAPE["hidden"])
        self.model.layers = nn.ModuleList(Layer(ep_size) for _ in range(SHAPE["layers"]))
        self.model.norm = nn.RMSNorm(SHAPE["hidden"])
        self.lm_head = nn.Linear(SHAPE["hidden"], VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


def engine_for(model: nn.Module, stage: int, precision: str, **config: Any) -> Any:
    """A stock engine around the model; AdamW of torch; MoE groups as DeepSpeed wants them."""
    import deepspeed
    import deepspeed.ops
    from deepspeed.moe.utils import has_moe_layers, split_params_into_different_moe_groups_for_optimizer

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs no compiler
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    groups: Any = [{"params": list(model.parameters()), "name": "all"}]
    if has_moe_layers(model)[0]:
        groups = split_params_into_different_moe_groups_for_optimizer(groups[0])
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5000, "allgather_bucket_size": 5000},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        "wall_clock_breakdown": False,
        **config,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def train(engine: Any, rank: int, steps: int) -> None:
    """A few steps; each rank has its own tokens."""
    torch.manual_seed(100 + rank)
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB, (2, 9))
        out = engine(tokens)
        logits = getattr(out, "logits_BSV", out)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()


def expected_state(engine: Any) -> dict[str, dict[str, Tensor]]:
    """kind -> name -> whole tensor, gathered from the live optimizer; experts are this rank's, by local number.

    Uses the order of the flattened parameters, not the address tables that checkpoints carry.
    """
    import torch.distributed as dist

    optimizer = engine.optimizer
    names = {param: name for name, param in engine.module.named_parameters()}
    state: dict[str, dict[str, Tensor]] = {"weight": {}, "master": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for param, name in names.items():
        state["weight"][name] = param.detach().clone()
    for index, partition in enumerate(optimizer.single_partition_of_fp32_groups):
        group = optimizer.real_dp_process_group[index]
        own = optimizer.optimizer.state[partition]
        for kind, flat in (("master", partition), ("exp_avg", own["exp_avg"]), ("exp_avg_sq", own["exp_avg_sq"])):
            shares = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
            dist.all_gather(shares, flat.detach().contiguous(), group=group)
            whole, at = torch.cat(shares), 0
            for param in optimizer.round_robin_bit16_groups[index]:
                state[kind][names[param]] = whole[at : at + param.numel()].view(param.shape).clone()
                at += param.numel()
    return state


def decoder_model() -> nn.Module:
    from megatron.optimus.models.decoder import Decoder

    return Decoder(decoder_config())


def decoder_config() -> Any:
    from megatron.optimus.config.schema import ModelConfig

    return ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        ffn_hidden_size=20,
        vocab_size=VOCAB,
        qk_layernorm=False,
        num_query_groups=1,
    )


Case = tuple[str, int, int, str]  # "decoder" or "moe", ZeRO stage, expert-parallel size, precision


def write_checkpoints(
    rank: int, world: int, folder: str, cases: dict[str, Case]
) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Trains three steps and saves, for each case in a folder of its name; returns this rank's ``expected_state``s."""
    states = {}
    for name, (what, stage, ep_size, precision) in cases.items():
        model = decoder_model() if what == "decoder" else MoEModel(ep_size)
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                if parameter.dim() > 1:
                    experts = hasattr(parameter, "group_name")  # deep copies of one expert: make them differ
                    torch.manual_seed(1000 * index + (rank % ep_size if experts else 0))
                    parameter.normal_(0.0, 0.1)
        engine = engine_for(model.bfloat16() if precision == "bf16" else model, stage, precision)
        train(engine, rank, 3)
        engine.save_checkpoint(f"{folder}/{name}", tag="global_step3", client_state={"consumed_samples": 6 * world})
        states[name] = expected_state(engine)
    return states


def load_universal(
    rank: int, world: int, folder: str, cases: dict[str, Case]
) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Stock DeepSpeed loads universal checkpoints; the states it then has. Every rank has all experts."""
    states = {}
    for name, (what, stage, _, precision) in cases.items():
        torch.manual_seed(8 + rank)
        model = decoder_model() if what == "decoder" else MoEModel(1)
        model = model.bfloat16() if precision == "bf16" else model
        engine = engine_for(model, stage, precision, checkpoint={"load_universal": True})
        engine.load_checkpoint(f"{folder}/{name}")
        states[name] = expected_state(engine)
        train(engine, rank, 1)  # and training goes on
    return states


def load_module(rank: int, world: int, folder: str, what: str) -> dict[str, Tensor]:
    """Stock DeepSpeed loads a checkpoint of weights alone."""
    torch.manual_seed(8 + rank)
    engine = engine_for(decoder_model() if what == "decoder" else MoEModel(1), 1, "fp32")
    engine.load_checkpoint(folder, load_module_only=True)
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
