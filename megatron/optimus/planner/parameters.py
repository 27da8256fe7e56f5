"""Parameters of one rank and what the sharded optimizer keeps for them, byte for byte.

The arithmetic of deepspeed_ext/zero/{partition,flat_buffer}.py without its objects: parameters that are updated
alike form a family, each starts at a multiple of ALIGNMENT elements, a family is padded to a multiple of its group.
A test holds both against each other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from megatron.optimus.config.schema import Normalization, OptimizerName, PipelineSchedule, QKNormScope, StateDtype
from megatron.optimus.planner.share import Share

ALIGNMENT = 256  # elements
DEFAULT_BUCKET = 1 << 26  # elements
STATE_BLOCK = 256  # elements of an 8-bit state that share a scale


@dataclass(frozen=True)
class Parameter:
    """One tensor of a rank."""

    numel: int
    is_expert: bool = False
    is_cut: bool = False  # tensor-parallel ranks hold different parts
    kind: str = "matrix"  # or "norm", "bias", "embedding"
    is_tied: bool = False  # another pipeline stage has a copy


@dataclass(frozen=True)
class Family:
    """Parameters in one flat buffer, sharded over ``group_size`` ranks."""

    is_expert: bool
    is_matrix: bool  # Muon orthogonalises it
    group_size: int
    numels: tuple[tuple[int, int], ...]  # (elements, how many such parameters)
    bucket_limit: int

    @cached_property
    def numel(self) -> int:
        """Length of the flat buffer."""
        unit = self.group_size * ALIGNMENT
        used = sum(round_up(numel, ALIGNMENT) * count for numel, count in self.numels)
        return max(unit, round_up(used, unit))

    @property
    def shard(self) -> int:
        return self.numel // self.group_size

    @property
    def bucket(self) -> int:
        """Elements of a full bucket."""
        unit = self.group_size * ALIGNMENT
        return round_up(-(-self.numel // -(-self.numel // max(self.bucket_limit, unit))), unit)

    @property
    def num_buckets(self) -> int:
        return -(-self.numel // self.bucket)


@dataclass(frozen=True)
class StateBytes:
    """What stays on a rank from the start to the end of training."""

    parameters: int
    gradients: int
    masters: int
    states: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.masters + self.states


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def parameters(share: Share) -> Counter[Parameter]:
    """The parameters of a rank: how many of each."""
    found: Counter[Parameter] = Counter()
    for is_moe, layers in ((True, share.num_moe_layers), (False, share.num_dense_layers)):
        if layers:
            kinds = Counter(layer_parameters(share, is_moe=is_moe).values())
            found += Counter({one: count * layers for one, count in kinds.items()})
    return found + Counter(end_parameters(share).values())


def end_parameters(share: Share) -> dict[str, Parameter]:
    """Those outside of layers by name, in the model's order. A tied matrix is its embedding, on the last stage too."""
    model, tp = share.model, share.layout.tp
    numel, is_tied = model.vocab_size // tp * model.hidden_size, not model.untie_embeddings_and_output_weights
    apart = is_tied and share.has_embedding != share.has_head
    vocabulary = Parameter(numel, is_cut=tp > 1, kind="embedding", is_tied=apart)
    found = {"embedding": vocabulary} if share.has_embedding or apart else {}
    if share.has_head:
        found |= _norm(share, "final_norm") | ({} if is_tied else {"head": vocabulary})
    return found


def _norm(share: Share, name: str) -> dict[str, Parameter]:
    has_scale = share.model.normalization is Normalization.RMSNORM
    return {name: Parameter(share.model.hidden_size, kind="norm")} if has_scale else {}


def layer_parameters(share: Share, *, is_moe: bool) -> dict[str, Parameter]:
    """Those of one layer by name, in the model's order."""
    model, layout = share.model, share.layout
    width, is_cut = model.hidden_size, layout.tp > 1
    queries = model.num_attention_heads * model.head_dim // layout.tp
    keys = model.num_kv_heads * model.head_dim // layout.tp
    found = _norm(share, "attention_norm")
    for name, inner in (("q", queries), ("k", keys), ("v", keys), ("o", queries)):
        found[name] = Parameter(inner * width, is_cut=is_cut)
        if model.add_qkv_bias and name != "o":
            found[f"{name}_bias"] = Parameter(inner, is_cut=is_cut, kind="bias")
    if model.qk_layernorm:
        per_head = model.qk_layernorm_scope is QKNormScope.HEAD
        for name, inner in (("q_norm", queries), ("k_norm", keys)):
            numel = model.head_dim if per_head else inner
            found[name] = Parameter(numel, is_cut=is_cut and not per_head, kind="norm")
    found |= _norm(share, "mlp_norm")
    if not is_moe:
        return found | _mlp(model.ffn_hidden_size // layout.tp * width, is_cut=is_cut)
    found["router"] = Parameter(model.num_experts * width)
    matrix = model.num_experts // layout.ep * model.moe_ffn_hidden_size // layout.etp * width
    for name, stacked in (("experts_gate_up", 2), ("experts_down", 1)):
        found[name] = Parameter(stacked * matrix, is_expert=True, is_cut=is_cut)
    if model.moe_shared_expert_intermediate_size:
        found |= _mlp(model.moe_shared_expert_intermediate_size // layout.tp * width, is_cut=is_cut)
        if model.moe_shared_expert_gate:
            found["shared_gate"] = Parameter(width)
    return found


def _mlp(numel: int, *, is_cut: bool) -> dict[str, Parameter]:
    """Of a dense layer, or of shared experts."""
    return dict.fromkeys(("gate", "up", "down"), Parameter(numel, is_cut=is_cut))


def num_parameters(share: Share) -> int:
    """Elements of a rank's parameters."""
    return sum(parameter.numel * count for parameter, count in parameters(share).items())


FamilyKey = tuple[bool, ...]


def family_key(share: Share, parameter: Parameter) -> FamilyKey:
    """What the parameters of one flat buffer have in common."""
    options = share.config.optimizer
    decayed = {
        "norm": options.weight_decay_norms,
        "bias": options.weight_decay_biases,
        "embedding": options.weight_decay_embeddings,
        "matrix": True,
    }
    is_matrix = options.optimizer is OptimizerName.MUON and parameter.kind == "matrix"
    is_repeated = share.layout.tp > 1 and not parameter.is_cut
    return (parameter.is_expert, is_matrix, decayed[parameter.kind], is_repeated, parameter.is_tied)


def families_by_key(share: Share) -> dict[FamilyKey, Family]:
    """The flat buffers of a rank, those of experts last."""
    layout = share.layout
    members: dict[FamilyKey, list[tuple[int, int]]] = {}
    for parameter, count in parameters(share).items():
        members.setdefault(family_key(share, parameter), []).append((parameter.numel, count))
    limit = share.config.optimizer.ddp_bucket_size or DEFAULT_BUCKET
    return {
        key: Family(key[0], key[1], layout.edp if key[0] else layout.dp * layout.cp, tuple(numels), limit)
        for key, numels in sorted(members.items(), key=lambda item: item[0][0])
    }


def families(share: Share) -> list[Family]:
    return list(families_by_key(share).values())


def adds_expert_gradients(share: Share) -> bool:
    """Whether the backward adds experts' gradients where they are kept, so that they never exist apart
    (ops/main_grads.py): whole gradients are kept, and a backward is in one piece."""
    parallel = share.config.parallel
    splits = (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV)
    is_whole = share.config.optimizer.zero_stage == 1 or share.layout.edp == 1
    return is_whole and not (share.layout.pp > 1 and parallel.pipeline_schedule in splits)


def gradient_bytes(share: Share) -> tuple[int, int]:
    """Bytes of a gradient element: as micro-batches are added up, and on the wire."""
    options = share.config.optimizer
    kept = 4 if options.accumulate_allreduce_grads_in_fp32 else 2
    return kept, 2 if options.grad_reduce_in_bf16 else kept


def state_bytes(share: Share, family: Family) -> StateBytes:
    """Of one family, padding included."""
    kept, sent = gradient_bytes(share)
    shard_width = max(kept, sent)
    is_whole = share.config.optimizer.zero_stage == 1 or family.group_size == 1
    gradients = family.numel * kept if is_whole else 0
    if family.group_size > 1 and (not is_whole or shard_width != kept):
        gradients += family.shard * shard_width
    moments = _moments(share, family) * _moment_bytes(share, family)
    masters = 0 if share.element == 4 else family.shard * 4  # fp32 parameters are their own
    return StateBytes(family.numel * share.element, gradients, masters, moments)


def _moments(share: Share, family: Family) -> int:
    options = share.config.optimizer
    return {
        OptimizerName.ADAM: 2,
        OptimizerName.LION: 1,
        OptimizerName.SGD: int(options.sgd_momentum > 0),
        OptimizerName.MUON: 1 if family.is_matrix else 2,
    }[options.optimizer]


def _moment_bytes(share: Share, family: Family) -> int:
    width = share.config.optimizer.optimizer_state_dtype
    if width is StateDtype.INT8:
        return family.shard + family.shard // STATE_BLOCK * 4
    return family.shard * (4 if width is StateDtype.FP32 else 2)


def decoded_states(share: Share, members: list[Family]) -> int:
    """fp32 copies that a save holds of states kept in fewer bits. The first save is planned before the first step."""
    if share.config.optimizer.optimizer_state_dtype is StateDtype.FP32:
        return 0
    moments = 2 if share.config.optimizer.optimizer is OptimizerName.ADAM else 1
    return sum(moments * 4 * family.shard for family in members)


def sent_copies(share: Share, members: list[Family]) -> int:
    """Copies of gradients in the dtype in which they travel, where that is another: kept until the reduction ends."""
    kept, sent = gradient_bytes(share)
    if kept == sent or share.config.optimizer.zero_stage == 2:
        return 0
    return sum(family.numel * sent for family in members if family.group_size > 1)
