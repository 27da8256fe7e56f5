"""Named starting points: what each model sets away from the defaults of schema.py, section by section.

Sources: the five Mula models and their recipe, arXiv 2604.00785 (Table 1 and training section); olmo-1b, the model
card and configuration of allenai/OLMo-1B-hf (arXiv 2402.00838); olmoe-1b-7b, allenai/OLMoE-1B-7B-0924 (arXiv
2409.02060). Steps are the papers' token counts divided by tokens per step. A preset's parallel layout is the paper's
for 3,072 devices; flags shrink it.
"""

from __future__ import annotations

from typing import Any

Preset = dict[str, dict[str, Any]]

# The paper also sums gradients over ranks in bf16 (grad_reduce_in_bf16); fp32 costs more bytes and loses nothing.
_MULA_RECIPE = {
    "lr": 4e-4,
    "min_lr": 4e-5,
    "lr_warmup_iters": 2500,
    "adam_beta2": 0.99,
    "weight_decay": 0.1,
    "clip_grad": 1.0,
    "clip_grad_after_warmup": True,
}
_MULA_BATCH = {"global_batch_size": 3072, "seq_length": 2048}  # 6,291,456 tokens a step
_4T_TOKENS = {"train_iters": 635_783}
_100B_TOKENS = {"train_iters": 15_895}

_DENSE_1B = {
    "num_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "ffn_hidden_size": 8192,
    "normalization": "layernorm-nonparametric",
    "qk_layernorm": False,
}
_MOE_7B = {
    "num_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_experts": 64,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 1024,
}
_MOE_WIDE = {"hidden_size": 3072, "num_attention_heads": 24, "moe_ffn_hidden_size": 1536}

PRESETS: dict[str, Preset] = {
    "mula-tiny": {
        "model": {
            "num_layers": 4,
            "hidden_size": 192,
            "num_attention_heads": 6,
            "num_experts": 8,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 192,
            "vocab_size": 4096,
            "max_position_embeddings": 256,
        },
        "optimizer": {"lr": 3e-3, "min_lr": 1e-4, "lr_warmup_iters": 40, "adam_beta2": 0.95},
        "training": {
            "train_iters": 300,
            "micro_batch_size": 4,
            "global_batch_size": 16,
            "seq_length": 256,
            "params_dtype": "fp32",
        },
        "logging": {"log_interval": 10},
    },
    "mula-1b": {
        "model": {**_DENSE_1B},
        "optimizer": _MULA_RECIPE,
        "training": {**_MULA_BATCH, **_4T_TOKENS},
    },
    "mula-7b-a1b": {
        "model": {**_MOE_7B},
        "optimizer": _MULA_RECIPE,
        "training": {**_MULA_BATCH, **_4T_TOKENS},
    },
    "mula-20b-a2b": {
        "model": {**_MOE_7B, "num_layers": 32, "num_experts": 96},
        "parallel": {"expert_model_parallel_size": 12},
        "optimizer": _MULA_RECIPE,
        "training": {**_MULA_BATCH, **_100B_TOKENS},
    },
    "mula-100b-a7b": {
        "model": {**_MOE_7B, **_MOE_WIDE, "num_layers": 48, "num_experts": 144},
        "parallel": {
            "expert_model_parallel_size": 12,
            "pipeline_model_parallel_size": 4,
            "recompute_modules": ["moe"],
        },
        "optimizer": _MULA_RECIPE,
        "training": {**_MULA_BATCH, **_100B_TOKENS},
    },
    "mula-220b-a10b": {
        "model": {**_MOE_7B, **_MOE_WIDE, "num_layers": 64, "num_experts": 240},
        "parallel": {
            "expert_model_parallel_size": 12,
            "pipeline_model_parallel_size": 8,
            "recompute_modules": ["moe", "attention", "norm"],
        },
        "optimizer": _MULA_RECIPE,
        "training": {**_MULA_BATCH, **_100B_TOKENS},
    },
    "olmo-1b": {
        "model": {**_DENSE_1B, "untie_embeddings_and_output_weights": False, "max_position_embeddings": 2048},
        "optimizer": {
            "lr": 4e-4,
            "min_lr": 4e-5,
            "lr_decay_style": "linear",
            "lr_warmup_iters": 2000,
            "adam_eps": 1e-5,
        },
        "training": {"train_iters": 738_020, "global_batch_size": 2048, "seq_length": 2048},
    },
    "olmoe-1b-7b": {
        "model": {**_MOE_7B, "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001},
        "optimizer": {"lr": 4e-4, "min_lr": 4e-5, "lr_warmup_iters": 2500},
        "training": {"train_iters": 1_223_803, "global_batch_size": 1024, "seq_length": 4096},
    },
}
