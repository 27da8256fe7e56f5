"""The FLOP count against independent counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.optimus.config.costs import flops_per_token
from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.training.timing import mfu


@pytest.mark.parametrize(("seq_length", "giga"), [(2048, 7.476), (4096, 7.878)])
def test_olmoe_1b_7b(seq_length: int, giga: float) -> None:
    model = load(["--preset", "olmoe-1b-7b"]).config.model
    assert flops_per_token(model, seq_length) / 1e9 == pytest.approx(giga, abs=5e-4)


def test_matrix_products_of_a_dense_layer_as_torch_counts_them() -> None:
    model = ModelConfig(
        num_layers=3,
        hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        ffn_hidden_size=40,
        vocab_size=50,
    )
    length = 16
    device = torch.device("meta")
    x = torch.empty(length, 24, device=device, requires_grad=True)

    def linear(value: torch.Tensor, out: int) -> torch.Tensor:
        return value @ torch.empty(value.shape[-1], out, device=device, requires_grad=True)

    with FlopCounterMode(display=False) as counter:
        for _ in range(3):
            q, k, v = (linear(x, heads * 8).view(length, heads, 8).transpose(0, 1) for heads in (4, 2, 2))
            k, v = k.repeat_interleave(2, dim=0), v.repeat_interleave(2, dim=0)
            mixed = (q @ k.transpose(1, 2)) @ v
            x = linear(mixed.transpose(0, 1).reshape(length, 32), 24)
            x = linear(linear(x, 40) * linear(x, 40), 24)
        linear(x, 50).sum().backward()
    full_attention = counter.get_total_flops()
    half_of_attention = 6 * 3 * length * 32 * length  # torch counts all keys, we half of them
    assert flops_per_token(model, length) * length == full_attention - half_of_attention


def test_experts_count_by_top_k_and_the_router_by_experts() -> None:
    def flops(**changes: int) -> float:
        shape = {"num_layers": 1, "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 64} | changes
        return flops_per_token(ModelConfig(**shape), 128)  # type: ignore[arg-type]

    assert flops(moe_router_topk=3) - flops() == 6 * 3 * 2048 * 64
    assert flops(num_experts=9) - flops() == 6 * 2048
    assert flops(ffn_hidden_size=1) == flops()
    assert flops(moe_shared_expert_intermediate_size=96) - flops() == 6 * 3 * 2048 * 96
    gated = flops(moe_shared_expert_intermediate_size=96, moe_shared_expert_gate=True)
    assert gated - flops(moe_shared_expert_intermediate_size=96) == 6 * 2048


def test_layers_without_experts_count_as_dense() -> None:
    shape = {"num_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "moe_ffn_hidden_size": 48, "vocab_size": 96}

    def flops(**changes: object) -> float:
        return flops_per_token(ModelConfig(**shape, ffn_hidden_size=80, **changes), 128)  # type: ignore[arg-type]

    mixed = flops(num_experts=8, moe_layer_freq=[0, 0, 1, 1, 1, 1])
    assert mixed == pytest.approx(flops() / 3 + 2 * flops(num_experts=8) / 3, rel=1e-12)


def test_mfu() -> None:
    assert mfu(1000.0, 2e9, 10e12) == pytest.approx(0.2)
    assert mfu(1000.0, 2e9, None) is None
