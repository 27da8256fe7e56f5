"""Megatron's names and layouts of our tensors, for any tensor-, pipeline- and expert-parallel rank.

Three spellings are read: megatron-core's modules ("local" specification), the same with Transformer Engine (norms fused
into the projection after them), and those of Megatron-LM before core, which Megatron-DeepSpeed keeps. Common to all:

* QKV is one matrix; for each key/value head come the rows of its query heads, then its key, then its value.
* SwiGLU is one matrix, gate above up, *per tensor-parallel rank*.
* Column-parallel matrices are cut into rows, row-parallel ones (attention output, second MLP matrix) into columns.
* The vocabulary is padded with zeros to a multiple of ``make_vocab_size_divisible_by`` (128) times the ranks.
* Layers are numbered from zero on every pipeline stage, experts from zero on every expert-parallel rank.
* Norms, router and the shared experts' gate are the same on all ranks.

QK-norm over the full width, which megatron-core's own attention does not have, is stored under q_layernorm and
k_layernorm, cut by heads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.config.family import family_of
from megatron.optimus.config.schema import ModelConfig, Normalization, QKNormScope
from megatron.optimus.convert.tensor_map import ForeignTensor, Submatrix

Rank = tuple[int, int, int]  # tensor-, pipeline-, expert-parallel
EMBEDDINGS = ("embedding.word_embeddings.weight", "language_model.embedding.word_embeddings.weight")
_FINAL_NORMS = ("decoder.final_layernorm.weight", "language_model.encoder.final_layernorm.weight")
_OUTPUTS = ("output_layer.weight", "language_model.output_layer.weight")
_LAYERS = re.compile(r"(decoder|language_model\.encoder)\.layers\.(\d+)\.")
# Per role the name with local modules, with Transformer Engine, and before megatron-core.
_ATTENTION_NORM = ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
_QKV = ("self_attention.linear_qkv.weight", "self_attention.query_key_value.weight")
_QKV_BIAS = ("self_attention.linear_qkv.bias", "self_attention.query_key_value.bias")
_PROJECTION = ("self_attention.linear_proj.weight", "self_attention.dense.weight")
_MLP_NORM = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight")
_FC1 = ("mlp.linear_fc1.weight", "mlp.dense_h_to_4h.weight")
_FC2 = ("mlp.linear_fc2.weight", "mlp.dense_4h_to_h.weight")
_ROUTER = ("mlp.router.weight", "mlp.gate.weight")
_EXPERT_FC1 = (
    "mlp.experts.local_experts.{}.linear_fc1.weight",
    "mlp.experts.linear_fc1.weight{}",
    "mlp.experts.{}.dense_h_to_4h.weight",
)
_EXPERT_FC2 = (
    "mlp.experts.local_experts.{}.linear_fc2.weight",
    "mlp.experts.linear_fc2.weight{}",
    "mlp.experts.{}.dense_4h_to_h.weight",
)
_SHARED = "mlp.shared_experts."
EXPERT_BIAS = "mlp.router.expert_bias"


def key_of(rank: Rank, name: str) -> str:
    """The key of the tensor ``name`` in the file of one rank."""
    return f"{rank[0]}.{rank[1]}.{rank[2]}:{name}"


def padded_vocabulary(model: ModelConfig, tp: int, divisor: int = 128) -> int:
    """Rows of the embedding over all ranks, with the padding that Megatron adds."""
    unit = divisor * tp
    return -(-model.vocab_size // unit) * unit


class _Names:
    """Chooses among spellings of a name: the one that a file has, or the one to write."""

    def __init__(self, present: Collection[str] | None, transformer_engine: bool, grouped: bool) -> None:
        self._present = present
        self._te, self._grouped = transformer_engine, grouped

    def choose(self, spellings: tuple[str, ...], prefix: str = "", *, fused: bool = False, number: int = 0) -> str:
        """``fused``: Transformer Engine spells it differently. ``number``: of an expert on its rank."""
        names = [prefix + spelling.format(number) for spelling in spellings]
        if self._present is None:
            return names[1 if fused else 0]
        return next((name for name in names if name in self._present), names[0])

    def norm(self, spellings: tuple[str, ...], prefix: str, *, fusable: bool) -> str:
        return self.choose(spellings, prefix, fused=self._te and fusable)

    def expert(self, spellings: tuple[str, ...], prefix: str, number: int) -> str:
        return self.choose(spellings, prefix, fused=self._grouped, number=number)


def megatron_tensors(
    model: ModelConfig,
    files: Mapping[Rank, Collection[str] | None],
    *,
    vocabulary: int | None = None,
    transformer_engine: bool = False,
) -> list[ForeignTensor]:
    """Lists all tensors of all ranks. With a single rank their keys are the bare names, else ``key_of``.

    Args:
        model: the whole model.
        files: the ranks, each with the names found in its file; None when it is to be written.
        vocabulary: padded rows of the embedding over all ranks; None: ``vocab_size``.
        transformer_engine: when writing, the names with Transformer Engine rather than those of the local modules.

    Raises:
        CheckpointError: the model cannot be laid out on these ranks, or has parts that Megatron's files cannot hold.
    """
    if family_of(model).has_own_parts:
        raise CheckpointError(
            f"model_family={model.model_family}: Megatron's files hold model_family=decoder only; convert to another "
            "format"
        )
    tp, pp, ep = (max(rank[axis] for rank in files) + 1 for axis in range(3))
    _check_layout(model, tp, ep)
    tensors: list[ForeignTensor] = []
    first = 0
    for stage in range(pp):
        present = files[0, stage, 0]
        count = model.num_layers // pp if present is None else _count_layers(present)
        for rank in (rank for rank in files if rank[1] == stage):
            names = _Names(files[rank], transformer_engine, transformer_engine)
            own = _RankTensors(model, rank, (tp, pp, ep), names, single=len(files) == 1)
            own.ends(vocabulary or model.vocab_size)
            for index in range(count):
                own.layer(first + index, index)
            tensors += own.tensors
        first += count
    if first != model.num_layers:
        raise CheckpointError(f"the files hold {first} layers, the configuration says num_layers={model.num_layers}")
    return tensors


def _count_layers(present: Collection[str]) -> int:
    return len({match[2] for name in present if (match := _LAYERS.match(name))})


def _check_layout(model: ModelConfig, tp: int, ep: int) -> None:
    for value, name, by in (
        (model.num_kv_heads, "num_query_groups", tp),
        (model.moe_ffn_hidden_size if model.is_moe else 0, "moe_ffn_hidden_size", tp),
        (model.ffn_hidden_size if model.has_dense_layers else 0, "ffn_hidden_size", tp),
        (model.moe_shared_expert_intermediate_size, "moe_shared_expert_intermediate_size", tp),
        (model.num_experts, "num_experts", ep),
    ):
        if value % by:
            what = "expert" if name == "num_experts" else "tensor"
            raise CheckpointError(f"{what}-parallel size {by} must divide {name}={value} in Megatron's layout")
    if ep > 1 and not model.is_moe:
        raise CheckpointError(f"expert-parallel size {ep}: the model has no experts")


class _RankTensors:
    """The tensors in one rank's file."""

    def __init__(
        self, model: ModelConfig, rank: Rank, sizes: tuple[int, int, int], names: _Names, *, single: bool
    ) -> None:
        self.tensors: list[ForeignTensor] = []
        self._model, self._rank, self._names, self._single = model, rank, names, single
        self._tp, self._pp, self._ep = sizes
        self._index = rank[0]
        self._has_norm_weights = model.normalization is Normalization.RMSNORM

    def _add(self, name: str, shape: tuple[int, ...], held: list[Submatrix], *, same: bool) -> None:
        """Adds a tensor. ``same``: all tensor-parallel ranks have it, as expert-parallel ones have all but experts."""
        is_expert = ".experts." in name
        copy = (same and self._rank[0] > 0) or (not is_expert and self._rank[2] > 0)
        key = name if self._single else key_of(self._rank, name)
        self.tensors.append(ForeignTensor(key, shape, tuple(held), copy=copy))

    def ends(self, vocabulary: int) -> None:
        """Adds the embedding on the first stage, final norm and output projection on the last."""
        c = self._model
        if self._rank[1] == 0:
            self._vocabulary(self._names.choose(EMBEDDINGS), "embedding.weight", vocabulary, copy=False)
        if self._rank[1] == self._pp - 1:
            if self._has_norm_weights:
                whole = [Submatrix("final_norm.weight", 0, c.hidden_size, 0, 1)]
                self._add(self._names.choose(_FINAL_NORMS), (c.hidden_size,), whole, same=True)
            if c.untie_embeddings_and_output_weights:
                self._vocabulary(self._names.choose(_OUTPUTS), "lm_head.weight", vocabulary, copy=False)
            elif self._pp > 1:  # the last stage has a copy of the tied matrix
                self._vocabulary(self._names.choose(_OUTPUTS), "embedding.weight", vocabulary, copy=True)

    def _vocabulary(self, name: str, ours: str, vocabulary: int, *, copy: bool) -> None:
        if vocabulary % self._tp or vocabulary < self._model.vocab_size:
            raise CheckpointError(
                f"{name}: {vocabulary} rows in all cannot be those of vocab_size={self._model.vocab_size} on "
                f"{self._tp} tensor-parallel ranks"
            )
        rows, width = vocabulary // self._tp, self._model.hidden_size
        start = self._index * rows
        real = max(0, min(rows, self._model.vocab_size - start))
        held = (Submatrix(ours, start, real, 0, width),) if real else ()
        key = name if self._single else key_of(self._rank, name)
        copy = copy or self._rank[2] > 0
        self.tensors.append(ForeignTensor(key, (rows, width), held, padding=rows - real, copy=copy))

    def layer(self, layer: int, index: int) -> None:
        """Adds a layer; ``index`` is its number on this stage."""
        ours = f"layers.{layer}."
        c, names = self._model, self._names
        prefix = f"decoder.layers.{index}."
        legacy = f"language_model.encoder.layers.{index}."
        if names.choose((prefix + _QKV[0], legacy + _QKV[1])).startswith(legacy):
            prefix = legacy
        is_moe = layer in c.moe_layers
        if self._has_norm_weights:
            for spellings, norm, fusable in (
                (_ATTENTION_NORM, "attention_norm", True),
                (_MLP_NORM, "mlp_norm", not is_moe),
            ):
                whole = Submatrix(f"{ours}{norm}.weight", 0, c.hidden_size, 0, 1)
                self._add(names.norm(spellings, prefix, fusable=fusable), (c.hidden_size,), [whole], same=True)
        self._attention(ours + "attention.", prefix)
        if is_moe:
            self._experts(ours + "moe.", prefix)
            if c.moe_shared_expert_intermediate_size:
                self._shared_experts(ours + "moe.shared_experts.", prefix + _SHARED)
            return
        names_of_two = names.choose(_FC1, prefix), names.choose(_FC2, prefix)
        self._mlp(ours + "mlp.", names_of_two, c.ffn_hidden_size)

    def _mlp(self, ours: str, names: tuple[str, str], width: int) -> None:
        """Adds an MLP. ``names``: of gate and up together and of down. ``width``: the inner one, over all ranks."""
        outer, inner = self._model.hidden_size, width // self._tp
        halves = [
            Submatrix(f"{ours}{half}_proj.weight", self._index * inner, inner, 0, outer) for half in ("gate", "up")
        ]
        self._add(names[0], (2 * inner, outer), halves, same=False)
        down = [Submatrix(f"{ours}down_proj.weight", 0, outer, self._index * inner, inner)]
        self._add(names[1], (outer, inner), down, same=False)

    def _shared_experts(self, ours: str, prefix: str) -> None:
        c = self._model
        two = f"{prefix}linear_fc1.weight", f"{prefix}linear_fc2.weight"
        self._mlp(ours + "mlp.", two, c.moe_shared_expert_intermediate_size)
        if c.moe_shared_expert_gate:
            gate = Submatrix(f"{ours}gate.weight", 0, 1, 0, c.hidden_size)
            self._add(f"{prefix}gate_weight", (1, c.hidden_size), [gate], same=True)

    def _attention(self, ours: str, prefix: str) -> None:
        c, names = self._model, self._names
        groups = c.num_kv_heads // self._tp
        per_group = c.num_attention_heads // c.num_kv_heads * c.head_dim
        heads = [
            (proj, group * size, size)
            for group in range(self._index * groups, (self._index + 1) * groups)
            for proj, size in (("q", per_group), ("k", c.head_dim), ("v", c.head_dim))
        ]
        rows = groups * (per_group + 2 * c.head_dim)
        weights = [Submatrix(f"{ours}{proj}_proj.weight", row, size, 0, c.hidden_size) for proj, row, size in heads]
        self._add(names.choose(_QKV, prefix), (rows, c.hidden_size), weights, same=False)
        if c.add_qkv_bias:
            biases = [Submatrix(f"{ours}{proj}_proj.bias", row, size, 0, 1) for proj, row, size in heads]
            self._add(names.choose(_QKV_BIAS, prefix), (rows,), biases, same=False)
        width = groups * per_group
        columns = Submatrix(f"{ours}o_proj.weight", 0, c.hidden_size, self._index * width, width)
        self._add(names.choose(_PROJECTION, prefix), (c.hidden_size, width), [columns], same=False)
        if c.qk_layernorm:
            per_head = c.qk_layernorm_scope is QKNormScope.HEAD
            for proj, own in (("q", width), ("k", groups * c.head_dim)):
                size, start = (c.head_dim, 0) if per_head else (own, self._index * own)
                name = f"{prefix}self_attention.{proj}_layernorm.weight"
                self._add(name, (size,), [Submatrix(f"{ours}{proj}_norm.weight", start, size, 0, 1)], same=per_head)

    def _experts(self, ours: str, prefix: str) -> None:
        c, names = self._model, self._names
        router = [Submatrix(f"{ours}router.weight", 0, c.num_experts, 0, c.hidden_size)]
        self._add(names.choose(_ROUTER, prefix), (c.num_experts, c.hidden_size), router, same=True)
        count, inner = c.num_experts // self._ep, c.moe_ffn_hidden_size // self._tp
        for number in range(count):
            expert = self._rank[2] * count + number
            top = 2 * expert * c.moe_ffn_hidden_size + self._index * inner
            halves = [
                Submatrix(f"{ours}experts.gate_up_weight", top + half * c.moe_ffn_hidden_size, inner, 0, c.hidden_size)
                for half in (0, 1)
            ]
            self._add(names.expert(_EXPERT_FC1, prefix, number), (2 * inner, c.hidden_size), halves, same=False)
            rows = expert * c.hidden_size
            down = [Submatrix(f"{ours}experts.down_weight", rows, c.hidden_size, self._index * inner, inner)]
            self._add(names.expert(_EXPERT_FC2, prefix, number), (c.hidden_size, inner), down, same=False)
