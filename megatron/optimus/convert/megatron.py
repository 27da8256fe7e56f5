"""Checkpoints of Megatron-LM and Megatron-DeepSpeed in their "torch" format, one file per model-parallel rank.

    latest_checkpointed_iteration.txt                        100, or "release"
    iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt   TT tensor-, PPP pipeline-, EEE expert-parallel rank

A file is a dictionary: ``args`` (the options), ``checkpoint_version`` 3.0, ``iteration``, ``model`` (names in
megatron_map.py). Weights are read and written; Megatron's optimizer states are not.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.shards import WriteItem
from megatron.optimus.checkpoint.untrusted import read_small_file
from megatron.optimus.config.schema import ConfigError, Normalization, RunConfig
from megatron.optimus.convert.deepspeed import flat_names
from megatron.optimus.convert.formats import (
    WEIGHT,
    Destination,
    ForeignSource,
    Format,
    Options,
    Source,
    TensorInfo,
    output_tensors,
    write_items,
)
from megatron.optimus.convert.megatron_args import arguments_of, model_from_arguments
from megatron.optimus.convert.megatron_map import (
    EMBEDDINGS,
    EXPERT_BIAS,
    Rank,
    key_of,
    megatron_tensors,
    padded_vocabulary,
)
from megatron.optimus.convert.sidecar import Description, count_of, read_model_config, read_sidecar, write_sidecar
from megatron.optimus.convert.tensor_map import ForeignTensor
from megatron.optimus.convert.torch_files import ScratchFile, read_torch, write_torch
from megatron.optimus.platform.files import sync_directory, write_new

_POINTER = "latest_checkpointed_iteration.txt"
_FILE = "model_optim_rng.pt"
_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,3})(?:_(\d{3}))?(?:_(\d{3}))?")
_WITHOUT_POINTER = "give the iteration's own folder as the source"
_NORMS = re.compile(r".*(layernorm\.|layer_norm_)(weight|bias)")


def _iteration_folder(path: Path) -> Path:
    if not (path / _POINTER).is_file():
        return path
    text = read_small_file((path / _POINTER).resolve(), 64).decode("utf-8", "replace").strip()
    if text != "release" and not re.fullmatch(r"\d{1,12}", text):
        raise CheckpointError(
            f"{path / _POINTER}: {text[:50]!r} is neither an iteration nor 'release'; {_WITHOUT_POINTER}"
        )
    folder = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise CheckpointError(f"{path / _POINTER}: names {folder.name}, which is not there; {_WITHOUT_POINTER}")
    return folder


def _recognise(path: Path) -> bool:
    return (path / _POINTER).is_file() or (
        path.is_dir() and any(_RANK_FOLDER.fullmatch(f.name) for f in path.iterdir())
    )


class MegatronSource(ForeignSource):
    """The weights in the files of all ranks."""

    def __init__(self, path: Path, model_config: Path | None = None) -> None:
        folder = _iteration_folder(path)
        self._files = _rank_files(folder)
        contents = {rank: _read_rank(file) for rank, file in self._files.items()}
        first = contents[0, 0, 0]
        about = _describe(self._files[0, 0, 0], first, model_config)
        iteration = first.get("iteration", about.step)
        step = iteration if type(iteration) is int and iteration >= 0 else about.step
        super().__init__(
            folder,
            "megatron",
            about.run,
            step=step,
            consumed_samples=about.consumed_samples,
            token_ids=about.token_ids,
            generation=about.generation,
        )
        found = {rank: flat_names(content["model"]) for rank, content in contents.items()}
        self._nonparametric_norms(found)
        self._take_buffers(found)
        embedding = next((found[0, 0, 0][name] for name in EMBEDDINGS if name in found[0, 0, 0]), None)
        if embedding is None or embedding.dim() != 2:
            raise CheckpointError(f"{self._files[0, 0, 0]}: has no {' or '.join(EMBEDDINGS)}")
        tp = max(rank[0] for rank in found) + 1
        tensors = megatron_tensors(self.model, found, vocabulary=embedding.shape[0] * tp)
        single = len(found) == 1
        self._tensors = {
            name if single else key_of(rank, name): tensor
            for rank, one in found.items()
            for name, tensor in one.items()
        }
        known = {tensor.key for tensor in tensors}
        if not self.model.untie_embeddings_and_output_weights:  # a copy of the tied matrix that needs no reading
            for key in [key for key in self._tensors if key.endswith("output_layer.weight") and key not in known]:
                del self._tensors[key]
        described = {key: TensorInfo(tensor.dtype, tuple(tensor.shape)) for key, tensor in self._tensors.items()}
        self.map_tensors(tensors, {WEIGHT: described})
        self._check_copies(tensors)

    def files_to_check(self) -> list[Path]:
        return list(self._files.values())

    def fetch(self, key: str, kind: str) -> torch.Tensor:
        return self._tensors[key]

    def _nonparametric_norms(self, found: dict[Rank, dict[str, torch.Tensor]]) -> None:
        """Drops the parameters of LayerNorm, whose scales must be one and shifts zero; others have no equivalent."""
        if self.model.normalization is not Normalization.LAYERNORM_NONPARAMETRIC:
            return
        for rank, tensors in found.items():
            for name in [name for name in tensors if _NORMS.fullmatch(name)]:
                neutral = 0.0 if name.endswith("bias") else 1.0
                if bool((tensors.pop(name) != neutral).any()):
                    raise CheckpointError(
                        f"{self._files[rank]}: {name} is not {neutral} everywhere; LayerNorm with parameters is not "
                        "supported"
                    )

    def _take_buffers(self, found: dict[Rank, dict[str, torch.Tensor]]) -> None:
        """Takes the biases of aux-loss-free balancing, which are small and the same on all ranks of a stage."""
        first = 0
        for stage in range(max(rank[1] for rank in found) + 1):
            layers = {int(m[1]) for name in found[0, stage, 0] if (m := re.search(r"\.layers\.(\d+)\.", name))}
            for rank in (rank for rank in found if rank[1] == stage):
                for name in [name for name in found[rank] if name.endswith(EXPERT_BIAS)]:
                    match = re.search(r"\.layers\.(\d+)\.", name)
                    assert match is not None
                    self.buffers[f"layers.{first + int(match[1])}.moe.router.expert_bias"] = (
                        found[rank].pop(name).float().clone()
                    )
            first += len(layers)

    def _check_copies(self, tensors: list[ForeignTensor]) -> None:
        """Compares norms and tied matrices that ranks should have alike; taking one would hide a damaged run."""
        originals = {tensor.submatrices: tensor.key for tensor in tensors if not tensor.copy}
        for tensor in tensors:
            small_or_tied = 1 in (tensor.rows, tensor.columns) or tensor.key.endswith("output_layer.weight")
            if tensor.copy and small_or_tied and tensor.submatrices in originals:
                original = originals[tensor.submatrices]
                if not torch.equal(self._tensors[tensor.key], self._tensors[original]):
                    raise CheckpointError(f"{self.path}: the ranks' copies differ: {tensor.key} and {original}")


def _destination(source: Source, options: Options) -> Destination:
    """Prepares a folder of weights for tp x pp x ep ranks."""
    c = source.model
    if c.num_layers % options.pp:
        raise CheckpointError(f"--target-pipeline-parallel-size {options.pp} must divide num_layers={c.num_layers}")
    ranks = [(t, p, e) for t in range(options.tp) for p in range(options.pp) for e in range(options.ep)]
    rows = padded_vocabulary(c, options.tp)
    tensors = megatron_tensors(c, dict.fromkeys(ranks), vocabulary=rows, transformer_engine=options.transformer_engine)
    kind = source.weight_kind(options.dtype)
    items = write_items(source, tensors, kind, options)
    single = len(ranks) == 1
    groups: dict[Rank, list[WriteItem]] = {
        rank: [item for item in items if single or item.key.startswith(key_of(rank, ""))] for rank in ranks
    }
    arguments = arguments_of(source, options, rows)
    folder_name = f"iter_{source.step:07d}"

    def write(directory: Path) -> None:
        scratch = ScratchFile(directory)
        for rank, group in groups.items():
            model = {key.split(":")[-1]: tensor for key, tensor in scratch.collect(group).items()}
            model |= _extras(source, options, rank, model)
            folder = directory / folder_name / _rank_folder(rank, options)
            folder.mkdir(parents=True)
            content = {
                "args": argparse.Namespace(**arguments),
                "checkpoint_version": 3.0,
                "iteration": source.step,
                "model": model,
            }
            write_torch(folder / _FILE, content)
            sync_directory(folder)
        scratch.close()
        write_sidecar(directory / folder_name, source)
        write_new(directory / _POINTER, str(source.step).encode())

    return Destination(output_tensors(items), write, MegatronSource)


def _extras(source: Source, options: Options, rank: Rank, tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Makes what Megatron has and we do not (parameters of LayerNorm), and the balancing biases of this stage."""
    c, extras = source.model, {}
    per_stage = c.num_layers // options.pp
    dtype = next(iter(tensors.values())).dtype
    if c.normalization is Normalization.LAYERNORM_NONPARAMETRIC:
        fused = options.transformer_engine
        names = []
        for index in range(per_stage):
            is_moe = rank[1] * per_stage + index in c.moe_layers
            prefix = f"decoder.layers.{index}."
            names.append(prefix + ("self_attention.linear_qkv.layer_norm_" if fused else "input_layernorm."))
            names.append(prefix + ("mlp.linear_fc1.layer_norm_" if fused and not is_moe else "pre_mlp_layernorm."))
        if rank[1] == options.pp - 1:
            names.append("decoder.final_layernorm.")
        for name in names:
            extras[name + "weight"] = torch.ones(c.hidden_size, dtype=dtype)
            extras[name + "bias"] = torch.zeros(c.hidden_size, dtype=dtype)
    for name, buffer in source.buffers.items():
        layer = int(name.split(".")[1])
        if layer // per_stage == rank[1]:
            extras[f"decoder.layers.{layer % per_stage}.{EXPERT_BIAS}"] = buffer
    return extras


def _rank_folder(rank: Rank, options: Options) -> str:
    name = f"mp_rank_{rank[0]:02d}"
    if options.pp > 1:
        name += f"_{rank[1]:03d}"
    return name + (f"_{rank[2]:03d}" if options.ep > 1 else "")


def _rank_files(folder: Path) -> dict[Rank, Path]:
    """Finds the files of all ranks. A single suffix is the pipeline rank unless the run had only expert parallelism."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if (folder / ".metadata").exists() or (folder / "common.pt").exists():
        raise CheckpointError(
            f"{folder}: Megatron's distributed checkpoints (torch_dist) are not read, their metadata is a pickle of "
            "code objects; save with --ckpt-format torch"
        )
    names = {entry.name: match for entry in folder.iterdir() if (match := _RANK_FOLDER.fullmatch(entry.name))}
    if not names:
        raise CheckpointError(f"{folder}: has no mp_rank_* folders")
    single_suffix_is_expert = False
    if any(match[2] and not match[3] for match in names.values()):
        first = _read_rank(folder / min(names) / _FILE)
        size = getattr(first.get("args"), "expert_model_parallel_size", 1)
        single_suffix_is_expert = type(size) is int and size > 1
    files: dict[Rank, Path] = {}
    for name, match in names.items():
        second, third = int(match[2] or 0), int(match[3] or 0)
        if match[2] and not match[3] and single_suffix_is_expert:
            second, third = 0, second
        files[int(match[1]), second, third] = folder / name / _FILE
    sizes = [max(rank[axis] for rank in files) + 1 for axis in range(3)]
    wanted = {(t, p, e) for t in range(sizes[0]) for p in range(sizes[1]) for e in range(sizes[2])}
    if wanted - set(files):
        missing = ", ".join(f"tp {t} pp {p} ep {e}" for t, p, e in sorted(wanted - set(files))[:5])
        raise CheckpointError(f"{folder}: files are missing for the ranks {missing}")
    return {rank: files[rank] for rank in sorted(files)}


def _read_rank(file: Path) -> dict[str, Any]:
    content = read_torch(file)
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        virtual = isinstance(content, dict) and "model0" in content
        more = "interleaved (virtual) pipeline stages are not read" if virtual else "it is no checkpoint of Megatron"
        raise CheckpointError(f"{file}: has no 'model' with the weights; {more}")
    version = content.get("checkpoint_version", 3.0)
    if version != 3.0:
        raise CheckpointError(f"{file}: checkpoint_version {version!r} orders QKV differently; only 3.0 is read")
    return content


def _describe(file: Path, first: dict[str, Any], model_config: Path | None) -> Description:
    if model_config is not None:
        return read_model_config(model_config)
    found = read_sidecar(file.parent.parent)
    if found is not None:
        return found
    arguments = first.get("args")
    values = arguments if isinstance(arguments, dict) else getattr(arguments, "__dict__", {})
    if not values:
        raise CheckpointError(f"{file}: has no 'args'; describe the model with --model-config")
    try:
        model = model_from_arguments(values)
    except ConfigError as error:
        raise CheckpointError(f"{file}: args: {error}") from error
    return Description(RunConfig(model=model), 0, count_of(values.get("consumed_train_samples")))


FORMAT = Format("megatron", _POINTER, _recognise, MegatronSource, _destination)
