"""Hugging Face folders as source and destination."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.config.schema import ConfigError, ModelConfig, RunConfig, TokenizerType
from megatron.optimus.convert.hf_files import (
    TOKENIZER_FILES,
    HFFolder,
    Tokenizer,
    read_json,
    token_ids_of,
    write_json,
    write_weights,
)
from megatron.optimus.convert.request import Options, Plan, Written, part_items
from megatron.optimus.convert.source import WEIGHT, Foreign, ForeignSource, Source
from megatron.optimus.convert.tensor_map import Part, below, rows_of
from megatron.optimus.models.huggingface.config import hf_config, model_config_from_hf
from megatron.optimus.models.huggingface.names import to_hf
from megatron.optimus.models.parameters import parameter_shapes

_GENERATION = "generation_config.json"

log = logging.getLogger("optimus")


def recognise(path: Path) -> bool:
    return (path / "config.json").is_file()


def hf_parts(model: ModelConfig) -> list[Part]:
    """All tensors of the Hugging Face model. Raises ConfigError when there is none that computes the same."""
    found: dict[str, Part] = {}
    for name in parameter_shapes(model):
        for part in to_hf(model, name):
            one = rows_of(part.name, name, part.shape, part.start)
            found[one.key] = below(found[one.key], one) if one.key in found else one
    return list(found.values())


class HFSource(ForeignSource):
    """Weights of a folder that transformers' save_pretrained wrote."""

    def __init__(self, path: Path) -> None:
        config = read_json(path / "config.json")
        try:
            run = RunConfig(model=model_config_from_hf(config))
        except ConfigError as error:
            raise ConfigError(f"{path / 'config.json'}: {str(error).removeprefix('config.json: ')}") from error
        tokenizer = path if Tokenizer.find(path) else None
        if tokenizer is None and any((path / name).exists() for name in TOKENIZER_FILES):
            log.warning("%s: its tokenizer stays behind: there is no tokenizer.json; transformers can make one", path)
        if tokenizer is not None:
            run.data.tokenizer_type, run.data.tokenizer_model = TokenizerType.HF, str(path.resolve())
        generation = read_json(path / _GENERATION) if (path / _GENERATION).exists() else {}
        ids = token_ids_of(config)
        super().__init__(path, "hf", run, token_ids=ids, generation=generation, tokenizer=tokenizer)
        self._folder = HFFolder(path)
        found = {name: Foreign(*self._folder.describe(name)) for name in self._folder.names}
        if not run.model.untie_embeddings_and_output_weights and "lm_head.weight" in found:
            # Some writers store the tied weight twice; the second must be the first.
            if not torch.equal(self.fetch("lm_head.weight", WEIGHT), self.fetch("model.embed_tokens.weight", WEIGHT)):
                raise CheckpointError(f"{path}: lm_head.weight differs from the embedding that it is tied to")
            del found["lm_head.weight"]
        self.place(hf_parts(run.model), {WEIGHT: found})

    def fetch(self, key: str, kind: str) -> torch.Tensor:
        return self._folder.read(key)


def plan(source: Source, options: Options) -> Plan:
    """A folder that transformers loads."""
    _refuse_buffers(source)
    kind = source.weight_kind(options.dtype)
    items = part_items(source, hf_parts(source.model), kind, options)
    tokenizer = _find_tokenizer(options.tokenizer, source)
    config = hf_config(source.model, str(items[0].dtype).removeprefix("torch."))
    ids = source.token_ids or (tokenizer.token_ids() if tokenizer is not None else {})

    def write(directory: Path) -> None:
        write_json(directory / "config.json", config | ids)
        write_json(directory / _GENERATION, source.generation or {"_from_model_config": True, **ids})
        if tokenizer is not None:
            tokenizer.copy_to(directory)
        write_weights(directory, items, options.max_shard_bytes)

    return Plan([Written(item.key, item.dtype, item.shape) for item in items], write, HFSource)


def _refuse_buffers(source: Source) -> None:
    """These architectures select experts without a bias, so only a bias of zeros can be left out."""
    for name, buffer in source.buffers.items():
        if bool(buffer.any()):
            raise CheckpointError(
                f"{source.path}: buffer {name} is not zero and has no place in a Hugging Face model of this kind "
                "(moe_router_enable_expert_bias); its experts would be chosen differently"
            )


def _find_tokenizer(path: Path | None, source: Source) -> Tokenizer | None:
    """The one asked for, else the source's own if it still is where its configuration says."""
    if path is not None:
        found = Tokenizer.find(Path(path))
        if found is None:
            raise CheckpointError(f"--tokenizer {path}: neither a tokenizer.json nor a folder that holds one")
        return found
    own = source.run.data.tokenizer_model
    if own is None or source.run.data.tokenizer_type is not TokenizerType.HF:
        return None
    found = Tokenizer.find(Path(own))
    if found is None:
        log.warning("tokenizer_model=%s is not there; the export has no tokenizer (name one with --tokenizer)", own)
    return found
