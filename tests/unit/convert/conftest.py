"""A checkpoint of Optimus that several tests of conversions read."""

import pytest
import torch

from megatron.optimus.checkpoint import save
from megatron.optimus.checkpoint.slices import TensorSlice
from megatron.optimus.config.schema import ModelConfig, RunConfig
from megatron.optimus.config.serialize import to_dict
from megatron.optimus.models.parameters import parameter_shapes


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """A small MoE with masters and moments."""
    config = ModelConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        vocab_size=16,
        num_experts=2,
        moe_ffn_hidden_size=4,
        moe_router_topk=1,
    )
    draw = torch.Generator().manual_seed(1)
    slices = [
        TensorSlice(name, kind, shape, 0, size := int(torch.Size(shape).numel()), torch.rand(size, generator=draw))
        for kind in ("master", "exp_avg", "exp_avg_sq")
        for name, shape in parameter_shapes(config).items()
    ]
    folder = tmp_path_factory.mktemp("ours")
    run = to_dict(RunConfig(model=config))
    save(folder, 1, slices, kind="full", consumed_samples=8, config=run, metadata={})
    return folder
