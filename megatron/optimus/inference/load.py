"""Loads a checkpoint, written at any layout and in any format that converts, as a model on these ranks.

A checkpoint of ours is read together: every byte once, by the rank that needs most of it, and hashed on the way. Other
formats are read by each rank for itself, of each tensor only the matrices that it has a part of.

Tensor parallelism does not split tokens here, since a step may have one token only. Under it, ranks with the same
tokens route them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megatron.optimus.checkpoint import CheckpointError, Manifest, TensorSlice, load_together, model_slices
from megatron.optimus.checkpoint.slices import Region, overlaps
from megatron.optimus.config.checks import (
    backend_serves_device,
    expert_parallel_divides_experts,
    experts_need_a_moe_model,
    sizes_fit_ranks,
    tensor_parallel_divides_model,
)
from megatron.optimus.config.schema import ConfigError, LoadBalancing, ModelConfig, ParallelConfig, TokenizerType
from megatron.optimus.context import RunContext
from megatron.optimus.convert import open_source
from megatron.optimus.convert.formats import MASTER, WEIGHT, Source, matrices
from megatron.optimus.convert.tokenizer import check_same_tokenizer
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.tokenize.tokenizer import Tokenizer, build_tokenizer
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import materialize
from megatron.optimus.parallel.apply import parallelize
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.ranks import Ranks

T = TypeVar("T")

_RULES = (
    sizes_fit_ranks,
    experts_need_a_moe_model,
    expert_parallel_divides_experts,
    tensor_parallel_divides_model,
    backend_serves_device,
)


@dataclass(frozen=True)
class TextModel:
    """This rank's part of a model, ready to compute, and its tokenizer."""

    model: Decoder
    tokenizer: Tokenizer
    end_ids: frozenset[int]  # tokens that end a text
    mesh: Mesh
    device: torch.device
    tokenizer_path: Path | None = None  # the tokenizer's file or folder, which may hold a chat template

    @property
    def config(self) -> ModelConfig:
        """The model section of the configuration."""
        return self.model.config

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Logits [B, S, V] over the whole vocabulary, from hidden states."""
        logits: Tensor = self.model.lm_head(x_BSD)
        return logits.view(*x_BSD.shape[:2], -1)


def on_all_ranks(ranks: Ranks, action: Callable[[], T], task: str, error_type: type[Exception]) -> T:
    """``Ranks.run_on_all_ranks``; the error of a process that is alone says nothing of ranks."""
    return action() if ranks.size == 1 else ranks.run_on_all_ranks(action, task, error_type)


def load_text_model(
    path: Path,
    parallel: ParallelConfig,
    ranks: Ranks,
    *,
    local_world_size: int | None = None,
    dtype: torch.dtype | None = None,
    tokenizer_type: TokenizerType | None = None,
    tokenizer_model: str | None = None,
) -> TextModel:
    """Loads model and tokenizer. Collective over all ranks.

    Args:
        path: a checkpoint of ours, the folder of a run (its newest checkpoint), or a folder of another format.
        parallel: tensor- and expert-parallel sizes; what is left of the ranks shares the prompts.
        ranks: all ranks, with the device of this one.
        local_world_size: ranks of a node; None: all.
        dtype: of the weights; None: as the run computed, or as stored in a folder of another format.
        tokenizer_type: None: the checkpoint's.
        tokenizer_model: its file or folder; None: the checkpoint's.

    Raises:
        CheckpointError: on every rank, where the checkpoint is unfinished, damaged or of no known format.
        ConfigError: the ranks do not fit the model.
        DataError: the tokenizer is missing, or is that of another model.
    """
    device = torch.device(ranks.device)
    source = on_all_ranks(ranks, lambda: open_source(path), f"opening {path}", CheckpointError)
    try:
        config = replace(source.run, parallel=replace(parallel, sequence_parallel=False))
        with ranks.failing_alike():
            for rule in _RULES:
                if (problem := rule(config, ranks.size)) is not None:
                    raise ConfigError(problem)
        kind = tokenizer_type or config.data.tokenizer_type or TokenizerType.HF
        own = None if kind is TokenizerType.BYTE else source.tokenizer or config.data.tokenizer_model
        location = tokenizer_model or own
        task = f"reading the tokenizer of {path}"
        tokenizer = on_all_ranks(ranks, lambda: model_tokenizer(kind, location, config.model), task, DataError)
        if tokenizer_model is not None:
            named = partial(check_same_tokenizer, source, kind, Path(tokenizer_model))
            on_all_ranks(ranks, named, task, CheckpointError)
        mesh = Mesh(config.parallel, rank=ranks.rank, world_size=ranks.size, local_world_size=local_world_size)
        run = RunContext(config, mesh, device, ranks)
        model = _build(run, dtype or _dtype_of(source, run.dtype))
        if source.format == "optimus":
            load_together(source.path, lambda manifest: _requests(model, manifest), cast=True, ranks=ranks)
        else:
            on_all_ranks(ranks, lambda: _read(source, model), f"reading {source.path}", CheckpointError)
        ends = end_ids(source.generation, source.token_ids, tokenizer)
    finally:
        source.close()
    return TextModel(model, tokenizer, ends, mesh, device, None if location is None else Path(location))


def _dtype_of(source: Source, run_dtype: torch.dtype) -> torch.dtype:
    if source.format == "optimus":
        return run_dtype
    stored = source.dtypes["embedding.weight", WEIGHT if WEIGHT in source.kinds else MASTER]
    return torch.float32 if stored == torch.float32 else torch.bfloat16


def _build(run: RunContext, dtype: torch.dtype) -> Decoder:
    """Builds this rank's part of the model without values."""
    with torch.device("meta"):
        model = Decoder(run.config.model)
    for block in model.layers:
        if not hasattr(block.attention, "core_attention"):
            raise ConfigError(f"{type(block.attention).__name__} keeps no keys and values: it cannot generate")
    parallelize(model, run.mesh, run.config.parallel, run.config.model.max_position_embeddings)
    materialize(model, run.device, dtype)
    for layer in model.moe_layers():
        layer.router.balancing = LoadBalancing.NONE  # its loss is of training, and would communicate
    return model.eval().requires_grad_(False)


def _requests(model: Decoder, manifest: Manifest) -> list[TensorSlice]:
    """What this rank wants of a full or a model-only checkpoint. Older ones lack buffers."""
    kind = MASTER if manifest.kind == "full" else WEIGHT
    slices = [
        replace(one, kind=kind) if one.kind == WEIGHT else one for one in model_slices(model, dense=True, experts=True)
    ]
    return [one for one in slices if one.kind == kind or (one.name, one.kind) in manifest.tensors]


def _read(source: Source, model: Decoder) -> None:
    """Fills the model from a source, one matrix at a time."""
    wanted: dict[str, list[TensorSlice]] = {}
    for one in model_slices(model, dense=True, experts=True):
        wanted.setdefault(one.name, []).append(one)
    kind = source.weight_kind("fp32")
    for name, start, stop in matrices(source.model):
        matrix = Region(wanted[name][0].region.shape, start, stop)
        shared = [(one, found) for one in wanted[name] for found in overlaps(matrix, one.region)]
        if shared:
            data = source.read(name, kind, start, stop)
            for one, found in shared:
                found.in_second(one.tensor).copy_(found.in_first(data))
    for name, buffer in source.buffers.items():
        wanted[name][0].tensor.copy_(buffer.view(-1))
    source.finish()


def model_tokenizer(kind: TokenizerType, location: str | Path | None, model: ModelConfig) -> Tokenizer:
    """Builds a tokenizer. Raises DataError where it cannot be read, or has more tokens than the model."""
    if kind is TokenizerType.BYTE and location is not None:
        raise DataError(
            f"{kind.value} reads no file; name the type of --tokenizer-model {location} with --tokenizer-type"
        )
    tokenizer = build_tokenizer(kind, location)
    if tokenizer.vocab_size > model.vocab_size:
        raise DataError(
            f"{location or kind.value} has {tokenizer.vocab_size} tokens, the model's vocab_size is "
            f"{model.vocab_size}: it is another model's tokenizer; name the right one with --tokenizer-model"
        )
    return tokenizer


def end_ids(generation: object, token_ids: object, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a text: as an imported model's files say, else the one that ends documents.

    Args:
        generation: the fields of its generation_config.json, if it has one.
        token_ids: those of its config.json.
        tokenizer: of the model.
    """
    for ids in (generation, token_ids):
        found = ids.get("eos_token_id") if isinstance(ids, dict) else None
        values: Iterable[object] = found if isinstance(found, list) else [found]
        if named := frozenset(value for value in values if isinstance(value, int)):
            return named
    return frozenset([tokenizer.eod_id])
