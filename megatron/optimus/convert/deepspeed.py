"""Checkpoints of DeepSpeed's engine: ZeRO stage 0, 1 and 2, dense and with its native MoE layer; and universal ones.

    latest                                              the tag
    global_step100/mp_rank_00_model_states.pt           weights without experts, bookkeeping
    global_step100/layer_L_expert_E_mp_rank_00_model_states.pt      one expert of one MoE layer
    global_step100/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt masters and moments that rank R owns

A rank's states are flat: every parameter group is one vector cut into equal shares, and ``param_slice_mappings`` says
which parameter lies where in a share. A parameter is therefore put together from the shares in rank order. Experts are
sharded over the ranks that hold the same experts and are named by their number on the rank.

    latest_universal                                        the tag
    global_step100_universal/mp_rank_00_model_states.pt     bookkeeping
    global_step100_universal/zero/optimizer_state.pt        hyperparameters of the groups
    global_step100_universal/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt     whole tensors in fp32

In both, parameters have only names; these may be ours, Hugging Face's or Megatron's.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.shards import WriteItem
from megatron.optimus.checkpoint.untrusted import read_small_file
from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.convert.formats import (
    MASTER,
    MOMENTS,
    WEIGHT,
    Destination,
    ForeignSource,
    Format,
    Options,
    OutputTensor,
    Source,
    TensorInfo,
    check_names,
    output_tensors,
    write_items,
)
from megatron.optimus.convert.hf import hf_tensors
from megatron.optimus.convert.megatron_map import EMBEDDINGS, megatron_tensors
from megatron.optimus.convert.sidecar import count_of, describe, write_sidecar
from megatron.optimus.convert.tensor_map import ForeignTensor, rows_of
from megatron.optimus.convert.torch_files import ScratchFile, read_torch, write_torch
from megatron.optimus.models.parameters import parameter_shapes
from megatron.optimus.platform.files import sync_directory, write_new

NAMES = ("optimus", "hf", "hf-native-moe")
_IGNORED = re.compile(r".*(\.inv_freq|\._extra_state|\.rotary_pos_emb\..*)")
_GATE = re.compile(r"(\.layers\.\d+\.(?:mlp|block_sparse_moe))\.gate\.weight")
_EXPERT = re.compile(r"(\.layers\.\d+\.(?:mlp|block_sparse_moe))\.experts\.(\d+)\.")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_MODEL_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_EXPERT_FILE = re.compile(r"layer_\d+_expert_(\d+)_mp_rank_\d+_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_EXPERT_NAME = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
_WITHOUT_POINTER = "give the checkpoint's own folder as the source"
_STATE_FILES = {MASTER: "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}
# DeepSpeed pairs its parameter groups with those in the file and silently leaves out what has no partner. An empty
# entry changes nothing in its group, so there are enough of them.
_NUM_GROUPS = 64


# ---- names of parameters


def plain_name(name: str) -> str | None:
    """Takes DeepSpeed's wrapping off a parameter's name: the engine's "module." and the native MoE layer's own levels.

    Returns None for what carries no weight (tables that are computed, state of fp8 kernels).
    """
    while name.startswith("module."):
        name = name.removeprefix("module.")
    name = name.replace(".deepspeed_moe.gate.wg.", ".gate.")
    name = name.replace(".deepspeed_moe.experts.deepspeed_experts.", ".experts.")
    return None if _IGNORED.fullmatch(name) else name


def _native_moe_name(name: str) -> str:
    """Puts it back on a Hugging Face name: as a model has it whose MoE blocks are ``deepspeed.moe.layer.MoE``."""
    name = _GATE.sub(r"\1.deepspeed_moe.gate.wg.weight", name)
    return _EXPERT.sub(r"\1.deepspeed_moe.experts.deepspeed_experts.\2.", name)


def named_tensors(names: str, model: ModelConfig) -> list[ForeignTensor]:
    """Lists the tensors of a model whose parameters are named by one of ``NAMES``."""
    if names == "optimus":
        return [rows_of(name, name, shape) for name, shape in parameter_shapes(model).items()]
    tensors = hf_tensors(model)
    if names == "hf":
        return tensors
    return [replace(tensor, key=_native_moe_name(tensor.key)) for tensor in tensors]


def _recognise_names(path: Path, found: Mapping[str, TensorInfo], model: ModelConfig) -> list[ForeignTensor]:
    """Lists the tensors of a model whose parameters have these plain names."""
    if "embedding.weight" in found:
        return named_tensors("optimus", model)
    if "model.embed_tokens.weight" in found:
        return named_tensors("hf", model)
    for name in EMBEDDINGS:
        if name in found:  # its rows may be padded
            return megatron_tensors(model, {(0, 0, 0): found}, vocabulary=found[name].shape[0])
    raise CheckpointError(
        f"{path}: the parameters are named like no model that is known here, for example "
        f"{', '.join(sorted(found)[:3])}; names must be ours, Hugging Face's or Megatron's"
    )


def flat_names(module: Any) -> dict[str, torch.Tensor]:
    """Collects tensors by plain name from the nested dictionaries that Megatron and DeepSpeed store."""
    result: dict[str, torch.Tensor] = {}

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                visit(f"{prefix}.{name}" if prefix else str(name), inner)
        elif isinstance(value, torch.Tensor):
            name = plain_name(prefix)
            if name is not None:
                result[name] = value

    visit("", module)
    return result


# ---- ZeRO


def _tagged(path: Path, pointer: str) -> Path:
    """Finds the checkpoint that the text file ``pointer`` names, or ``path`` itself when there is no such file.

    Raises CheckpointError when the file names none.
    """
    if not (path / pointer).is_file():
        return path
    # It may be a link, as in a hub's cache: whatever it leads to must be a plain name.
    tag = read_small_file((path / pointer).resolve(), 4096).decode("utf-8", "replace").strip()
    if not _TAG.fullmatch(tag) or ".." in tag:
        raise CheckpointError(f"{path / pointer}: {tag[:100]!r} is not the plain name of a folder; {_WITHOUT_POINTER}")
    if not (path / tag).is_dir():
        raise CheckpointError(f"{path / pointer}: names {tag!r}, there is no such folder beside it; {_WITHOUT_POINTER}")
    return path / tag


def _recognise_zero(path: Path) -> bool:
    folder = _tagged(path, "latest")
    return folder.is_dir() and any(file.name.endswith("_model_states.pt") for file in folder.iterdir())


@dataclass
class _Fragments:
    """One parameter's flat fragments of each kind, in rank order."""

    shape: tuple[int, ...]
    tensors: dict[str, list[torch.Tensor]]


class ZeroSource(ForeignSource):
    """A ZeRO checkpoint: weights, and where optimizer files are there masters and moments."""

    def __init__(self, path: Path, model_config: Path | None = None) -> None:
        folder = _tagged(path, "latest")
        files = sorted(file.name for file in folder.iterdir())
        _refuse_other_layouts(folder, files)
        about = describe(path, model_config, "DeepSpeed's files")
        header = read_torch(folder / "mp_rank_00_model_states.pt")
        if not isinstance(header, dict) or not isinstance(header.get("module"), dict):
            raise CheckpointError(f"{folder}/mp_rank_00_model_states.pt: has no 'module' with the weights")
        super().__init__(
            folder,
            "zero",
            about.run,
            step=count_of(header.get("global_steps")),
            consumed_samples=count_of(header.get("consumed_samples", header.get("global_samples"))),
            token_ids=about.token_ids,
            generation=about.generation,
        )
        weights = flat_names(header["module"])
        for file in files:
            match = _EXPERT_FILE.fullmatch(file)
            if match:
                weights |= flat_names(read_torch(folder / file))
        self._drop_tied(weights)
        for name in [name for name in weights if name.endswith(".expert_bias")]:
            self.buffers[name] = weights.pop(name).clone()
        self._weights = weights
        self._fragments: dict[str, _Fragments] = {}
        found = {WEIGHT: {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}}
        owners = {int(m[1]): folder / f for f in files if (m := _OPTIMIZER_FILE.fullmatch(f))}
        tensors = _recognise_names(folder, found[WEIGHT], self.model)
        check_names(folder, set(weights), {tensor.key for tensor in tensors})
        if owners:
            world = count_of(header.get("dp_world_size")) or len(owners)
            self._read_owners(owners, world)
            states = {name: TensorInfo(torch.float32, one.shape) for name, one in self._fragments.items()}
            found |= dict.fromkeys((MASTER, *MOMENTS), states)
        self.map_tensors(tensors, found)

    def fetch(self, key: str, kind: str) -> torch.Tensor:
        if kind == WEIGHT:
            return self._weights[key]
        one = self._fragments[key]
        flat = one.tensors[kind]
        return (flat[0] if len(flat) == 1 else torch.cat(flat)).view(one.shape)

    def files_to_check(self) -> list[Path]:
        return sorted(self.path.glob("*.pt"))

    def _drop_tied(self, weights: dict[str, torch.Tensor]) -> None:
        """Drops the second of the two names under which a tied output projection is stored."""
        if self.model.untie_embeddings_and_output_weights:
            return
        pairs = (("lm_head.weight", "embedding.weight"), ("lm_head.weight", "model.embed_tokens.weight"))
        for head, embedding in pairs:
            if head in weights and embedding in weights:
                if not torch.equal(weights[head], weights[embedding]):
                    raise CheckpointError(f"{self.path}: {head} differs from {embedding}, to which it is tied")
                del weights[head]

    def _read_owners(self, owners: dict[int, Path], world: int) -> None:
        missing, surplus = sorted(set(range(world)) - set(owners)), sorted(set(owners) - set(range(world)))
        if missing or surplus:
            raise CheckpointError(
                f"{self.path}: saved by {world} ranks; optimizer files "
                + (f"of ranks {missing[:8]} are missing" if missing else f"of ranks {surplus[:8]} do not belong to it")
            )
        shapes = {name: tuple(tensor.shape) for name, tensor in self._weights.items()}
        for rank, file in sorted(owners.items()):
            self._read_owner(rank, file, shapes)
        for name, one in self._fragments.items():
            for kind, flat in one.tensors.items():
                held = sum(fragment.numel() for fragment in flat)
                if held != torch.Size(one.shape).numel():
                    raise CheckpointError(
                        f"{self.path}: {name} ({kind}): the optimizer files hold {held} elements for shape {one.shape}"
                    )

    def _read_owner(self, rank: int, file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        content = read_torch(file)
        state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
        if not isinstance(state, dict):
            raise CheckpointError(f"{file}: has no 'optimizer_state_dict'")
        try:
            base, masters = state["base_optimizer_state"], state["single_partition_of_fp32_groups"]
            per_group = [base["state"].get(g, {}) for g in range(len(masters))] if isinstance(base, dict) else base
            groups = base["param_groups"] if isinstance(base, dict) else [{}] * len(masters)
            mappings = state["param_slice_mappings"]
            if not len(masters) == len(per_group) == len(mappings) == len(groups):
                raise ValueError("different numbers of parameter groups")
            for flat, moments, mapping, group in zip(masters, per_group, mappings, groups, strict=True):
                ep_size = int(group["name"].removeprefix("ep_size_")) if group.get("moe") else 1
                if "step" in moments:
                    self.optimizer_steps = int(moments["step"])
                for name, address in mapping.items():
                    known = self._global_name(plain_name(name) or name, rank % ep_size, ep_size)
                    if known not in shapes:
                        raise ValueError(f"it holds {name}, which is not among the weights")
                    one = self._fragments.setdefault(known, _Fragments(shapes[known], defaultdict(list)))
                    for kind, tensor in ((MASTER, flat), *((kind, moments[kind]) for kind in MOMENTS)):
                        if tensor.dtype != torch.float32 or tensor.dim() != 1:
                            raise ValueError(f"{kind} of {name} is {tensor.dtype} {tuple(tensor.shape)}, not flat fp32")
                        one.tensors[kind].append(tensor.narrow(0, address.start, address.numel))
        except (AttributeError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).split("\n")[0]
            raise CheckpointError(
                f"{file}: not an optimizer file of ZeRO stage 1 or 2: {reason}; copy it again, or convert the weights "
                "alone from a folder without the optimizer files"
            ) from error

    def _global_name(self, name: str, ep_rank: int, ep_size: int) -> str:
        """Numbers an expert in the whole model: expert i of rank r is r * (experts per rank) + i."""
        match = _EXPERT_NAME.fullmatch(name)
        if match is None or ep_size == 1:
            return name
        return f"{match[1]}{ep_rank * (self.model.num_experts // ep_size) + int(match[2])}{match[3]}"


def _zero_destination(source: Source, options: Options) -> Destination:
    """Prepares weights as the engine loads them with ``load_module_only=True``; moments need the universal format."""
    kind = source.weight_kind(options.dtype)
    items = write_items(source, named_tensors(options.names, source.model), kind, options)
    dense = [item for item in items if ".deepspeed_experts." not in item.key]
    experts: dict[str, list[WriteItem]] = defaultdict(list)
    for item in items:
        match = re.search(r"layers\.(\d+)\..*\.deepspeed_experts\.(\d+)\.", item.key)
        if match:
            number = source.model.moe_layers.index(int(match[1]))  # DeepSpeed counts the layers that have experts
            experts[f"layer_{number}_expert_{match[2]}_mp_rank_00_model_states.pt"].append(item)
    tag = f"global_step{source.step}"

    def write(directory: Path) -> None:
        folder = directory / tag
        folder.mkdir()
        scratch = ScratchFile(folder)
        module = scratch.collect(dense) | source.buffers
        write_torch(folder / "mp_rank_00_model_states.pt", _model_states(source, module))
        scratch.close()
        for file, group in experts.items():
            write_torch(folder / file, scratch.collect(group))
            scratch.close()
        write_new(directory / "latest", tag.encode())
        write_sidecar(directory, source)

    return Destination(output_tensors(items), write, ZeroSource)


def _model_states(source: Source, module: dict[str, Any]) -> dict[str, Any]:
    """Builds what the engine wants to find in mp_rank_00_model_states.pt."""
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": source.step,
        "global_samples": source.consumed_samples,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "num_experts": [],
        "ds_config": {},
        "ds_version": "0.19.8",
        "iteration": source.step,
        "consumed_samples": source.consumed_samples,
        "universal_checkpoint_info": {},
    }


def _refuse_other_layouts(folder: Path, files: list[str]) -> None:
    reason = None
    if any(re.fullmatch(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt", file) for file in files):
        reason = "ZeRO stage 3 checkpoints are not read; run DeepSpeed's ds_to_universal on it, then convert the result"
    elif any(re.fullmatch(r"layer_\d+-model_\d+-model_states\.pt", file) for file in files):
        reason = "checkpoints of DeepSpeed's pipeline engine are not read; run ds_to_universal on it first"
    elif any((m := _MODEL_FILE.fullmatch(file)) and int(m[1]) > 0 for file in files):
        reason = "several mp_rank files (tensor parallelism) are not read; run ds_to_universal on it first"
    elif "mp_rank_00_model_states.pt" not in files:
        reason = "has no mp_rank_00_model_states.pt"
    if reason:
        raise CheckpointError(f"{folder}: {reason}")


# ---- universal


def _recognise_universal(path: Path) -> bool:
    zero = _tagged(path, "latest_universal") / "zero"
    return zero.is_dir() and any(os.path.exists(entry.path + "/fp32.pt") for entry in os.scandir(zero))


class UniversalSource(ForeignSource):
    """A universal checkpoint: masters and, where they are there, moments."""

    def __init__(self, path: Path, model_config: Path | None = None) -> None:
        folder = _tagged(path, "latest_universal")
        about = describe(path, model_config, "DeepSpeed's universal checkpoints")
        header: Any = {}
        if (folder / "mp_rank_00_model_states.pt").exists():
            header = read_torch(folder / "mp_rank_00_model_states.pt")
            if not isinstance(header, dict):
                raise CheckpointError(f"{folder}/mp_rank_00_model_states.pt: is a {type(header).__name__}, not a dict")
        super().__init__(
            folder,
            "universal",
            about.run,
            step=about.step or count_of(header.get("global_steps")) or count_of(header.get("iteration")),
            consumed_samples=about.consumed_samples or count_of(header.get("consumed_samples")),
            token_ids=about.token_ids,
            generation=about.generation,
        )
        module = header.get("module") if isinstance(header.get("module"), dict) else {}
        for name, value in module.items():
            if name.endswith(".expert_bias") and isinstance(value, torch.Tensor):
                self.buffers[name] = value.clone()
        self._folders: dict[str, Path] = {}
        for entry in sorted(os.scandir(folder / "zero"), key=lambda entry: entry.name):
            name = plain_name(entry.name)
            if entry.is_dir() and name is not None:
                self._folders[name] = Path(entry.path)
        found: dict[str, dict[str, TensorInfo]] = {}
        for kind, file in _STATE_FILES.items():
            holders = [name for name, inner in self._folders.items() if (inner / file).exists()]
            if kind != MASTER and not holders:
                continue
            tensors = {name: self._tensor(name, kind) for name in holders}
            found[kind] = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        first = next(iter(self._folders.values()), folder)
        if (first / "step.pt").exists():
            self.optimizer_steps = _steps(first / "step.pt")
        self.map_tensors(_recognise_names(folder, found[MASTER], self.model), found)

    def fetch(self, key: str, kind: str) -> torch.Tensor:
        return self._tensor(key, kind)

    def files_to_check(self) -> list[Path]:
        return [file for folder in self._folders.values() for file in sorted(folder.glob("*.pt"))]

    def _tensor(self, name: str, kind: str) -> torch.Tensor:
        path = self._folders[name] / _STATE_FILES[kind]
        content = read_torch(path)
        tensor = content.get("param") if isinstance(content, dict) else content
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{path}: holds no tensor 'param'")
        return tensor


def _steps(path: Path) -> int:
    content = read_torch(path)
    try:
        return int(content)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: holds {str(content)[:50]!r}, not a number of steps; copy it again") from error


def _universal_destination(source: Source, options: Options) -> Destination:
    """Prepares masters (or weights in fp32) and, where the source has them, moments."""
    tensors = named_tensors(options.names, source.model)
    kinds = (MASTER, *MOMENTS) if source.is_full else (source.weight_kind("fp32"),)
    fp32 = Options(dtype="fp32")
    steps = torch.tensor(float(source.step if source.optimizer_steps is None else source.optimizer_steps))
    columns = [write_items(source, tensors, kind, fp32) for kind in kinds]
    listed = [
        OutputTensor(f"{item.key}/{_STATE_FILES.get(kind, 'fp32.pt')}", item.dtype, item.shape)
        for kind, column in zip(kinds, columns, strict=True)
        for item in column
    ]
    tag = f"global_step{source.step}_universal"

    def write(directory: Path) -> None:
        zero = directory / tag / "zero"
        zero.mkdir(parents=True)
        scratch = ScratchFile(zero)
        for row in zip(*columns, strict=True):
            folder = zero / row[0].key
            folder.mkdir()
            for kind, item in zip(kinds, row, strict=True):
                [tensor] = scratch.collect([item]).values()
                write_torch(folder / _STATE_FILES.get(kind, "fp32.pt"), {"param": tensor, "cat_dim": 0})
            if source.is_full:
                write_torch(folder / "step.pt", steps)
            sync_directory(folder)
        scratch.close()
        state = {"param_groups": [{} for _ in range(_NUM_GROUPS)], "ds_version": "0.19.8"}
        write_torch(zero / "optimizer_state.pt", state)
        write_torch(directory / tag / "mp_rank_00_model_states.pt", _model_states(source, dict(source.buffers)))
        write_new(directory / "latest_universal", tag.encode())
        write_sidecar(directory, source)

    return Destination(listed, write, UniversalSource)


ZERO = Format("zero", "latest", _recognise_zero, ZeroSource, _zero_destination)
UNIVERSAL = Format("universal", "latest_universal", _recognise_universal, UniversalSource, _universal_destination)
