"""Hugging Face's tensors of each of ours: they cover it once, in order."""

import math

import pytest
import torch

from megatron.optimus.models.huggingface.names import to_hf
from megatron.optimus.models.parameters import parameter_shapes
from tests.unit.models.huggingface.cases import EXPRESSIBLE, GRANITE, MOE, WITH_DENSE_LAYERS


@pytest.mark.parametrize("config", [*EXPRESSIBLE.values(), *WITH_DENSE_LAYERS])
def test_parts_cover_each_tensor_once_in_order(config):
    names = []
    for name, shape in parameter_shapes(config).items():
        position = 0
        for part in to_hf(config, name):
            assert part.start == position
            position = part.stop
            names.append(part.name)
        assert position == math.prod(shape)
    twice = {name for name in names if names.count(name) > 1}  # gate and up projection of Granite's shared experts
    assert all(names.count(name) == 2 and name.endswith("shared_mlp.input_linear.weight") for name in twice)
    assert len(twice) == (config.num_layers if config is GRANITE else 0)


def test_expert_parts_are_the_right_rows():
    weight_E2FD = torch.arange(4 * 24 * 16).view(4, 24, 16)
    down_EDF = torch.arange(4 * 16 * 12).view(4, 16, 12)
    expected = {}
    for expert in range(4):
        prefix = f"model.layers.1.mlp.experts.{expert}."
        expected[prefix + "gate_proj.weight"] = weight_E2FD[expert, :12]
        expected[prefix + "up_proj.weight"] = weight_E2FD[expert, 12:]
        expected[prefix + "down_proj.weight"] = down_EDF[expert]
    found = {}
    for name, tensor in (("gate_up_weight", weight_E2FD), ("down_weight", down_EDF)):
        for part in to_hf(MOE, f"layers.1.moe.experts.{name}"):
            found[part.name] = tensor.flatten()[part.start : part.stop].view(part.shape)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_unknown_names():
    with pytest.raises(KeyError):
        to_hf(MOE, "layers.2.attention.q_proj.weight")
