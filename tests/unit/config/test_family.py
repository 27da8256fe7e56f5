"""Model families: how they are found, and what the decoder's costs follow from."""

from __future__ import annotations

import pytest

from megatron.optimus.config.costs import layer_cost
from megatron.optimus.config.family import Family, ParameterSpec, families, family_of
from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ConfigError, ModelConfig

SHAPE = dict(hidden_size=24, num_attention_heads=4, num_query_groups=2, kv_channels=8, ffn_hidden_size=40)
EXPERTS = dict(num_experts=6, moe_router_topk=2, moe_ffn_hidden_size=10)


@pytest.mark.parametrize(
    ("flag", "option"), [("--model-family", "model_family"), ("--model-converters", "model_converters")]
)
def test_an_unknown_name_is_found_when_the_options_are_read(flag: str, option: str) -> None:
    folder = "models/families" if option == "model_family" else "parallel/converters"
    known = "decoder" if option == "model_family" else "apex_norms, fp8"
    with pytest.raises(ConfigError, match=rf"^{option}='fp7' is none of those there are \({known}\); .*{folder}$"):
        load([flag, "fp7"])


def test_every_model_is_a_decoder_unless_it_says_otherwise() -> None:
    family = family_of(ModelConfig())
    assert families() == {"decoder": family} and not family.has_own_parts


def test_a_familys_matrices_count_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wider(Family):
        router = "somewhere:Else"

        def attention_parameters(self, model: ModelConfig) -> dict[str, ParameterSpec]:
            return super().attention_parameters(model) | {"extra.weight": ParameterSpec((5, 7))}

        def router_parameters(self, model: ModelConfig) -> dict[str, ParameterSpec]:
            return {"first.weight": ParameterSpec((3, 24)), "second.weight": ParameterSpec((6, 3))}

        def attention_cost(self, model: ModelConfig, seq_length: int) -> int:
            return 11 * seq_length

    model = ModelConfig(**SHAPE, **EXPERTS)  # type: ignore[arg-type]
    before = layer_cost(model, 100, is_moe=True)
    monkeypatch.setattr("megatron.optimus.config.family._load", lambda name: Wider())
    after = layer_cost(model, 100, is_moe=True)
    assert after == (before.projections + 35, 1100, 0, 3 * 24 + 6 * 3, before.experts)
    assert family_of(model).has_own_parts
