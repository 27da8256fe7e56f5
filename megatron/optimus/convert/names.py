"""Which parameter is which in checkpoints that only have names: ours, Hugging Face's or Megatron's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.convert.hf import hf_parts
from megatron.optimus.convert.megatron_map import EMBEDDINGS, megatron_parts
from megatron.optimus.convert.source import Foreign
from megatron.optimus.convert.tensor_map import Part, whole
from megatron.optimus.models.parameters import parameter_shapes

NAMES = ("optimus", "hf", "hf-native-moe")
_IGNORED = re.compile(r".*(\.inv_freq|\._extra_state|\.rotary_pos_emb\..*)")
_GATE = re.compile(r"(\.layers\.\d+\.(?:mlp|block_sparse_moe))\.gate\.weight")
_EXPERT = re.compile(r"(\.layers\.\d+\.(?:mlp|block_sparse_moe))\.experts\.(\d+)\.")


def plain_name(name: str) -> str | None:
    """A parameter's name without DeepSpeed's wrapping: the engine's "module." and the native MoE layer's own levels.

    None for what carries no weight (tables that are computed, state of fp8 kernels).
    """
    while name.startswith("module."):
        name = name.removeprefix("module.")
    name = name.replace(".deepspeed_moe.gate.wg.", ".gate.")
    name = name.replace(".deepspeed_moe.experts.deepspeed_experts.", ".experts.")
    return None if _IGNORED.fullmatch(name) else name


def native_moe_name(name: str) -> str:
    """The inverse for Hugging Face's names: as a model has them whose MoE blocks are ``deepspeed.moe.layer.MoE``."""
    name = _GATE.sub(r"\1.deepspeed_moe.gate.wg.weight", name)
    return _EXPERT.sub(r"\1.deepspeed_moe.experts.deepspeed_experts.\2.", name)


def parts_under(names: str, model: ModelConfig) -> list[Part]:
    """All tensors under one of ``NAMES``."""
    if names == "optimus":
        return [whole(name, name, shape) for name, shape in parameter_shapes(model).items()]
    parts = hf_parts(model)
    if names == "hf":
        return parts
    return [Part(native_moe_name(part.key), part.shape, part.blocks) for part in parts]


def recognise_names(path: Path, found: Mapping[str, Foreign], model: ModelConfig) -> list[Part]:
    """The parts for parameters of these (plain) names."""
    if "embedding.weight" in found:
        return parts_under("optimus", model)
    if "model.embed_tokens.weight" in found:
        return parts_under("hf", model)
    for name in EMBEDDINGS:
        if name in found:  # its rows may be padded
            return megatron_parts(model, {(0, 0, 0): found}, vocabulary=found[name].shape[0])
    raise CheckpointError(
        f"{path}: the parameters are named like no model that is known here, for example "
        f"{', '.join(sorted(found)[:3])}; names must be ours, Hugging Face's or Megatron's"
    )
