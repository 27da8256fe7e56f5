"""Initial weights depend on seed and name, not on the layout of ranks."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import torch

from megatron.optimus.config.schema import ExpertPlacement, ModelConfig
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights
from megatron.optimus.moe.dispatch.ownership import Ownership

CONFIG = ModelConfig(
    num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=40, num_experts=4, moe_ffn_hidden_size=8,
    moe_router_topk=2,
)  # fmt: skip


def build(seed: int = 1, expert_ids: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    with torch.device("meta"):
        model = Decoder(CONFIG)
        if expert_ids is not None:
            for layer in model.moe_layers():
                for name, weight in list(layer.experts.named_parameters()):
                    local = torch.nn.Parameter(weight.detach()[list(expert_ids)].clone())
                    local.expert_ids = expert_ids
                    setattr(layer.experts, name, local)
    initialize_weights(model, seed=seed, device=torch.device("cpu"), dtype=dtype)
    return model


@pytest.mark.parametrize("placement", list(ExpertPlacement))
def test_a_rank_gets_the_slices_of_the_whole_model(placement: ExpertPlacement) -> None:
    whole = dict(build().named_parameters())
    for rank in range(2):
        ids = Ownership.from_placement(4, 2, placement).expert_ids(rank)
        for name, weight in build(expert_ids=ids).named_parameters():
            expected = whole[name][list(ids)] if ".experts." in name else whole[name]
            assert torch.equal(weight, expected), name


def test_the_number_of_threads_changes_no_bit() -> None:
    """Threads finish in any order; each weight has a generator of its own."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = build().state_dict()
        torch.set_num_threads(5)
        together = build().state_dict()
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(together[name], weight) for name, weight in alone.items())


def test_weights_are_those_of_earlier_versions() -> None:
    """A resumed run does not draw, but runs are compared by their seeds over versions."""
    with torch.no_grad():
        digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in build().parameters())).hexdigest()[:16]
    assert digest == "d2c43e3a373b4bab"


def test_statistics_and_seeds() -> None:
    first, second = build(1), build(2)
    assert first.embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(first.embedding.weight, second.embedding.weight)
    experts = first.layers[0].moe.experts.down_weight
    assert not torch.equal(experts[0], experts[1])
    assert torch.equal(first.final_norm.weight, torch.ones(16))
    assert build(1, dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16


def test_biases_are_zero_and_shared_experts_are_drawn() -> None:
    changes = dict(add_qkv_bias=True, moe_shared_expert_intermediate_size=24, moe_shared_expert_gate=True)
    with torch.device("meta"):
        model = Decoder(dataclasses.replace(CONFIG, **changes))
    initialize_weights(model, seed=1, device=torch.device("cpu"), dtype=torch.float32)
    assert not any(model.layers[0].attention.q_proj.bias)
    shared = model.layers[0].moe.shared_experts
    assert shared.mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert not torch.equal(shared.mlp.up_proj.weight, shared.mlp.gate_proj.weight) and shared.gate.weight.all()


def test_tied_weights_stay_tied() -> None:
    with torch.device("meta"):
        model = Decoder(ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=9,
                                    untie_embeddings_and_output_weights=False))  # fmt: skip
    initialize_weights(model, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    assert model.lm_head.weight is model.embedding.weight
