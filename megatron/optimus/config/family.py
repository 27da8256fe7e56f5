"""Model families: what each declares about its parameters and costs, and the registry that finds it by name.

A family is a module of models/families with an object ``FAMILY``; ``--model-family`` names the module. ``Family``
itself describes the decoder of layers/ and moe/; another family is a subclass that overrides what it changes
(docs/extending.md). Everything here is written without torch, so that the planner, the converters and ``--dry-run`` can
read it on any machine; modules are named by their paths and imported by who builds them.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from megatron.optimus.config.schema import ModelConfig, Normalization, QKNormScope
from megatron.optimus.config.values import MODEL_FAMILIES, modules_of


class ParameterKind(Enum):
    """What the optimizer's options (weight decay, Muon) tell apart."""

    MATRIX = "matrix"
    EMBEDDING = "embedding"  # and output projection
    NORM = "norm"
    BIAS = "bias"


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the whole model.

    ``split_dim``: the dim that tensor parallelism splits, of a routed expert the one that expert tensor parallelism
    splits (dim 0, the experts, is split by expert parallelism); None: every rank has all of it.
    """

    shape: tuple[int, ...]
    kind: ParameterKind = ParameterKind.MATRIX
    split_dim: int | None = None
    is_expert: bool = False  # of the routed experts

    @property
    def numel(self) -> int:
        """Number of elements in the whole parameter."""
        return math.prod(self.shape)


Specs = dict[str, ParameterSpec]


class Family:
    """Declares a model family; as it stands, the decoder of layers/ and moe/.

    Attributes:
        attention: "module:class" of a layer's attention, called with the ModelConfig. It has the forward,
            ``project_in``, ``project_out`` and ``core_attention`` of layers/attention.py, and so derives from it.
        router: "module:class" of the router of a layer with experts, likewise of moe/router.py.
        architectures: what Hugging Face calls models of this family, as ``Architecture`` of models/huggingface.
    """

    attention = "megatron.optimus.layers.attention:Attention"
    router = "megatron.optimus.moe.router:Router"
    architectures: Sequence[Any] = ()

    @property
    def has_own_parts(self) -> bool:
        """Whether models of the family compute something else than the decoder."""
        return (self.attention, self.router) != (Family.attention, Family.router)

    def attention_parameters(self, model: ModelConfig) -> Specs:
        """Parameters of the attention by their names in it, in the module's order."""
        width, head_dim = model.hidden_size, model.head_dim
        queries, keys = model.num_attention_heads * head_dim, model.num_kv_heads * head_dim
        found = {}
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            found[f"{name}_proj.weight"] = ParameterSpec((rows, width), split_dim=0)
            if model.add_qkv_bias:
                found[f"{name}_proj.bias"] = ParameterSpec((rows,), ParameterKind.BIAS, split_dim=0)
        found["o_proj.weight"] = ParameterSpec((width, queries), split_dim=1)
        if model.qk_layernorm:
            per_head = model.qk_layernorm_scope is QKNormScope.HEAD
            for name, rows in (("q", queries), ("k", keys)):
                scale = ParameterSpec((head_dim,), ParameterKind.NORM)  # of every head
                whole = ParameterSpec((rows,), ParameterKind.NORM, split_dim=0)
                found[f"{name}_norm.weight"] = scale if per_head else whole
        return found

    def router_parameters(self, model: ModelConfig) -> Specs:
        """Parameters of the router by their names in it, in the module's order; every rank has them whole."""
        return {"weight": ParameterSpec((model.num_experts, model.hidden_size))}

    def attention_cost(self, model: ModelConfig, seq_length: int) -> int:
        """Multiply-adds of a token in the attention besides its projections, which follow from their parameters."""
        return seq_length * model.num_attention_heads * model.head_dim  # QK^T and PV, half of the keys on average

    def attention_kept(self, model: ModelConfig, element: int) -> int:
        """Bytes a token that the attention keeps for the backward besides those of the decoder's attention.

        Tensor parallelism splits them, as it splits heads. ``element``: bytes of an activation.
        """
        return 0


def layer_parameters(model: ModelConfig, *, is_moe: bool) -> Specs:
    """Parameters of a layer, with experts or dense, by their names in the layer and in the model's order."""
    width, family = model.hidden_size, family_of(model)
    found = norm_parameters("attention_norm", model)
    found |= {f"attention.{name}": spec for name, spec in family.attention_parameters(model).items()}
    found |= norm_parameters("mlp_norm", model)
    if not is_moe:
        return found | _mlp("mlp", width, model.ffn_hidden_size)
    experts, inner = model.num_experts, model.moe_ffn_hidden_size
    found |= {f"moe.router.{name}": spec for name, spec in family.router_parameters(model).items()}
    found["moe.experts.gate_up_weight"] = ParameterSpec((experts, 2 * inner, width), split_dim=1, is_expert=True)
    found["moe.experts.down_weight"] = ParameterSpec((experts, width, inner), split_dim=2, is_expert=True)
    if model.moe_shared_expert_intermediate_size:
        found |= _mlp("moe.shared_experts.mlp", width, model.moe_shared_expert_intermediate_size)
        if model.moe_shared_expert_gate:
            found["moe.shared_experts.gate.weight"] = ParameterSpec((1, width))
    return found


def norm_parameters(name: str, model: ModelConfig) -> Specs:
    """Parameters of a norm of the residual stream."""
    has_scale = model.normalization is Normalization.RMSNORM
    return {f"{name}.weight": ParameterSpec((model.hidden_size,), ParameterKind.NORM)} if has_scale else {}


def _mlp(prefix: str, width: int, inner: int) -> Specs:
    return {
        f"{prefix}.gate_proj.weight": ParameterSpec((inner, width), split_dim=0),
        f"{prefix}.up_proj.weight": ParameterSpec((inner, width), split_dim=0),
        f"{prefix}.down_proj.weight": ParameterSpec((width, inner), split_dim=1),
    }


# ---- the registry


def family_of(model: ModelConfig) -> Family:
    """The family that ``model_family`` names; the schema has checked that there is one."""
    return _load(model.model_family)


def families() -> dict[str, Family]:
    """All families by name."""
    return {name: _load(name) for name in modules_of(MODEL_FAMILIES)}


@cache
def _load(name: str) -> Family:
    """Imports a family by name, as converters and trackers are; what it imports of the models needs no torch."""
    family = importlib.import_module(f"megatron.optimus.{MODEL_FAMILIES.replace('/', '.')}.{name}").FAMILY
    assert isinstance(family, Family)
    return family


def build_part(path: str, model: ModelConfig) -> Any:
    """Builds the module that a family names by "module:class"."""
    return pkgutil.resolve_name(path)(model)
