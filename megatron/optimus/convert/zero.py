"""Checkpoints of DeepSpeed's engine with ZeRO stage 0, 1 or 2, dense and with its native MoE layer.

    latest                                              the tag
    global_step100/mp_rank_00_model_states.pt           weights without experts, bookkeeping
    global_step100/layer_L_expert_E_mp_rank_00_model_states.pt      one expert of one MoE layer
    global_step100/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt masters and moments that rank R owns

An owner's states are flat: every parameter group is one vector cut into equal shares, and ``param_slice_mappings`` says
which parameter lies where in a share. A parameter is therefore put together from the shares in rank order. Experts are
sharded over the ranks that hold the same experts and are named by their number on the rank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.shards import ShardItem, read_small_file
from megatron.optimus.convert.names import parts_under, plain_name, recognise_names
from megatron.optimus.convert.request import Options, Plan, Written, part_items
from megatron.optimus.convert.sidecar import describe, write_sidecar
from megatron.optimus.convert.source import (
    MASTER,
    MOMENTS,
    WEIGHT,
    Foreign,
    ForeignSource,
    Source,
    same_names,
)
from megatron.optimus.convert.torch_files import Spool, read_torch, write_torch
from megatron.optimus.platform.files import write_new

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_MODEL_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_EXPERT_FILE = re.compile(r"layer_\d+_expert_(\d+)_mp_rank_\d+_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_EXPERT_NAME = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
_WITHOUT_POINTER = "give the checkpoint's own folder as the source"


def tagged(path: Path, pointer: str) -> Path:
    """The checkpoint that a text file names, or ``path`` itself when there is no such file.

    Raises CheckpointError when the file names none.
    """
    if not (path / pointer).is_file():
        return path
    # A link, as in a hub's cache, does no harm: what it leads to must be a plain name.
    tag = read_small_file((path / pointer).resolve(), 4096).decode("utf-8", "replace").strip()
    if not _TAG.fullmatch(tag) or ".." in tag:
        raise CheckpointError(f"{path / pointer}: {tag[:100]!r} is not the plain name of a folder; {_WITHOUT_POINTER}")
    if not (path / tag).is_dir():
        raise CheckpointError(f"{path / pointer}: names {tag!r}, there is no such folder beside it; {_WITHOUT_POINTER}")
    return path / tag


def recognise(path: Path) -> bool:
    folder = tagged(path, "latest")
    return folder.is_dir() and any(file.name.endswith("_model_states.pt") for file in folder.iterdir())


@dataclass
class _Fragments:
    """One parameter's flat pieces of each kind, in rank order."""

    shape: tuple[int, ...]
    pieces: dict[str, list[torch.Tensor]]


class ZeroSource(ForeignSource):
    """Weights, and where optimizer files are there masters and moments."""

    def __init__(self, path: Path, model_config: Path | None = None) -> None:
        folder = tagged(path, "latest")
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
            step=_count(header.get("global_steps")),
            consumed_samples=_count(header.get("consumed_samples", header.get("global_samples"))),
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
        found = {WEIGHT: {name: Foreign(tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}}
        owners = {int(m[1]): folder / f for f in files if (m := _OPTIMIZER_FILE.fullmatch(f))}
        parts = recognise_names(folder, found[WEIGHT], self.model)
        same_names(folder, set(weights), {part.key for part in parts})
        if owners:
            world = _count(header.get("dp_world_size")) or len(owners)
            self._read_owners(owners, world)
            tensors = {name: Foreign(torch.float32, one.shape) for name, one in self._fragments.items()}
            found |= dict.fromkeys((MASTER, *MOMENTS), tensors)
        self.place(parts, found)

    def fetch(self, key: str, kind: str) -> torch.Tensor:
        if kind == WEIGHT:
            return self._weights[key]
        one = self._fragments[key]
        pieces = one.pieces[kind]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(one.shape)

    def files_to_check(self) -> list[Path]:
        return sorted(self.path.glob("*.pt"))

    def _drop_tied(self, weights: dict[str, torch.Tensor]) -> None:
        """A tied output projection is stored twice under two names."""
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
            for kind, pieces in one.pieces.items():
                held = sum(piece.numel() for piece in pieces)
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
                        one.pieces[kind].append(tensor.narrow(0, address.start, address.numel))
        except (AttributeError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).split("\n")[0]
            raise CheckpointError(
                f"{file}: not an optimizer file of ZeRO stage 1 or 2: {reason}; copy it again, or convert the weights "
                "alone from a folder without the optimizer files"
            ) from error

    def _global_name(self, name: str, ep_rank: int, ep_size: int) -> str:
        """Experts are numbered on their rank: expert i of rank r is r * (experts per rank) + i."""
        match = _EXPERT_NAME.fullmatch(name)
        if match is None or ep_size == 1:
            return name
        return f"{match[1]}{ep_rank * (self.model.num_experts // ep_size) + int(match[2])}{match[3]}"


def plan(source: Source, options: Options) -> Plan:
    """Weights, as the engine loads them with ``load_module_only=True``; moments travel in the universal format."""
    kind = source.weight_kind(options.dtype)
    items = part_items(source, parts_under(options.names, source.model), kind, options)
    dense = [item for item in items if ".deepspeed_experts." not in item.key]
    experts: dict[str, list[ShardItem]] = defaultdict(list)
    for item in items:
        match = re.search(r"layers\.(\d+)\..*\.deepspeed_experts\.(\d+)\.", item.key)
        if match:
            number = source.model.moe_layers.index(int(match[1]))  # DeepSpeed counts the layers that have experts
            experts[f"layer_{number}_expert_{match[2]}_mp_rank_00_model_states.pt"].append(item)
    tag = f"global_step{source.step}"

    def write(directory: Path) -> None:
        folder = directory / tag
        folder.mkdir()
        spool = Spool(folder)
        module = spool.collect(dense) | source.buffers
        write_torch(folder / "mp_rank_00_model_states.pt", model_states(source, module))
        spool.close()
        for file, group in experts.items():
            write_torch(folder / file, spool.collect(group))
            spool.close()
        write_new(directory / "latest", tag.encode())
        write_sidecar(directory, source)

    return Plan([Written(item.key, item.dtype, item.shape) for item in items], write, ZeroSource)


def model_states(source: Source, module: dict[str, Any]) -> dict[str, Any]:
    """What the engine wants to find in mp_rank_00_model_states.pt."""
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


def flat_names(module: Any) -> dict[str, torch.Tensor]:
    """Plain name -> tensor; Megatron nests dictionaries."""
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


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0
