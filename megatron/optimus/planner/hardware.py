"""Speeds and sizes of machines: the constants of the time model, one YAML file a machine, each figure with its source.

The files are in systems/; ``--system`` takes the name of one, or the path of a file of the user's own, as
``optimus plan --measure`` writes it (measure.py). A file has:

    extends: h200              a machine whose figures count where this file has none; they are not measured then
    device: NVIDIA H200        for people
    chip: H200                 part of the name that torch gives the device
    kernels: cuda              whose memory is planned: cuda, xpu or cpu (models/activations.py)
    devices_per_node: 8
    figures:                   those of ``Machine``
      memory: {value: 150109106995.2, source: torch.cuda.mem_get_info, measured: true}

Sources: "fitted" means least squares over the steps of one rank in benchmarks/results/planner_memory_h200.json
(docs/planner.md); "public": from the makers or operators of the machine; "assumed": neither.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.optimus.config.options import did_you_mean
from megatron.optimus.config.schema import ConfigError, one_of
from megatron.optimus.config.serialize import read_plain
from megatron.optimus.models.activations import CPU, CUDA, XPU, Kernels

_FOLDER = Path(__file__).parent / "systems"
KERNELS = {"cuda": CUDA, "xpu": XPU, "cpu": CPU}
_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Figure:
    """A number, where it is from, and whether we measured it on that machine."""

    value: float
    source: str
    is_measured: bool = False


@dataclass(frozen=True)
class Machine:
    """Rates in operations, bytes and seconds; devices as torch counts them."""

    name: str
    device: str
    chip: str  # part of the name that torch gives the device
    devices_per_node: int
    memory: Figure  # bytes of a device
    non_allocator_bytes: Figure  # bytes of it that torch's allocator does not hold, on a rank without communicators
    communicator: Figure  # further such bytes for each communicator that the rank is in
    slack: Figure  # what torch's allocator holds over what is in use, as a share
    peak: Figure  # dense bf16, for MFU
    products: Figure  # FLOP/s of dense matrix products in a step
    attention: Figure  # FLOP/s, causal counted at half, in sequences of 4,096 tokens and less
    attention_long: Figure  # in sequences of 131,072 tokens
    attention_deterministic: Figure  # share of these rates that is left with --deterministic
    experts: Figure  # FLOP/s of the grouped products with all that belongs to them
    wide: Figure  # FLOP/s of products in fp32: ring attention where it has no kernel
    traffic: Figure  # bytes/s of operations between products
    layer_time: Figure  # seconds a pass through a layer takes at least: launching its kernels
    host_time: Figure  # seconds the host takes for a pass through a layer
    step_time: Figure  # seconds a step takes besides
    intra_node_bandwidth: Figure  # bytes/s a rank sends inside a node, in a group of more than two
    two_rank_bandwidth: Figure  # in a group of two
    node_bandwidth: Figure  # bytes/s of a node to others
    host: Figure  # bytes/s between a device and host memory, one way
    latency: Figure  # seconds for each of log2(ranks) hops of a collective
    overlap_cost: Figure  # what communication beside computation costs, as a share of its time
    kernels: Kernels
    file: str  # where the figures are

    def usable(self, communicators: int) -> float:
        """Bytes for live tensors on a rank that is in so many communicators."""
        outside = self.non_allocator_bytes.value + communicators * self.communicator.value
        return (self.memory.value - outside) / (1 + self.slack.value)

    @property
    def is_measured(self) -> bool:
        """Whether its rate of products was measured by us."""
        return self.products.is_measured


# Least and most that a figure can be, and its unit.
_FLOPS, _BYTES, _RATE = (1e6, 1e19, "FLOP/s"), (0, 1e15, "bytes"), (1e3, 1e16, "bytes/s")
_SECONDS, _SHARE = (0, 100, "seconds"), (0, 1, "as a share")
_RANGES: dict[str, tuple[float, float, str]] = {
    **{"memory": (1e6, 1e15, "bytes"), "non_allocator_bytes": _BYTES, "communicator": _BYTES, "slack": _SHARE},
    **dict.fromkeys(("peak", "products", "attention", "attention_long", "experts", "wide"), _FLOPS),
    **{"attention_deterministic": (1e-3, 1, "as a share"), "overlap_cost": _SHARE},
    **dict.fromkeys(("traffic", "intra_node_bandwidth", "two_rank_bandwidth", "node_bandwidth", "host"), _RATE),
    **dict.fromkeys(("layer_time", "host_time", "step_time", "latency"), _SECONDS),
}
_WORDS = ("device", "chip")


def read_machine(path: Path) -> Machine:
    """Reads the file of a machine. Raises ConfigError for an unknown or missing key, and for a value out of range."""
    data = _mapping(read_plain(str(path)), str(path), ("extends", *_WORDS, "kernels", "devices_per_node", "figures"))
    figures = {
        name: _figure(name, value, f"{path}: figures.{name}")
        for name, value in _mapping(data.pop("figures", {}), f"{path}: figures", tuple(_RANGES)).items()
    }
    if (parent := data.pop("extends", None)) is not None:
        if parent not in _names():
            raise ConfigError(f"{path}: extends={parent!r} is no machine; use {one_of(_names())}")
        base = read_machine(_FOLDER / f"{parent}.yaml")
        of_base = {name: getattr(base, name) for name in _RANGES}
        inherited = {name: Figure(one.value, f"as {parent}: {one.source}") for name, one in of_base.items()}
        figures = inherited | figures
        kernels = next(name for name, one in KERNELS.items() if one is base.kernels)
        data = {name: getattr(base, name) for name in (*_WORDS, "devices_per_node")} | {"kernels": kernels} | data
    missing = [name for name in (*_WORDS, "kernels", "devices_per_node") if name not in data]
    missing += [f"figures.{name}" for name in _RANGES if name not in figures]
    if missing:
        raise ConfigError(f"{path}: {', '.join(missing)} missing; or take another machine's: extends: h200")
    _check_words(path, data)
    values: dict[str, Any] = {name: data[name] for name in (*_WORDS, "devices_per_node")}
    values |= {"name": path.stem, "kernels": KERNELS[data["kernels"]], "file": str(path)} | figures
    return Machine(**values)


def _check_words(path: Path, data: dict[str, Any]) -> None:
    for name in _WORDS:
        if not isinstance(data[name], str) or not data[name].strip():
            raise ConfigError(f"{path}: {name}={data[name]!r} must be text")
    if not isinstance(data["kernels"], str) or data["kernels"] not in KERNELS:
        raise ConfigError(f"{path}: kernels={data['kernels']!r} must be {one_of(KERNELS)}")
    count = data["devices_per_node"]
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 10_000:
        raise ConfigError(f"{path}: devices_per_node={count!r} must be a whole number of 1 to 10,000")


def _mapping(value: Any, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {value!r} must be a mapping with {', '.join(known)}")
    for name in value:
        if name not in known:
            raise ConfigError(f"{where}: unknown key {name!r}; {did_you_mean(str(name), known, ', '.join(known))}")
    return dict(value)


def _figure(name: str, value: Any, where: str) -> Figure:
    entry = _mapping(value, where, ("value", "source", "measured"))
    given, source, measured = entry.get("value"), entry.get("source"), entry.get("measured", False)
    low, high, unit = _RANGES[name]
    number: Any = math.nan
    if isinstance(given, (int, float, str)) and not isinstance(given, bool):
        with contextlib.suppress(ValueError):
            number = float(given) if isinstance(given, str) else given  # YAML takes 1e12 for text
    if not low <= number <= high:  # nor is NaN
        raise ConfigError(f"{where}: value={given!r} must be {low:g} to {high:g} {unit}")
    if not isinstance(source, str) or not source.strip():
        raise ConfigError(f"{where}: source={source!r} must say in words where the value is from")
    if not isinstance(measured, bool):
        raise ConfigError(f"{where}: measured={measured!r} must be true or false")
    return Figure(number, source.strip(), measured)


def _names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


MACHINES = {
    name: replace(read_machine(_FOLDER / f"{name}.yaml"), file=f"megatron/optimus/planner/systems/{name}.yaml")
    for name in _names()
}
H200, AURORA = MACHINES["h200"], MACHINES["aurora"]


def machine_of_device(name: str, kind: str) -> Machine:
    """Returns the machine whose devices are most like this one.

    Args:
        name: the device's product name, as torch has it.
        kind: "cuda", "xpu" or "cpu".
    """
    if kind == "cpu":
        return replace(H200, kernels=CPU)
    by_name = [machine for machine in MACHINES.values() if machine.chip in name]
    return by_name[0] if by_name else AURORA if kind == "xpu" else H200


def machine_named(name: str) -> Machine:
    """Looks a machine up by name, or reads its file. Raises ConfigError for one that is not here."""
    if name.endswith(_SUFFIXES):
        return read_machine(Path(name))
    if name not in MACHINES:
        raise ConfigError(f"--system={name!r} is unknown; use {one_of(MACHINES)}, or the path of a .yaml file")
    return MACHINES[name]
