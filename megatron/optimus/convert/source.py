"""What every format gives: named tensors of our model, readable range by range."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.shards import dtype_name
from megatron.optimus.config.schema import ModelConfig, RunConfig
from megatron.optimus.convert.tensor_map import Part, Scatter, row_width
from megatron.optimus.models.parameters import parameter_shapes

WEIGHT, MASTER, MOMENTS = "weight", "master", ("exp_avg", "exp_avg_sq")
Key = tuple[str, str]  # our parameter name, kind
_MOST_MATRICES = 1 << 20  # of a model's layers and experts, 20 times Mula-220B's: what a file says is not believed


@dataclass
class Source(ABC):
    """An opened checkpoint. ``dtypes``: what it holds, for every parameter of the model the same kinds."""

    path: Path
    format: str
    run: RunConfig
    step: int = 0
    consumed_samples: int = 0
    optimizer_steps: int | None = None  # updates the moments have seen; None when unknown
    token_ids: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)  # a Hugging Face generation_config.json; empty: none
    tokenizer: Path | None = None
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # small: biases that steer the choice of experts
    dtypes: dict[Key, torch.dtype] = field(default_factory=dict)
    resources: list[Any] = field(default_factory=list)  # open files, closed with the source

    def __post_init__(self) -> None:
        layers, experts = self.model.num_layers, self.model.num_experts or 0
        if layers * (1 + experts) > _MOST_MATRICES:
            raise CheckpointError(
                f"{self.path}: its configuration says num_layers={layers}, num_experts={experts}; "
                f"layers x (1 + experts) may be {_MOST_MATRICES} at most"
            )

    @abstractmethod
    def read(self, name: str, kind: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, whole rows of it, in the stored dtype."""

    def finish(self) -> None:  # noqa: B027 - most have nothing to do
        """Checks what has been read and not been compared with a hash yet. Raises CheckpointError naming the tensor."""

    def close(self) -> None:
        for resource in self.resources:
            resource.close()

    def files_to_check(self) -> list[Path]:
        """Files of torch.save whose checksums nobody looks at while they are read."""
        return []

    @property
    def model(self) -> ModelConfig:
        return self.run.model

    @property
    def kinds(self) -> set[str]:
        return {kind for _, kind in self.dtypes}

    @property
    def is_full(self) -> bool:
        """Training can go on from it: masters and both moments of everything."""
        return {MASTER, *MOMENTS} <= self.kinds

    def weight_kind(self, dtype: str | None) -> str:
        """What an export of weights reads: those the model computes with, unless fp32 is asked for and kept."""
        if WEIGHT not in self.kinds or (dtype in ("fp32", "source") and MASTER in self.kinds):
            return MASTER
        return WEIGHT


@dataclass(frozen=True)
class Foreign:
    """One tensor of a foreign file: ``read`` may map it instead of copying it."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class ForeignSource(Source):
    """A source made of foreign tensors that ``parts`` places in ours."""

    def place(self, parts: list[Part], found: Mapping[str, Mapping[str, Foreign]]) -> None:
        """``found``: kind -> foreign tensors by key. Raises CheckpointError naming what is missing or wrong."""
        shapes = parameter_shapes(self.model)
        expected = {part.key: part for part in parts}
        for tensors in found.values():
            same_names(self.path, set(tensors), set(expected))
            for key, tensor in tensors.items():
                if tensor.shape != expected[key].shape:
                    raise CheckpointError(
                        f"{self.path}: {key} has shape {tensor.shape}, its configuration says {expected[key].shape}"
                    )
        self._scatter = Scatter(parts, shapes, str(self.path))
        for kind, tensors in found.items():
            for name in shapes:
                dtypes = {tensors[part.key].dtype for part in self._scatter.parts_of(name)}
                if len(dtypes) > 1:
                    raise CheckpointError(
                        f"{self.path}: the parts of {name} have different dtypes: {sorted(map(str, dtypes))}"
                    )
                self.dtypes[name, kind] = dtypes.pop()
                dtype_name(self.dtypes[name, kind])  # raises for what cannot be stored

    @abstractmethod
    def fetch(self, key: str, kind: str) -> torch.Tensor:
        """A whole foreign tensor."""

    def read(self, name: str, kind: str, start: int, stop: int) -> torch.Tensor:
        return self._scatter.read(name, start, stop, lambda key: self.fetch(key, kind))


def units(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """(name, start, stop): our tensors cut so that one at a time fits in memory: experts' gate, up and down apart."""
    for name, shape in parameter_shapes(model).items():
        count = 1
        if len(shape) == 3:
            count = shape[0] * (2 if name.endswith("gate_up_weight") else 1)
        size = int(torch.Size(shape).numel()) // count
        assert size % row_width(shape) == 0
        for index in range(count):
            yield name, index * size, (index + 1) * size


def same_names(source: Path, found: set[str], expected: set[str]) -> None:
    """Raises CheckpointError listing what lacks and what is surplus."""
    problems = []
    for problem, names in (("lacks", expected - found), ("has unexpected", found - expected)):
        if names:
            some = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
            problems.append(f"{problem} {len(names)} tensors for its configuration: {some}")
    if problems:
        raise CheckpointError(f"{source}: {'; '.join(problems)}")
