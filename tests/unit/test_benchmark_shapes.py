"""Which MoE layers benchmarks/moe_layer.py takes: experts as expert parallelism spreads them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from megatron.optimus.config.presets import PRESETS

_FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "moe_layer_shapes.py"
_SPEC = importlib.util.spec_from_file_location("moe_layer_shapes", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
shapes = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(shapes)


@pytest.mark.parametrize("model", shapes.MODELS)
def test_models_are_those_of_the_presets(model: str) -> None:
    (preset,) = (value["model"] for name, value in PRESETS.items() if name == model or name.startswith(f"{model}-a"))
    names = ("hidden_size", "moe_ffn_hidden_size", "num_experts", "moe_router_topk")
    assert shapes.shape_of(model) == tuple(preset[name] for name in names)


def test_ranks_share_the_experts() -> None:
    assert shapes.shape_of("mula-100b/ep12") == (3072, 1536, 12, 8)
    assert shapes.shape_of("mula-7b/ep1") == shapes.shape_of("mula-7b")
    for name in [*shapes.ON_GPU, *shapes.ON_CPU]:
        shapes.shape_of(name)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mula-8b", "mula-8b is no shape; one of mula-7b"),
        ("mula-7b/ep0", "ep0 is no shape"),
        ("mula-7b/4", "is no shape"),
        ("mula-7b/ep12", r"64 experts over 12 ranks; .* 1, 2, 4, 8$"),  # does not divide
        ("mula-20b/ep24", r"96 experts over 24 ranks; .* 1, 2, 3, 4, 6, 8, 12$"),  # four experts, eight a token
    ],
)
def test_other_names_are_errors_with_the_remedy(name: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        shapes.shape_of(name)
