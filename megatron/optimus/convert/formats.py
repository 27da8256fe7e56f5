"""The interface of a checkpoint format: how it is read as a source, and how it is written as a destination.

A conversion opens a source, which gives any range of any tensor of our model, and makes a destination, which asks the
source for the ranges it needs and writes one matrix at a time. To add a format, write a file with

    recognise(path) -> bool                  whether a folder holds it
    a subclass of Source                     or of ForeignSource, if its tensors are laid out in another way than ours
    a function (source, options) -> Destination
    FORMAT = Format(...)                     which names these three

and list FORMAT in ``convert/__init__.py``. tensor_map.py describes foreign layouts, sidecar.py what a source must know
besides its tensors, torch_files.py reads and writes files of torch.save.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.shards import WriteItem, dtype_name
from megatron.optimus.config.schema import ModelConfig, RunConfig, TokenizerType
from megatron.optimus.convert.tensor_map import ForeignTensor, RangeReader, assemble, row_width
from megatron.optimus.models.parameters import parameter_shapes

WEIGHT, MASTER, MOMENTS = "weight", "master", ("exp_avg", "exp_avg_sq")
AVERAGE = "ema"  # the moving average of a run with ema_decay, beside its masters
DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MAX_MATRICES = 1 << 20  # of a model's layers and experts, 20 times Mula-220B's: what a file says is not believed


@dataclass(frozen=True)
class CardOptions:
    """What the command line says of an export's model card.

    Args:
        title: the model's name.
        license: an identifier of the hub such as "apache-2.0", or the name of another one; None: not known.
        evaluations: files of results that `optimus evaluate --out` or lm-eval wrote.
    """

    title: str = ""
    license: str | None = None
    evaluations: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Options:
    """How a destination is written.

    Args:
        dtype: "fp32", "bf16", "source", or None: as stored, but masters in the dtype the run computed with.
        tokenizer: for Hugging Face, the file or folder of a tokenizer; None: the one the run was trained with.
        max_shard_bytes: size of a safetensors file, unless one tensor is larger.
        names: of parameters in DeepSpeed's formats, one of ``deepspeed.NAMES``.
        tp: tensor-parallel ranks of Megatron's files.
        pp: pipeline-parallel ranks of Megatron's files.
        ep: expert-parallel ranks of Megatron's files.
        transformer_engine: Megatron's names for its modules with Transformer Engine rather than for the local ones.
        tokenizer_type: type of ``tokenizer``; None: as its file says.
        card: for Hugging Face, what the model card says.

    Raises:
        CheckpointError: a value is not allowed.
    """

    dtype: str | None = None
    tokenizer: Path | None = None
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES
    names: str = "optimus"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    transformer_engine: bool = True
    tokenizer_type: TokenizerType | None = None
    card: CardOptions = CardOptions()

    def __post_init__(self) -> None:
        if self.dtype not in (None, "source", *DTYPES):
            raise CheckpointError(f"--dtype {self.dtype}: must be one of {', '.join(DTYPES)}, source")
        if self.max_shard_bytes < 1:
            raise CheckpointError(f"--max-shard-size: {self.max_shard_bytes} bytes must be at least 1")
        for flag, value in (("tensor", self.tp), ("pipeline", self.pp), ("expert", self.ep)):
            if value < 1:
                raise CheckpointError(f"--target-{flag}-parallel-size {value}: must be at least 1")


@dataclass(frozen=True)
class TensorInfo:
    """Dtype and shape of a tensor in a file of another format."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of a destination."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Destination:
    """What a conversion will write.

    Args:
        tensors: for listing them before anything is written.
        write: fills an empty folder.
        open: reads that folder back, for the comparison with the source.
        files: their names, where they are known beforehand.
    """

    tensors: list[OutputTensor]
    write: Callable[[Path], None]
    open: Callable[[Path], Source]
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Format:
    """A checkpoint format.

    Args:
        name: as ``--to`` has it.
        mark: a file at the top of every folder that is written in it. ``--overwrite`` deletes no folder without one.
        recognise: whether a folder holds a checkpoint of this format.
        open: opens one; the second argument is ``--model-config``. Raises CheckpointError or ConfigError.
        destination: prepares one from a source. Raises CheckpointError or ConfigError for a model without equivalent.
    """

    name: str
    mark: str
    recognise: Callable[[Path], bool]
    open: Callable[[Path, Path | None], Source]
    destination: Callable[[Source, Options], Destination]


# ---- sources


@dataclass
class Source(ABC):
    """An opened checkpoint. ``dtypes`` says what it holds: the same kinds for every parameter of the model."""

    path: Path
    format: str
    run: RunConfig
    step: int = 0
    consumed_samples: int = 0
    optimizer_steps: int | None = None  # updates the moments have seen; None when unknown
    token_ids: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)  # a Hugging Face generation_config.json; empty: none
    tokenizer: Path | None = None
    tokenizer_hashes: tuple[Any, ...] = ()  # XXH3-128 of the files of its run's tokenizer, as the source claims them
    tokenizer_identity: dict[str, Any] | None = None  # of the tokenizer that its data were made with
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # small: biases that steer the choice of experts
    dtypes: dict[tuple[str, str], torch.dtype] = field(default_factory=dict)  # by our parameter's name and kind
    layout: dict[str, Any] = field(default_factory=dict)  # sizes of the run's ranks, and their device
    packages: dict[str, Any] = field(default_factory=dict)  # versions that the run was made with
    resources: list[Any] = field(default_factory=list)  # open files, closed with the source

    def __post_init__(self) -> None:
        layers, experts = self.model.num_layers, self.model.num_experts or 0
        if layers * (1 + experts) > _MAX_MATRICES:
            raise CheckpointError(
                f"{self.path}: its configuration says num_layers={layers}, num_experts={experts}; "
                f"layers x (1 + experts) may be {_MAX_MATRICES} at most"
            )

    @abstractmethod
    def read(self, name: str, kind: str, start: int, stop: int) -> torch.Tensor:
        """Reads elements [start, stop) of one of our tensors, flattened.

        Args:
            name: our parameter's name.
            kind: one of ``kinds``.
            start: the first element of a row.
            stop: the element after the last of a row.

        Returns:
            A 1-D tensor in the stored dtype, which may share memory with the file.
        """

    def use_average(self) -> None:
        """Reads the moving average of the weights from now on. Raises CheckpointError where the source holds none."""
        raise CheckpointError(
            f"{self.path}: --weights ema is for a full Optimus checkpoint, and this is {self.format!r}"
        )

    def finish(self) -> None:  # noqa: B027 - most have nothing to do
        """Checks hashes of what has been read and not been checked yet. Raises CheckpointError naming the tensor."""

    def close(self) -> None:
        """Closes the open files."""
        for resource in self.resources:
            resource.close()

    def files_to_check(self) -> list[Path]:
        """Files of torch.save, whose checksums are not looked at while they are read."""
        return []

    @property
    def model(self) -> ModelConfig:
        """The model section of the run's configuration."""
        return self.run.model

    @property
    def kinds(self) -> set[str]:
        """The kinds of tensors that it holds of every parameter."""
        return {kind for _, kind in self.dtypes}

    @property
    def is_full(self) -> bool:
        """Whether training can go on from it: it has masters and both moments of everything."""
        return {MASTER, *MOMENTS} <= self.kinds

    def weight_kind(self, dtype: str | None) -> str:
        """The kind that an export of weights reads: "weight", or masters where fp32 is asked for and kept."""
        if WEIGHT not in self.kinds or (dtype in ("fp32", "source") and MASTER in self.kinds):
            return MASTER
        return WEIGHT


class ForeignSource(Source):
    """A source whose tensors are laid out in another way than ours."""

    def map_tensors(self, tensors: list[ForeignTensor], found: Mapping[str, Mapping[str, TensorInfo]]) -> None:
        """Says how the source's tensors hold ours; ``read`` and ``dtypes`` follow from it.

        Args:
            tensors: those that a complete source of this model has.
            found: kind -> what the files hold, by key.

        Raises:
            CheckpointError: a tensor is missing or surplus, or its shape or dtype is wrong; the message names it.
        """
        shapes = parameter_shapes(self.model)
        expected = {tensor.key: tensor for tensor in tensors}
        for infos in found.values():
            check_names(self.path, set(infos), set(expected))
            for key, info in infos.items():
                if info.shape != expected[key].shape:
                    raise CheckpointError(
                        f"{self.path}: {key} has shape {info.shape}, its configuration says {expected[key].shape}"
                    )
        self._ranges = RangeReader(tensors, shapes, str(self.path))
        for kind, infos in found.items():
            for name in shapes:
                dtypes = {infos[tensor.key].dtype for tensor in self._ranges.tensors_of(name)}
                if len(dtypes) > 1:
                    raise CheckpointError(
                        f"{self.path}: the parts of {name} have different dtypes: {sorted(map(str, dtypes))}"
                    )
                self.dtypes[name, kind] = dtypes.pop()
                dtype_name(self.dtypes[name, kind])  # raises for what cannot be stored

    @abstractmethod
    def fetch(self, key: str, kind: str) -> torch.Tensor:
        """Reads a whole tensor of the source."""

    def read(self, name: str, kind: str, start: int, stop: int) -> torch.Tensor:
        return self._ranges.read(name, start, stop, lambda key: self.fetch(key, kind))


def matrices(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Gives (name, start, stop) of our tensors, cut so that one fits in memory: an expert's gate, up and down apart."""
    for name, shape in parameter_shapes(model).items():
        count = 1
        if len(shape) == 3:
            count = shape[0] * (2 if name.endswith("gate_up_weight") else 1)
        size = math.prod(shape) // count
        assert size % row_width(shape) == 0
        for index in range(count):
            yield name, index * size, (index + 1) * size


def check_names(source: Path, found: set[str], expected: set[str]) -> None:
    """Raises CheckpointError listing the names that are missing and those that are surplus."""
    problems = []
    for problem, names in (("lacks", expected - found), ("has unexpected", found - expected)):
        if names:
            some = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
            problems.append(f"{problem} {len(names)} tensors for its configuration: {some}")
    if problems:
        raise CheckpointError(f"{source}: {'; '.join(problems)}")


# ---- destinations


def written_dtype(source: Source, name: str, kind: str, dtype: str | None) -> torch.dtype:
    """The dtype that ``--dtype`` asks for; default: as stored, masters in ``params_dtype``. Moments: as stored."""
    stored = source.dtypes[name, kind]
    if dtype == "source" or (dtype is None and kind == WEIGHT) or kind in MOMENTS:
        return stored
    return DTYPES[dtype or source.run.training.params_dtype.value]


def write_items(source: Source, tensors: Iterable[ForeignTensor], kind: str, options: Options) -> list[WriteItem]:
    """Makes the foreign tensors of one kind, each assembled when it is written."""
    shapes = parameter_shapes(source.model)

    def read_range(name: str, start: int, stop: int) -> torch.Tensor:
        return source.read(name, kind, start, stop)

    items = []
    for tensor in tensors:
        # A rank may hold nothing but padding of the vocabulary.
        name = tensor.submatrices[0].name if tensor.submatrices else "embedding.weight"
        dtype = written_dtype(source, name, kind, options.dtype)
        items.append(WriteItem(tensor.key, dtype, tensor.shape, partial(assemble, tensor, shapes, read_range, dtype)))
    return items


def output_tensors(items: Iterable[WriteItem]) -> list[OutputTensor]:
    """Lists tensors that are to be written, for ``Destination``."""
    return [OutputTensor(item.key, item.dtype, item.shape) for item in items]


def split_by_size(items: Iterable[WriteItem], max_bytes: int) -> list[list[WriteItem]]:
    """Splits items into consecutive groups of at most ``max_bytes``; a larger item is a group of its own."""
    groups: list[list[WriteItem]] = []
    held = 0
    for item in items:
        if not groups or held + item.num_bytes > max_bytes:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += item.num_bytes
    return groups
