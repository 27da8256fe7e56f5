"""What servers compute otherwise than we train is named, and nothing else."""

import pytest

from megatron.optimus.config.schema import RotaryScaling
from megatron.optimus.models.huggingface.serving import not_honoured

pytest.importorskip("transformers")
from tests.unit.convert.convert_cases import our_config


@pytest.mark.parametrize(
    "model_type, options, words",
    [
        ("qwen3_moe", {"untie_embeddings_and_output_weights": False}, "SGLang does not honour tied embeddings"),
        ("qwen2_moe", {"moe_layer_freq": [0, 1]}, "SGLang does not honour moe_layer_freq: every layer has experts"),
        ("mixtral", {"rotary_scaling": RotaryScaling.LINEAR}, "SGLang does not honour rotary_scaling=linear"),
        ("granitemoeshared", {"rotary_base": 5e5 + 0.5}, "SGLang does not honour rotary_base=500000.5: it is 500000"),
    ],
)
def test_what_servers_do_not_honour_is_named(model_type, options, words):
    assert not_honoured(our_config().model, model_type) == []
    [line] = not_honoured(our_config(**options).model, model_type)
    assert line.startswith(words)


def test_servers_honour_what_is_not_named():
    assert not_honoured(our_config().model, "olmoe") == []
    assert not_honoured(our_config(clip_qkv=1.0).model, "llama") == []
    grouped = our_config(num_query_groups=2, untie_embeddings_and_output_weights=False).model
    assert [line.split(" honour ")[0] for line in not_honoured(grouped, "olmoe")] == [
        "vLLM and SGLang do not",
        "SGLang does not",
    ]
