"""Speeds and sizes of machines: every constant of the time model, in one place, each with its source.

"fitted" means: least squares over the steps of one rank in benchmarks/results/planner_memory_h200.json
(docs/planner.md); "public": from the makers or operators of the machine; "assumed": neither. Nothing of Aurora was
measured by us.

To add a machine: a ``Machine`` here, listed in ``MACHINES``; ``--system`` selects it by its name. ``kernels`` is one of
those of models/activations.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.optimus.config.schema import ConfigError, one_of
from megatron.optimus.models.activations import CPU, CUDA, XPU, Kernels


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
    outside: Figure  # bytes of it that torch's allocator does not hold, on a rank without communicators
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
    inside: Figure  # bytes/s a rank sends inside a node, in a group of more than two
    pair: Figure  # in a group of two
    network: Figure  # bytes/s of a node to others
    host: Figure  # bytes/s between a device and host memory, one way
    latency: Figure  # seconds for each of log2(ranks) hops of a collective
    overlap_cost: Figure  # what communication beside computation costs, as a share of its time
    kernels: Kernels

    def usable(self, communicators: int) -> float:
        """Bytes for live tensors on a rank that is in so many communicators."""
        outside = self.outside.value + communicators * self.communicator.value
        return (self.memory.value - outside) / (1 + self.slack.value)

    @property
    def is_measured(self) -> bool:
        return self.products.is_measured


_FIT = "fitted to benchmarks/results/planner_memory_h200.json"
_MEASURED = "benchmarks/results/planner_memory_h200.json"
_OVERLAP = "optimizer phase of benchmarks/results/overlap_7b_ep1_h200x8.json and overlap_7b_2layers_h200x2_ep1.json"
_RING = "benchmarks/results/ring_kernels_h200.txt, forward and backward"
_HOST = (
    "benchmarks/results/loss_curves_h200x4.json, one GPU: two micro-batches a step instead of one take 37.0 ms longer, "
    "17 passes; four processes at once, other work beside them"
)
_ALCF = "public: docs.alcf.anl.gov, Aurora, node performance overview"

H200 = Machine(
    name="h200",
    device="NVIDIA H200",
    chip="H200",
    devices_per_node=8,
    memory=Figure(139.8 * 2**30, "torch.cuda.mem_get_info", True),
    outside=Figure(1333 * 2**20, f"most in {_MEASURED}, one rank", True),
    communicator=Figure(
        730 * 2**20,
        f"most in {_MEASURED}: one communicator of two ranks (2059 MiB less 1329 of one rank; 284 at commit 9487643); "
        "that larger ones and those of messages alone (between pipeline stages) take as much is assumed",
        True,
    ),
    slack=Figure(0.05, f"median of {_MEASURED} 0.03, most without all-to-all 0.11", True),
    peak=Figure(989e12, "public: data sheet, dense bf16"),
    products=Figure(731e12, _FIT, True),
    attention=Figure(463e12, f"{_FIT}; alone 395e12 (benchmarks/results/training_step_h200_dense_kernels.txt)", True),
    attention_long=Figure(462e12, f"{_RING}: whole sequence, 8 heads, torch's choice (cuDNN)", True),
    attention_deterministic=Figure(0.594, f"{_RING}: FlashAttention-2 instead of cuDNN, whole sequence", True),
    experts=Figure(585e12, f"{_FIT}; alone 611e12 (benchmarks/results/training_step_h200_moe_kernels.txt)", True),
    wide=Figure(67e12, "public: data sheet, fp32; the ring has kernels here"),
    traffic=Figure(4.19e12, _FIT, True),
    layer_time=Figure(0.275e-3, _FIT, True),
    host_time=Figure(2.18e-3, _HOST, True),
    step_time=Figure(6.5e-3, _FIT, True),
    inside=Figure(300e9, _OVERLAP, True),
    pair=Figure(210e9, _OVERLAP, True),
    network=Figure(8 * 50e9, "public: eight 400 Gbit/s adapters a node; not measured by us"),
    host=Figure(54e9, "fitted to one case of benchmarks/results/planner_memory_h200.json, 1b-8l-offload", True),
    latency=Figure(10e-6, "assumed"),
    overlap_cost=Figure(0.65, _OVERLAP + ": step with overlap less the step of one rank", True),
    kernels=CUDA,
)

AURORA = Machine(
    name="aurora",
    device="tile of Intel Data Center GPU Max 1550",
    chip="Max 1550",
    devices_per_node=12,
    memory=Figure(64e9, "public: 64 GB of HBM2e a tile"),
    outside=Figure(3e9, "assumed: context and libraries"),
    communicator=Figure(0.2e9, "assumed: oneCCL's buffers (CCL_SYCL_SCALEOUT_HOST_BUF_SIZE lies on the host)"),
    slack=Figure(0.08, "assumed"),
    peak=Figure(367e12, "public: 56 active cores x 4,096 operations a cycle x 1.6 GHz"),
    products=Figure(180e12, "assumed: half of the peak"),
    attention=Figure(60e12, "assumed: a third of the rate of products"),
    attention_long=Figure(60e12, "assumed: the same"),
    attention_deterministic=Figure(1.0, "assumed: the same kernel"),
    experts=Figure(120e12, "assumed: two thirds of the rate of products, as on H200"),
    wide=Figure(0.8 * 23e12, "public: 56 active cores x 256 operations a cycle x 1.6 GHz; of that 80% assumed"),
    traffic=Figure(0.8e12, f"{_ALCF}: triad 1 TB/s a tile; of that 80%, as fitted on H200"),
    layer_time=Figure(1e-3, "assumed: twice an H200's host time"),
    host_time=Figure(4.4e-3, "assumed: twice an H200's"),
    step_time=Figure(20e-3, "assumed"),
    inside=Figure(0.8 * 5 * 15e9, f"{_ALCF}: 15 GB/s to each of five other GPUs; of that 80% assumed"),
    pair=Figure(196e9, f"{_ALCF}: 196 GB/s one way between the two tiles of a GPU"),
    network=Figure(0.6 * 8 * 25e9, "public: eight 200 Gbit/s adapters a node; of that 60% assumed"),
    host=Figure(27e9, f"{_ALCF}: 329 GB/s to all tiles of a node"),
    latency=Figure(20e-6, "assumed"),
    overlap_cost=Figure(0.65, "assumed as on H200"),
    kernels=XPU,
)

MACHINES = {machine.name: machine for machine in (H200, AURORA)}


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
    """Looks a machine up by name. Raises ConfigError for one that is not here."""
    if name not in MACHINES:
        raise ConfigError(f"--system={name!r} is unknown; use {one_of(MACHINES)}")
    return MACHINES[name]
