"""Model converters are applied in their order to the serial model on the meta device, before anything else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.optimus.config.schema import ModelConfig, ParallelConfig, Recompute
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights
from megatron.optimus.parallel import apply
from megatron.optimus.platform.mesh import Mesh

CONFIG = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=32, ffn_hidden_size=24)


class Doubled(nn.Linear):
    """What a converter may put in the place of a projection."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def double_up_projections(model: Decoder) -> None:
    for block in model.layers:
        block.mlp.up_proj.__class__ = Doubled  # type: ignore[union-attr]


def test_converters_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(apply, "apply_tensor_parallelism", lambda *args: order.append("tensor"))
    with torch.device("meta"):
        model = Decoder(CONFIG)

    def note(name: str) -> apply.ModelConverter:
        def convert(given: Decoder) -> None:
            assert given is model and all(parameter.is_meta for parameter in given.parameters())
            order.append(name)

        return convert

    parallel = ParallelConfig()
    mesh = Mesh(parallel, rank=0, world_size=1)
    apply.parallelize(model, mesh, parallel, 8, converters=(note("first"), note("second")))
    assert order == ["first", "second", "tensor"]


def test_a_converted_model_has_the_same_weights_and_is_recomputed() -> None:
    """The gradient of the doubled projection is doubled at the same weights, with and without recomputation."""
    tokens, logits = torch.arange(8)[None], []
    for converters, modules in (((), []), ((double_up_projections,), []), ((double_up_projections,), [Recompute.MOE])):
        parallel = ParallelConfig(recompute_modules=modules)
        with torch.device("meta"):
            model = Decoder(CONFIG)
        apply.parallelize(model, Mesh(parallel, rank=0, world_size=1), parallel, 8, converters=converters)
        initialize_weights(model, seed=1, device=torch.device("cpu"), dtype=torch.float32)
        if not converters:
            for block in model.layers:
                block.mlp.up_proj.weight.data *= 2  # type: ignore[union-attr,operator]
        logits.append(model(tokens).logits_BSV)
    torch.testing.assert_close(logits[1], logits[0])
    assert torch.equal(logits[1], logits[2])
