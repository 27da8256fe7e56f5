"""The converter to float8: the same weights, nearly the same loss and gradients, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from megatron.optimus.config.checks import check
from megatron.optimus.config.schema import (
    ConfigError,
    Float8,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights
from megatron.optimus.ops import fp8
from megatron.optimus.parallel.converters.fp8 import convert

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96, "ffn_hidden_size": 48}
DENSE = ModelConfig(**SIZES, add_qkv_bias=True)  # type: ignore[arg-type]
MOE = ModelConfig(
    **SIZES,  # type: ignore[arg-type]
    num_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=32,
    moe_shared_expert_intermediate_size=48,
)


def trained(config: ModelConfig, *, converted: bool) -> dict[str, torch.Tensor]:
    """The loss a label and every parameter's gradient, by name."""
    with torch.device("meta"):
        model = Decoder(config)
    if converted:
        convert(model)
    initialize_weights(model, seed=1, device=torch.device("cpu"), dtype=torch.float32)
    tokens = torch.randint(0, config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
    loss = model(tokens[:, :-1], tokens[:, 1:]).loss_sum / 64
    loss.backward()
    return {"loss": loss.detach(), **{name: weight.grad for name, weight in model.named_parameters()}}


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_a_converted_model_is_near_the_model(config: ModelConfig) -> None:
    want, found = trained(config, converted=False), trained(config, converted=True)
    assert found.keys() == want.keys()
    for name, value in want.items():
        error = ((found[name] - value).norm() / value.norm()).item()
        assert 1e-7 < error < 0.25, f"{name}: {error}"  # not equal: the products did pass through float8
    assert abs(found["loss"] - want["loss"]) < 5e-3


def test_widths_that_do_not_fit_name_the_layer() -> None:
    with torch.device("meta"):
        model = Decoder(ModelConfig(**{**SIZES, "ffn_hidden_size": 40}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"multiples of 16; layers\.0\.mlp\.gate_proj is 40 x 64"):
        convert(model)


def test_split_projections_and_other_devices_are_refused() -> None:
    parallel, training = ParallelConfig(tensor_model_parallel_size=2), TrainingConfig(fp8=Float8.HYBRID)
    with pytest.raises(ConfigError, match=r"fp8=hybrid with tensor_model_parallel_size=2.*use 1, or fp8=none"):
        check(RunConfig(model=DENSE, parallel=parallel, training=training), 2)
    with pytest.raises(ConfigError, match=r"fp8=hybrid with zero_stage=3: a rank lacks weights; use zero_stage=1 or 2"):
        check(RunConfig(model=DENSE, optimizer=OptimizerConfig(zero_stage=3), training=training), 2)
    with pytest.raises(ValueError, match=r"needs an NVIDIA GPU of compute capability 8\.9 or newer, this is xpu"):
        fp8.check_device(torch.device("xpu"), torch.bfloat16)
