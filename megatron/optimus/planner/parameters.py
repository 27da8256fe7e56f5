"""Parameters of one rank and what the sharded optimizer keeps for them, byte for byte.

The arithmetic of deepspeed_ext/zero/{partition,family,gradients}.py without its objects: parameters that are updated
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
        used = sum(_round_up(numel, ALIGNMENT) * count for numel, count in self.numels)
        return max(unit, _round_up(used, unit))

    @property
    def shard(self) -> int:
        return self.numel // self.group_size

    @property
    def bucket(self) -> int:
        """Elements of a full bucket."""
        unit = self.group_size * ALIGNMENT
        return _round_up(-(-self.numel // -(-self.numel // max(self.bucket_limit, unit))), unit)

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


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def parameters(share: Share) -> Counter[Parameter]:
    """The parameters of a rank: how many of each."""
    model, tp = share.model, share.layout.tp
    numel, is_tied = model.vocab_size // tp * model.hidden_size, not model.untie_embeddings_and_output_weights
    apart = is_tied and share.has_embedding != share.has_head
    vocabulary = Parameter(numel, is_cut=tp > 1, kind="embedding", is_tied=apart)
    found: Counter[Parameter] = Counter()
    for is_moe, layers in ((True, share.num_moe_layers), (False, share.num_dense_layers)):
        found += Counter({one: count * layers for one, count in _layer(share, is_moe=is_moe).items() if layers})
    if share.has_embedding:
        found[vocabulary] += 1
    if share.has_head:
        found += _norms(share, 1)
        if not is_tied or apart:
            found[vocabulary] += 1
    return +found  # without what is there zero times


def _norms(share: Share, count: int) -> Counter[Parameter]:
    has_scale = share.model.normalization is Normalization.RMSNORM
    return Counter({Parameter(share.model.hidden_size, kind="norm"): count * has_scale})


def _layer(share: Share, *, is_moe: bool) -> Counter[Parameter]:
    model, layout = share.model, share.layout
    width, is_cut = model.hidden_size, layout.tp > 1
    queries = model.num_attention_heads * model.head_dim // layout.tp
    keys = model.num_kv_heads * model.head_dim // layout.tp
    found = _norms(share, 2)
    for inner in (queries, keys, keys, queries):
        found[Parameter(inner * width, is_cut=is_cut)] += 1
    for inner in (queries, keys, keys) if model.add_qkv_bias else ():
        found[Parameter(inner, is_cut=is_cut, kind="bias")] += 1
    if model.qk_layernorm:
        per_head = model.qk_layernorm_scope is QKNormScope.HEAD
        for inner in (queries, keys):
            numel = model.head_dim if per_head else inner
            found[Parameter(numel, is_cut=is_cut and not per_head, kind="norm")] += 1
    if not is_moe:
        found[Parameter(model.ffn_hidden_size // layout.tp * width, is_cut=is_cut)] += 3
        return found
    found[Parameter(model.num_experts * width)] += 1  # the router
    if model.moe_shared_expert_intermediate_size:
        found[Parameter(model.moe_shared_expert_intermediate_size // layout.tp * width, is_cut=is_cut)] += 3
        found[Parameter(width)] += int(model.moe_shared_expert_gate)
    matrix = model.num_experts // layout.ep * model.moe_ffn_hidden_size // layout.etp * width
    for stacked in (2, 1):
        found[Parameter(stacked * matrix, is_expert=True, is_cut=is_cut)] += 1
    return found


def num_parameters(share: Share) -> int:
    """Elements of a rank's parameters."""
    return sum(parameter.numel * count for parameter, count in parameters(share).items())


def families(share: Share) -> list[Family]:
    """The flat buffers of a rank, those of experts last."""
    options, layout = share.config.optimizer, share.layout
    decayed = {
        "norm": options.weight_decay_norms,
        "bias": options.weight_decay_biases,
        "embedding": options.weight_decay_embeddings,
        "matrix": True,
    }
    members: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for parameter, count in parameters(share).items():
        is_matrix = options.optimizer is OptimizerName.MUON and parameter.kind == "matrix"
        is_repeated = layout.tp > 1 and not parameter.is_cut
        key = (parameter.is_expert, is_matrix, decayed[parameter.kind], is_repeated, parameter.is_tied)
        members.setdefault(key, []).append((parameter.numel, count))
    limit = options.ddp_bucket_size or DEFAULT_BUCKET
    return [
        Family(is_expert, is_matrix, layout.edp if is_expert else layout.dp * layout.cp, tuple(numels), limit)
        for (is_expert, is_matrix, *_), numels in sorted(members.items(), key=lambda item: item[0][0])
    ]


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


def lent_bytes(share: Share, members: list[Family]) -> int:
    """Stage 2: buffers for gradients that backward has not reduced yet. Nothing is reduced in the first backward, so
    every bucket gets one; later ones reuse them."""
    reduced = [family for family in members if family.group_size > 1]
    if share.config.optimizer.zero_stage != 2 or not reduced:
        return 0
    largest = max(min(family.bucket, family.numel) for family in reduced)
    return sum(family.num_buckets for family in reduced) * largest * gradient_bytes(share)[1]


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
