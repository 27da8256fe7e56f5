"""DeepSpeed's universal checkpoints: one folder per parameter, whole tensors in fp32.

latest_universal                                          the tag
global_step100_universal/mp_rank_00_model_states.pt       bookkeeping
global_step100_universal/zero/optimizer_state.pt          hyperparameters of the groups
global_step100_universal/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.convert.names import parts_under, plain_name, recognise_names
from megatron.optimus.convert.request import Options, Plan, Written, part_items
from megatron.optimus.convert.sidecar import describe, write_sidecar
from megatron.optimus.convert.source import MASTER, MOMENTS, Foreign, ForeignSource, Source
from megatron.optimus.convert.torch_files import Spool, read_torch, write_torch
from megatron.optimus.convert.zero import model_states, tagged
from megatron.optimus.platform.files import sync_directory, write_new

_FILES = {MASTER: "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}
# DeepSpeed pairs its parameter groups with those in the file and silently leaves out what has no partner. An empty
# entry changes nothing in its group, so there are enough of them.
_GROUPS = 64


def recognise(path: Path) -> bool:
    zero = tagged(path, "latest_universal") / "zero"
    return zero.is_dir() and any(os.path.exists(entry.path + "/fp32.pt") for entry in os.scandir(zero))


class UniversalSource(ForeignSource):
    """Masters and, where they are, moments."""

    def __init__(self, path: Path, model_config: Path | None = None) -> None:
        folder = tagged(path, "latest_universal")
        about = describe(path, model_config, "DeepSpeed's universal checkpoints")
        header: Any = {}
        if (folder / "mp_rank_00_model_states.pt").exists():
            header = read_torch(folder / "mp_rank_00_model_states.pt")
            if not isinstance(header, dict):
                raise CheckpointError(f"{folder}/mp_rank_00_model_states.pt: is a {type(header).__name__}, not a dict")
        numbers = {name: header.get(name) for name in ("iteration", "global_steps", "consumed_samples")}
        counts = {name: value for name, value in numbers.items() if type(value) is int and value >= 0}
        super().__init__(
            folder,
            "universal",
            about.run,
            step=about.step or counts.get("global_steps") or counts.get("iteration", 0),
            consumed_samples=about.consumed_samples or counts.get("consumed_samples", 0),
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
        found: dict[str, dict[str, Foreign]] = {}
        for kind, file in _FILES.items():
            holders = [name for name, inner in self._folders.items() if (inner / file).exists()]
            if kind != MASTER and not holders:
                continue
            tensors = {name: self._tensor(name, kind) for name in holders}
            found[kind] = {name: Foreign(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        first = next(iter(self._folders.values()), folder)
        if (first / "step.pt").exists():
            self.optimizer_steps = _steps(first / "step.pt")
        self.place(recognise_names(folder, found[MASTER], self.model), found)

    def fetch(self, key: str, kind: str) -> torch.Tensor:
        return self._tensor(key, kind)

    def files_to_check(self) -> list[Path]:
        return [file for folder in self._folders.values() for file in sorted(folder.glob("*.pt"))]

    def _tensor(self, name: str, kind: str) -> torch.Tensor:
        path = self._folders[name] / _FILES[kind]
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


def plan(source: Source, options: Options) -> Plan:
    """Masters (or weights in fp32) and, where the source has them, moments."""
    parts = parts_under(options.names, source.model)
    kinds = (MASTER, *MOMENTS) if source.is_full else (source.weight_kind("fp32"),)
    fp32 = Options(dtype="fp32")
    steps = torch.tensor(float(source.step if source.optimizer_steps is None else source.optimizer_steps))
    columns = [part_items(source, parts, kind, fp32) for kind in kinds]
    listed = [
        Written(f"{item.key}/{_FILES.get(kind, 'fp32.pt')}", item.dtype, item.shape)
        for kind, column in zip(kinds, columns, strict=True)
        for item in column
    ]
    tag = f"global_step{source.step}_universal"

    def write(directory: Path) -> None:
        zero = directory / tag / "zero"
        zero.mkdir(parents=True)
        spool = Spool(zero)
        for row in zip(*columns, strict=True):
            folder = zero / row[0].key
            folder.mkdir()
            for kind, item in zip(kinds, row, strict=True):
                tensors = spool.collect([item])
                write_torch(folder / _FILES.get(kind, "fp32.pt"), {"param": tensors[item.key], "cat_dim": 0})
            if source.is_full:
                write_torch(folder / "step.pt", steps)
            sync_directory(folder)
        spool.close()
        state = {"param_groups": [{} for _ in range(_GROUPS)], "ds_version": "0.19.8"}
        write_torch(zero / "optimizer_state.pt", state)
        write_torch(directory / tag / "mp_rank_00_model_states.pt", model_states(source, dict(source.buffers)))
        write_new(directory / "latest_universal", tag.encode())
        write_sidecar(directory, source)

    return Plan(listed, write, UniversalSource)
