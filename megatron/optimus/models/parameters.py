"""Declares the decoder's parameters: name, shape, and how each is decayed, split and reached by the backward.

Written without torch, so that the planner, the converters and ``--dry-run`` can read them on any machine. A test builds
the decoder on the meta device and holds every name, shape and order against it; whoever adds a parameter to a module
declares it here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from megatron.optimus.config.rank_plan import RankPlan
from megatron.optimus.config.schema import ModelConfig, Normalization, QKNormScope


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
        return math.prod(self.shape)


@dataclass(frozen=True)
class RankParameter:
    """What a rank holds of one parameter."""

    numel: int
    kind: ParameterKind
    is_expert: bool
    is_tp_sharded: bool  # tensor-parallel ranks hold different parts
    is_tied: bool = False  # another pipeline stage has a copy


@dataclass(frozen=True)
class ParameterCounts:
    """Elements of the whole model's parameters, tied weights once."""

    total: int
    active: int  # those that one token meets: all but the experts it did not choose
    expert: int  # of routed experts


EMBEDDING, HEAD, FINAL_NORM = "embedding.weight", "lm_head.weight", "final_norm.weight"
# The order in which the backward of a layer gives gradients. The experts' come from one autograd node, in the order of
# its inputs.
GRADIENT_ORDER = (
    "moe.experts.gate_up_weight",
    "moe.experts.down_weight",
    "moe.shared_experts.gate.weight",
    *(f"{mlp}.{name}_proj.weight" for mlp in ("moe.shared_experts.mlp", "mlp") for name in ("down", "up", "gate")),
    "moe.router.weight",
    "mlp_norm.weight",
    "attention.o_proj.weight",
    *(f"attention.{name}_norm.weight" for name in "kq"),
    *(f"attention.{name}_proj.{part}" for name in "vkq" for part in ("bias", "weight")),
    "attention_norm.weight",
)


def parameters(config: ModelConfig) -> dict[str, ParameterSpec]:
    """All parameters of the whole model by name, in the model's order. A tied head has no parameter of its own."""
    found = {EMBEDDING: vocabulary_matrix(config)}
    moe_layers = set(config.moe_layers)
    own = {is_moe: layer_parameters(config, is_moe=is_moe) for is_moe in (False, True)}
    for layer in range(config.num_layers):
        found |= {f"layers.{layer}.{name}": spec for name, spec in own[layer in moe_layers].items()}
    return found | head_parameters(config)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and global shapes of all parameters, in the model's order."""
    return {name: spec.shape for name, spec in parameters(config).items()}


def parameter_spec(config: ModelConfig, name: str) -> ParameterSpec:
    """Finds one parameter of the whole model. Raises KeyError when it has none of that name."""
    if not name.startswith("layers."):
        return ({EMBEDDING: vocabulary_matrix(config)} | head_parameters(config))[name]
    _, layer, in_layer = name.split(".", 2)
    if not layer.isdecimal() or str(int(layer)) != layer or int(layer) >= config.num_layers:
        raise KeyError(name)
    return layer_parameters(config, is_moe=int(layer) in config.moe_layers)[in_layer]


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Counts the elements of the whole model's parameters: all, those active for one token, those of experts.

    Tied weights count once. ``active`` is ``total`` less the experts that a token does not choose.
    """
    specs = parameters(config).values()
    total = sum(spec.numel for spec in specs)
    expert = sum(spec.numel for spec in specs if spec.is_expert)
    idle_share = 1 - config.moe_router_topk / config.num_experts if config.is_moe else 0.0
    return ParameterCounts(total, total - round(expert * idle_share), expert)


def layer_parameters(config: ModelConfig, *, is_moe: bool) -> dict[str, ParameterSpec]:
    """Those of a layer, with experts or dense, by their names in it and in the model's order."""
    width, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_kv_heads * head_dim
    found = _norm("attention_norm", config)
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        found[f"attention.{name}_proj.weight"] = ParameterSpec((rows, width), split_dim=0)
        if config.add_qkv_bias:
            found[f"attention.{name}_proj.bias"] = ParameterSpec((rows,), ParameterKind.BIAS, split_dim=0)
    found["attention.o_proj.weight"] = ParameterSpec((width, queries), split_dim=1)
    if config.qk_layernorm:
        per_head = config.qk_layernorm_scope is QKNormScope.HEAD
        for name, rows in (("q", queries), ("k", keys)):
            scale = ParameterSpec((head_dim,), ParameterKind.NORM)  # of every head
            whole = ParameterSpec((rows,), ParameterKind.NORM, split_dim=0)
            found[f"attention.{name}_norm.weight"] = scale if per_head else whole
    found |= _norm("mlp_norm", config)
    if not is_moe:
        return found | _mlp("mlp", width, config.ffn_hidden_size)
    experts, inner = config.num_experts, config.moe_ffn_hidden_size
    found["moe.router.weight"] = ParameterSpec((experts, width))
    found["moe.experts.gate_up_weight"] = ParameterSpec((experts, 2 * inner, width), split_dim=1, is_expert=True)
    found["moe.experts.down_weight"] = ParameterSpec((experts, width, inner), split_dim=2, is_expert=True)
    if config.moe_shared_expert_intermediate_size:
        found |= _mlp("moe.shared_experts.mlp", width, config.moe_shared_expert_intermediate_size)
        if config.moe_shared_expert_gate:
            found["moe.shared_experts.gate.weight"] = ParameterSpec((1, width))
    return found


def vocabulary_matrix(config: ModelConfig) -> ParameterSpec:
    """The embedding, and the output projection."""
    return ParameterSpec((config.vocab_size, config.hidden_size), ParameterKind.EMBEDDING, split_dim=0)


def head_parameters(config: ModelConfig) -> dict[str, ParameterSpec]:
    """Those behind the last layer."""
    is_untied = config.untie_embeddings_and_output_weights
    return _norm("final_norm", config) | ({HEAD: vocabulary_matrix(config)} if is_untied else {})


def _norm(name: str, config: ModelConfig) -> dict[str, ParameterSpec]:
    has_scale = config.normalization is Normalization.RMSNORM
    return {f"{name}.weight": ParameterSpec((config.hidden_size,), ParameterKind.NORM)} if has_scale else {}


def _mlp(prefix: str, width: int, inner: int) -> dict[str, ParameterSpec]:
    return {
        f"{prefix}.gate_proj.weight": ParameterSpec((inner, width), split_dim=0),
        f"{prefix}.up_proj.weight": ParameterSpec((inner, width), split_dim=0),
        f"{prefix}.down_proj.weight": ParameterSpec((width, inner), split_dim=1),
    }


# ---- what one rank holds of them


def rank_parameters(rank: RankPlan) -> Counter[RankParameter]:
    """Counts the parameters of a rank that are alike."""
    found: Counter[RankParameter] = Counter()
    for is_moe, layers in ((True, rank.num_moe_layers), (False, rank.num_dense_layers)):
        if layers:
            for one in parameters_of_layer(rank, is_moe=is_moe).values():
                found[one] += layers
    return found + Counter(embedding_and_head_parameters(rank).values())


def num_parameters(rank: RankPlan) -> int:
    """Elements of a rank's parameters."""
    return sum(one.numel * count for one, count in rank_parameters(rank).items())


def parameters_of_layer(rank: RankPlan, *, is_moe: bool) -> dict[str, RankParameter]:
    """A rank's parts of one layer's parameters, by their names in it and in the model's order."""
    return _cut(rank, layer_parameters(rank.model, is_moe=is_moe))


def embedding_and_head_parameters(rank: RankPlan) -> dict[str, RankParameter]:
    """A rank's parts of the parameters outside of layers, in the model's order.

    A tied matrix has the embedding's name, on the last pipeline stage too.
    """
    is_tied = not rank.model.untie_embeddings_and_output_weights
    is_tied_across_stages = is_tied and rank.has_embedding != rank.has_head  # another stage has the other copy
    specs = {EMBEDDING: vocabulary_matrix(rank.model)} if rank.has_embedding or is_tied_across_stages else {}
    specs |= head_parameters(rank.model) if rank.has_head else {}
    return _cut(rank, specs, tied=(EMBEDDING, HEAD) if is_tied_across_stages else ())


def _cut(rank: RankPlan, specs: Mapping[str, ParameterSpec], tied: tuple[str, ...] = ()) -> dict[str, RankParameter]:
    tp = rank.layout.tp
    return {
        name: RankParameter(
            spec.numel // (rank.expert_ranks if spec.is_expert else tp if spec.split_dim is not None else 1),
            spec.kind,
            spec.is_expert,
            is_tp_sharded=tp > 1 and spec.split_dim is not None,
            is_tied=name in tied,
        )
        for name, spec in specs.items()
    }
