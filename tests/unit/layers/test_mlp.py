"""The SwiGLU MLP against its definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.optimus.layers.mlp import MLP, project_in


def test_equals_its_definition() -> None:
    mlp, x = MLP(6, 10), torch.randn(2, 3, 6)
    expected = (F.silu(x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(x), expected)


def test_projections_wait_for_their_weights_and_keep_hooks() -> None:
    """The weights are used without calling the layers, but what runs before a call runs, and hooks after one too."""
    mlp, x, seen = MLP(6, 10), torch.randn(2, 6), []
    layers = mlp.gate_proj, mlp.up_proj

    def arrive(layer: torch.nn.Module, args: object) -> None:  # as the optimizer's wait for new weights
        seen.append(layer)
        with torch.no_grad():
            layer.weight.fill_(len(seen))  # type: ignore[operator, union-attr]

    waits = [layer.register_forward_pre_hook(arrive) for layer in layers]
    gate, up = project_in(x, layers)
    assert seen == list(layers)
    torch.testing.assert_close(2 * gate, up)
    for wait in waits:
        wait.remove()
    doubles = mlp.gate_proj.register_forward_pre_hook(lambda layer, args: (2 * args[0],))
    with pytest.raises(RuntimeError, match="one of 2 projections of the same input returned another input"):
        project_in(x, layers)
    doubles.remove()
    mlp.up_proj.register_forward_hook(lambda layer, args, output: output + 1)
    torch.testing.assert_close(project_in(x, layers)[1], up + 1)
