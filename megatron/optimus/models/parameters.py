"""Lists the model's parameters, in the order of the model and of the backward, and what a rank holds of each.

Those of a layer are declared in config/family.py, and overridden by a model family. Written without torch, so that the
planner, the converters and ``--dry-run`` can read them on any machine. A test builds the decoder on the meta device and
holds every name, shape and order against it; whoever adds a parameter to a module declares it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.optimus.config.family import ParameterKind, ParameterSpec, layer_parameters, norm_parameters
from megatron.optimus.config.parametrization import UNSCALED, UpdateScaling, update_scaling
from megatron.optimus.config.rank_plan import RankPlan
from megatron.optimus.config.schema import ModelConfig


@dataclass(frozen=True)
class RankParameter:
    """What a rank holds of one parameter."""

    numel: int
    kind: ParameterKind
    is_expert: bool
    is_tp_sharded: bool  # tensor-parallel ranks hold different parts
    is_tied: bool = False  # another pipeline stage has a copy
    num_rows_and_columns: int = 0  # of the matrices that it is; a vector has one column
    scaling: UpdateScaling = UNSCALED  # parameters with another one are in another parameter group


@dataclass(frozen=True)
class ParameterCounts:
    """Elements of the whole model's parameters, tied weights once."""

    total: int
    active: int  # those that one token meets: all but the experts it did not choose
    expert: int  # of routed experts


EMBEDDING, HEAD, FINAL_NORM = "embedding.weight", "lm_head.weight", "final_norm.weight"


def gradient_order(config: ModelConfig, *, is_moe: bool) -> list[str]:
    """Lists a layer's parameters in the order in which the backward gives their gradients.

    It is the reverse of the module's order with three exceptions: the experts' come first, from one autograd node in
    the order of its inputs; the attention's output projection before its norms; its other projections after them.
    """
    specs = layer_parameters(config, is_moe=is_moe)

    def place(name: str) -> int:
        if not name.startswith("attention"):
            return 0
        if name.startswith("attention.o_proj."):
            return 1
        return 4 if name == "attention_norm.weight" else 2 if specs[name].kind is ParameterKind.NORM else 3

    experts = [name for name, spec in specs.items() if spec.is_expert]
    return experts + sorted((name for name in reversed(specs) if name not in experts), key=place)


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


def vocabulary_matrix(config: ModelConfig) -> ParameterSpec:
    """The embedding, and the output projection."""
    return ParameterSpec((config.vocab_size, config.hidden_size), ParameterKind.EMBEDDING, split_dim=0)


def head_parameters(config: ModelConfig) -> dict[str, ParameterSpec]:
    """Those behind the last layer."""
    is_untied = config.untie_embeddings_and_output_weights
    return norm_parameters("final_norm", config) | ({HEAD: vocabulary_matrix(config)} if is_untied else {})


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


def _rows_and_columns(rank: RankPlan, spec: ParameterSpec) -> int:
    layout, sizes = rank.layout, list(spec.shape)
    if spec.split_dim is not None:
        sizes[spec.split_dim] //= layout.etp if spec.is_expert else layout.tp
    if len(sizes) < 3:
        return sum(sizes) + (len(sizes) == 1)
    return sizes[0] // (layout.ep if spec.is_expert else 1) * sum(sizes[1:])


def _cut(rank: RankPlan, specs: Mapping[str, ParameterSpec], tied: tuple[str, ...] = ()) -> dict[str, RankParameter]:
    tp = rank.layout.tp
    return {
        name: RankParameter(
            spec.numel // (rank.expert_ranks if spec.is_expert else tp if spec.split_dim is not None else 1),
            spec.kind,
            spec.is_expert,
            is_tp_sharded=tp > 1 and spec.split_dim is not None,
            is_tied=name in tied,
            num_rows_and_columns=_rows_and_columns(rank, spec),
            scaling=update_scaling(rank.model, rank.config.optimizer, name, spec.shape),
        )
        for name, spec in specs.items()
    }
