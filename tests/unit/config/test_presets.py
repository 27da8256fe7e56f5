"""The presets against the published parameter counts, by closed formulas."""

from pathlib import Path

import pytest

from megatron.optimus.config.checks import check, gradient_accumulation_steps
from megatron.optimus.config.load import load
from megatron.optimus.config.presets import PRESETS, read_preset
from megatron.optimus.config.schema import ConfigError, ModelConfig, Normalization


def count(model: ModelConfig, experts: int) -> int:
    """Parameters of the decoder with ``experts`` routed experts a layer (dense: 0)."""
    d, q, kv = (
        model.hidden_size,
        model.num_attention_heads * model.head_dim,
        model.num_kv_heads * model.head_dim,
    )
    norm = d if model.normalization is Normalization.RMSNORM else 0
    layer = 2 * d * q + 2 * d * kv + 2 * norm + (q + kv if model.qk_layernorm else 0)
    if model.is_moe:
        layer += d * model.num_experts + experts * 3 * d * model.moe_ffn_hidden_size
    else:
        layer += 3 * d * model.ffn_hidden_size
    tables = 2 if model.untie_embeddings_and_output_weights else 1
    return tables * model.vocab_size * d + model.num_layers * layer + norm


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [
        ("mula-1b", 1_279_787_008, 1_279_787_008),
        ("mula-7b-a1b", 6_919_161_856, 1_282_017_280),
        ("mula-20b-a2b", 20_076_824_576, 2_360_084_480),
        ("mula-100b-a7b", 99_987_557_376, 7_578_651_648),
        ("mula-220b-a10b", 220_205_681_664, 10_020_719_616),
        ("olmo-1b", 1_176_764_416, 1_176_764_416),
        ("olmoe-1b-7b", 6_919_161_856, 1_282_017_280),
    ],
)
def test_parameter_counts(preset: str, total: int, active: int) -> None:
    model = load(["--preset", preset]).config.model
    assert count(model, model.num_experts) == total
    assert count(model, model.moe_router_topk) == active


@pytest.mark.parametrize(
    ("preset", "ep", "pp", "steps"),
    [
        ("mula-1b", 1, 1, 635_783),
        ("mula-7b-a1b", 1, 1, 635_783),
        ("mula-20b-a2b", 12, 1, 15_895),
        ("mula-100b-a7b", 12, 4, 15_895),
        ("mula-220b-a10b", 12, 8, 15_895),
    ],
)
def test_mula_recipe_and_layout(preset: str, ep: int, pp: int, steps: int) -> None:
    config = load(["--preset", preset]).config
    parallel, optimizer, training = config.parallel, config.optimizer, config.training
    assert (parallel.expert_model_parallel_size, parallel.pipeline_model_parallel_size) == (ep, pp)
    assert (optimizer.lr, optimizer.min_lr, optimizer.lr_warmup_iters) == (4e-4, 4e-5, 2500)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.weight_decay) == (0.9, 0.99, 0.1)
    assert (optimizer.clip_grad, optimizer.clip_grad_after_warmup) == (1.0, True)
    assert (training.global_batch_size, training.seq_length, training.train_iters) == (3072, 2048, steps)
    check(config, 3072)  # the paper's 3,072 tiles
    assert gradient_accumulation_steps(config, 3072) == pp


def test_olmo_and_olmoe_differ_from_mula_where_the_models_do() -> None:
    olmo, olmoe = load(["--preset", "olmo-1b"]).config, load(["--preset", "olmoe-1b-7b"]).config
    assert (olmo.training.seq_length, olmo.model.max_position_embeddings) == (2048, 2048)
    assert not olmo.model.qk_layernorm and not olmo.model.untie_embeddings_and_output_weights
    assert (olmoe.training.seq_length, olmoe.model.moe_z_loss_coeff, olmoe.model.moe_aux_loss_coeff) == (
        4096,
        1e-3,
        1e-2,
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_passes_the_checks_at_its_own_scale(preset: str) -> None:
    config = load(["--preset", preset]).config
    parallel = config.parallel
    check(config, parallel.expert_model_parallel_size * parallel.pipeline_model_parallel_size)


def test_a_preset_overrides_what_it_extends(tmp_path: Path) -> None:
    (tmp_path / "_part.yaml").write_text("model: {num_layers: 2, hidden_size: 8}\ntraining: {seed: 1}\n")
    (tmp_path / "small.yaml").write_text("extends: _part\nmodel: {num_layers: 3}\n")
    (tmp_path / "large.yaml").write_text("extends: small\nmodel: {hidden_size: 16}\noptimizer: {lr: 1.0e-3}\n")
    assert read_preset("large", tmp_path) == {
        "model": {"num_layers": 3, "hidden_size": 16},
        "training": {"seed": 1},
        "optimizer": {"lr": 1e-3},
    }
    assert not [name for name in PRESETS if name.startswith("_")]


def test_presets_that_extend_each_other_or_nothing_there_is(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b\n")
    (tmp_path / "b.yaml").write_text("extends: a\n")
    (tmp_path / "c.yaml").write_text("extends: d\n")
    with pytest.raises(ConfigError, match="preset a: a extends b extends a"):
        read_preset("a", tmp_path)
    with pytest.raises(ConfigError, match=r"d\.yaml: cannot be read"):
        read_preset("c", tmp_path)


def test_mula_tiny_is_a_moe_for_one_or_two_processes() -> None:
    config = load(["--preset", "mula-tiny", "--expert-model-parallel-size", "2"]).config
    assert config.model.is_moe and config.model.qk_layernorm and not config.model.moe_router_norm_topk_prob
    check(config, 2)
    check(load(["--preset", "mula-tiny"]).config, 1)


def test_mula_recomputes_what_the_paper_recomputes() -> None:
    """Levels 1 (experts) and 7 (experts, attention, norms) of its activation checkpointing."""
    configs = {name: load(["--preset", name]).config.parallel for name in PRESETS}
    parts = {name: [part.value for part in config.recompute_modules] for name, config in configs.items()}
    assert parts.pop("mula-100b-a7b") == ["moe"]
    assert parts.pop("mula-220b-a10b") == ["moe", "attention", "norm"]
    assert not any(parts.values())
