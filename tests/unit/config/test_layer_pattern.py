"""Which layers have experts, in Megatron's spelling."""

from __future__ import annotations

import pytest

from megatron.optimus.config.layer_pattern import parse_integers
from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ConfigError, ModelConfig
from megatron.optimus.config.serialize import from_dict, to_dict, to_yaml

MODEL = "--num-experts 8 --num-layers 7 --moe-layer-freq"


def moe_layers(*words: str) -> list[int]:
    return list(load([*MODEL.split(), *words]).config.model.moe_layers)


def test_spellings() -> None:
    assert moe_layers("1") == list(range(7))
    assert moe_layers("3") == [0, 3, 6]  # as megatron-core: every third, from the first on
    assert moe_layers("9") == [0]
    assert moe_layers(*"0110110") == [1, 2, 4, 5]
    assert moe_layers("[0]*2+[1]*5") == moe_layers("([0] * 2 + 5 * [1])") == [2, 3, 4, 5, 6]
    assert moe_layers("([1]+[0]*2)*2+[1]") == [0, 3, 6]


def test_a_dense_model_has_none() -> None:
    model = ModelConfig()
    assert model.moe_layers == [] and model.has_dense_layers
    assert not ModelConfig(num_experts=8).has_dense_layers


def test_it_survives_files() -> None:
    run = load([*MODEL.split(), "[0]*2+[1]*5"]).config
    assert from_dict(to_dict(run)) == run
    assert "moe_layer_freq:\n  - 0\n  - 0\n  - 1\n" in to_yaml(run)


@pytest.mark.parametrize(
    "text", ["[1", "[1]*[1]", "[[1]]", "[1.0]", "[True]", "[1]-[1]", "[x]", "f([1])", "[1]*10**9", "[1]*99999999999"]
)
def test_what_is_no_list_of_whole_numbers(text: str) -> None:
    assert parse_integers(text) is None
    with pytest.raises(ConfigError, match=r"--moe-layer-freq=.*expected a list of an integer"):
        moe_layers(text)
