"""Loads DeepSpeed's universal checkpoints, one folder per parameter with whole fp32 tensors, at any layout.

latest_universal                                          the tag
TAG/mp_rank_00_model_states.pt                            counters, scheduler, buffers, client state
TAG/zero/optimizer_state.pt                               hyperparameters of the groups, the loss scale
TAG/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt    master weights and states

A rank reads what it owns. Of a tensor that holds all experts, expert-parallel rank i of n reads the i-th of n parts;
where every expert is a module of its own (``experts.<number>.``), it reads the modules with its numbers. (DeepSpeed
0.19.8 itself gives every expert-parallel rank the experts of the first.)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ext.groups import ZeroGroups, expert_group_name, ranks_of, world_group
from deepspeed_ext.optimizers.base import AVERAGE
from deepspeed_ext.torch_files import check_bytes, read_torch
from deepspeed_ext.zero.optimizer import EPZeroOptimizer
from deepspeed_ext.zero.sharded_state import StateShard, has_whole_states
from deepspeed_ext.zero.stock_files import load_options
from deepspeed_ext.zero.sync_errors import gather, run_on_all_ranks

_MODEL_STATES = "mp_rank_00_model_states.pt"
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_NUMBERED = re.compile(r"(.*experts\.)(\d+)(\..*)")
_FILE_OF = {"master": "fp32"}  # states are in files of their own names
_ENGINE_KEYS = {"module", "optimizer", "lr_scheduler", "skipped_steps", "global_steps", "global_samples"}
_ENGINE_KEYS |= {"dp_world_size", "mp_world_size", "data_sampler", "random_ltd"}


def locate(load_dir: str, tag: str | None) -> Path:
    """Returns the folder of a tag, None: of the one that ``latest_universal`` names. Raises ValueError without one."""
    pointer = Path(load_dir) / "latest_universal"
    if tag is None:
        if not pointer.is_file():
            raise ValueError(f"{pointer} does not exist; convert the checkpoint, or pass tag=")
        tag = pointer.read_text().strip()
        if not _TAG.fullmatch(tag):
            raise ValueError(f"{pointer}: {tag[:100]!r} is not the plain name of a folder")
    folder = Path(load_dir) / str(tag)
    if not (folder / "zero").is_dir():
        raise ValueError(f"{folder} has no folder 'zero': it is not a universal checkpoint, see ds_to_universal")
    return folder


class _ExpertParts:
    """Finds which part of the experts this rank holds. Construction is collective over the dense group."""

    def __init__(self, groups: ZeroGroups, names: Mapping[nn.Parameter, str]) -> None:
        mine = {group: min(ranks_of(ranks)) for group, ranks in groups.expert.items()}
        all_ranks = gather(mine, groups.dense).values()
        self._first_ranks = {
            group: sorted({firsts[group] for firsts in all_ranks if group in firsts}) for group in mine
        }
        self._mine = mine
        numbered = [(param, _NUMBERED.fullmatch(name)) for param, name in names.items()]
        self._held = Counter(m[1] + m[3] for param, m in numbered if m and expert_group_name(param) is not None)

    def part(self, param: nn.Parameter) -> tuple[int, int]:
        """Returns (i, n): this rank holds the i-th of n parts of the experts; (0, 1) for a dense parameter."""
        group = expert_group_name(param)
        if group is None:
            return 0, 1
        firsts = self._first_ranks[group]
        return firsts.index(self._mine[group]), len(firsts)

    def name(self, param: nn.Parameter, name: str) -> str:
        """Returns a parameter's name with the number of its expert among all, where every expert is a module."""
        match = _NUMBERED.fullmatch(name)
        if match is None or expert_group_name(param) is None:
            return name
        number = self.part(param)[0] * self._held[match[1] + match[3]] + int(match[2])
        return f"{match[1]}{number}{match[3]}"


def _local(zero: Path, param: nn.Parameter, name: str, kind: str, expert_parts: _ExpertParts) -> Tensor:
    """Maps this rank's part of one file of a parameter, flattened. Raises ValueError if there is none that fits."""
    file = f"{_FILE_OF.get(kind, kind)}.pt"
    index, parts = expert_parts.part(param)
    shape = tuple(param.shape)
    path = zero / name / file
    if parts > 1 and path.exists():
        whole = _tensor(path)
        if tuple(whole.shape) == (shape[0] * parts, *shape[1:]):
            return whole[index * shape[0] : (index + 1) * shape[0]].reshape(-1)
    path = zero / expert_parts.name(param, name) / file
    whole = _tensor(path)
    if tuple(whole.shape) != shape or (parts > 1 and not _NUMBERED.fullmatch(name)):
        needed = f"{shape}, as one of {parts} parts of the experts" if parts > 1 else str(shape)
        split = "; parameters split by tensor parallelism are not read" if param.numel() < whole.numel() else ""
        raise ValueError(f"{path} has shape {tuple(whole.shape)}, the model needs {needed}{split}")
    return whole.reshape(-1)


@torch.no_grad()
def load_optimizer(optimizer: EPZeroOptimizer, folder: Path, load_states: bool) -> None:
    """Loads master weights, and optionally all else of the optimizer. Collective over all ranks.

    Args:
        optimizer: is filled.
        folder: of the tag, see ``locate``.
        load_states: also load states, step count, hyperparameters and loss scale.

    Raises:
        ValueError: on every rank, before anything has changed, if any has a missing or damaged file, or another shape.
    """
    names = {param: name for flat_buffer in optimizer.flat_buffers for name, param in flat_buffer.params.items()}
    expert_parts = _ExpertParts(optimizer.groups, names)
    values: list[tuple[StateShard, str, Tensor]] = []  # mapped files: they take no memory
    steps: set[int] = set()

    def read() -> Any:
        if load_states and has_whole_states(optimizer):
            raise ValueError(
                f"{folder}: a universal checkpoint holds no states of whole matrices or tensors, which "
                f"{type(optimizer.optimizer).__name__} has; use load_optimizer_states=False"
            )
        files = sorted([*(folder / "zero").rglob("*.pt"), *folder.glob(_MODEL_STATES)])  # other files are not read
        for path in files[dist.get_rank() :: dist.get_world_size()]:
            check_bytes(path)  # each file by one rank; afterwards a rank reads only the parts that it needs
        for shard in optimizer.state_shards():
            for kind in [kind for kind in shard.tensors if kind != AVERAGE] if load_states else ["master"]:
                flat = _local(folder / "zero", shard.param, shard.name, kind, expert_parts)
                values.append((shard, kind, flat[shard.start : shard.stop]))
            count = folder / "zero" / expert_parts.name(shard.param, shard.name) / "step.pt"
            if load_states and count.exists():
                steps.add(int(read_torch(count)))
        if len(steps) > 1:
            raise ValueError(f"{folder}: parameters are of different steps, {sorted(steps)[:4]}")
        general = folder / "zero/optimizer_state.pt"
        return read_torch(general) if load_states and general.exists() else {}

    general = run_on_all_ranks(read, world_group())
    for shard, kind, value in values:
        shard.write(kind, value)
    if load_states:
        general = general if isinstance(general, dict) else {}
        load_options(optimizer, general, general.get("loss_scaler"))
        optimizer.restart_average()
    else:
        optimizer.restart_states()
    optimizer.sync_params_from_master()
    known = [int(step) for step in gather(max(steps, default=-1), world_group()).values()]
    if max(known) >= 0:  # a rank may own nothing
        optimizer.step_count = max(known)


def _tensor(path: Path) -> Tensor:
    content = read_torch(path)
    tensor = content.get("param") if isinstance(content, dict) else content
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{path} holds no tensor 'param'")
    return tensor


def load_engine(engine: Any, folder: Path, *, load_counters: bool, load_scheduler: bool) -> dict[str, Any]:
    """Loads buffers, frozen parameters, counters and scheduler from the file of model states. Collective.

    Args:
        engine: an EPEngine, which is filled.
        folder: of the tag, see ``locate``.
        load_counters: False loads buffers and frozen parameters only.
        load_scheduler: whether the learning-rate scheduler is loaded too.

    Returns:
        The client state: what else is in the file.
    """
    path = folder / _MODEL_STATES
    header = run_on_all_ranks(lambda: read_torch(path) if path.exists() else {}, world_group())
    header = header if isinstance(header, dict) else {}
    _load_module(engine.module, header.get("module"))
    if not load_counters:
        return {}
    engine.global_steps = int(header.get("global_steps", 0))
    engine.global_samples = int(header.get("global_samples", engine.global_steps * engine.train_batch_size()))
    engine.skipped_steps = int(header.get("skipped_steps", 0))
    if load_scheduler and engine.lr_scheduler is not None and header.get("lr_scheduler") is not None:
        engine.lr_scheduler.load_state_dict(header["lr_scheduler"])
    return {key: value for key, value in header.items() if key not in _ENGINE_KEYS}


@torch.no_grad()
def _load_module(module: nn.Module, saved: Any) -> None:
    """Loads buffers and frozen parameters of the same name and shape."""
    frozen = {name: param.data for name, param in module.named_parameters() if not param.requires_grad}
    for name, target in {**dict(module.named_buffers()), **frozen}.items():
        value = saved.get(name) if isinstance(saved, Mapping) else None
        if isinstance(value, Tensor) and value.shape == target.shape:
            target.copy_(value)
