"""``moe_token_dispatcher_type=auto``: what is measured, and that all ranks take the same dispatcher."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron.optimus.config.schema import (
    ConfigError,
    ExpertPlacement,
    ModelConfig,
    ParallelConfig,
    Precision,
    RunConfig,
    TokenDispatcherType,
    TrainingConfig,
)
from megatron.optimus.context import RunContext
from megatron.optimus.moe.dispatch import symmetric
from megatron.optimus.moe.dispatch.all_to_all import AllToAllDispatcher
from megatron.optimus.moe.dispatch.base import ExpertRows, OverlappedWork, no_work
from megatron.optimus.moe.dispatch.ownership import Ownership
from megatron.optimus.moe.dispatch.select import measure, message_shape, select_dispatcher
from megatron.optimus.moe.dispatch.symmetric import BufferShape
from megatron.optimus.ops import Routing
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.ranks import Ranks
from tests.helpers import run_distributed

CPU = torch.device("cpu")
ALLGATHER, ALLTOALL, HIERARCHICAL = (
    TokenDispatcherType.ALLGATHER,
    TokenDispatcherType.ALLTOALL,
    TokenDispatcherType.HIERARCHICAL,
)


def config_of(kind: TokenDispatcherType, *, ep: int = 4, deterministic: bool = False) -> RunConfig:
    sizes = dict(hidden_size=16, num_attention_heads=2, vocab_size=32, num_experts=8, moe_router_topk=2)
    return RunConfig(
        model=ModelConfig(num_layers=1, **sizes),  # type: ignore[arg-type]
        parallel=ParallelConfig(expert_model_parallel_size=ep, moe_token_dispatcher_type=kind),
        training=TrainingConfig(
            seq_length=8, micro_batch_size=2, deterministic=deterministic, params_dtype=Precision.FP32
        ),
    )


class Slow(AllToAllDispatcher):
    """A dispatcher that is slow on one rank."""

    seconds = 0.0

    def dispatch(
        self, x_TD: torch.Tensor, routing: Routing, in_flight: None, overlapped: OverlappedWork = no_work
    ) -> ExpertRows:
        time.sleep(self.seconds)
        return super().dispatch(x_TD, routing, in_flight, overlapped)


def rendezvous(memory: torch.Tensor, group: dist.ProcessGroup) -> SimpleNamespace:
    return SimpleNamespace(
        buffer_ptrs=[memory.data_ptr()] * dist.get_world_size(group), get_buffer=lambda *args, **kwargs: memory
    )


def shared_memory(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """What ranks agree on before they use each other's memory, on CPUs that stand for GPUs."""
    found: dict[str, Any] = {}

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    shape = BufferShape(4, 8, 2, torch.float32)
    with (
        mock.patch("torch.distributed._symmetric_memory.empty", empty),
        mock.patch("torch.distributed._symmetric_memory.rendezvous", rendezvous),
    ):
        kept = first = symmetric.shared_buffer(group, shape, CPU)
        found["layers share it"] = symmetric.shared_buffer(group, shape, CPU) is first
        del first
        if rank == 1:
            kept = None  # type: ignore[assignment]
        again = symmetric.shared_buffer(group, shape, CPU)
        found["made anew where one rank has lost it"] = again is not kept
        try:
            symmetric.shared_buffer(group, shape if rank == 0 else shape._replace(num_tokens=5), CPU)
        except ConfigError as error:
            found["other shape"] = str(error)
    with (
        mock.patch.object(symmetric, "_local_problem", lambda *args: None),
        mock.patch.object(symmetric, "Ranks", lambda group, device: Ranks(group, CPU)),
        mock.patch.object(
            symmetric.devices, "without_peer_access", lambda device, others: [n for n in others if n > 3]
        ),
    ):
        for what, number in (("own", rank), ("shared", rank // 2), ("far", rank + 1)):
            found[f"{what} GPUs"] = symmetric.peer_access_problem(group, 1, torch.device("cuda", number))
    return found


def one_rank(rank: int, world: int) -> dict[str, Any]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("optimus")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    found: dict[str, Any] = {"lines": lines}

    def select(config: RunConfig, local_world_size: int) -> str:
        lines.clear()
        mesh = Mesh(config.parallel, rank=rank, world_size=world, local_world_size=local_world_size)
        before = torch.get_rng_state()
        try:
            selected = select_dispatcher(RunContext.of(config, mesh, CPU))
        except ConfigError as error:
            return f"error: {error}"
        assert torch.equal(before, torch.get_rng_state())
        return selected.moe_token_dispatcher_type.value

    auto = config_of(TokenDispatcherType.AUTO)
    found["nodes of 2"] = select(auto, 2), list(lines)
    found["one node"] = select(auto, 4), list(lines)
    found["unequal nodes"] = select(auto, 3 if rank < 3 else 1), list(lines)
    found["deterministic"] = select(config_of(TokenDispatcherType.AUTO, deterministic=True), 2), list(lines)
    found["ep 1"] = select(config_of(TokenDispatcherType.AUTO, ep=1), 2), list(lines)
    for what, local in (("fits", 2), ("one node", 4), ("unequal nodes", 3 if rank < 3 else 1)):
        found[f"hierarchical, {what}"] = select(config_of(HIERARCHICAL), local)
    found["symmetric"] = select(config_of(TokenDispatcherType.SYMMETRIC), 4)

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        if rank == 1:
            raise RuntimeError("out of memory")
        return torch.empty(*args, **kwargs)

    with (
        mock.patch("megatron.optimus.moe.dispatch.symmetric.peer_access_problem", lambda *args: None),
        mock.patch("torch.distributed._symmetric_memory.empty", empty),
        mock.patch("torch.distributed._symmetric_memory.rendezvous", rendezvous),
    ):
        found["no memory on rank 1"] = select(auto, 4), list(lines)
        found["no memory in one group of two"] = select(config_of(TokenDispatcherType.AUTO, ep=2), 4), list(lines)
    mesh = Mesh(auto.parallel, rank=rank, world_size=world)
    group = mesh.group("experts")
    assert group is not None
    found["shared memory"] = shared_memory(rank, group)
    ownership = Ownership.from_placement(8, 4, ExpertPlacement.CONTIGUOUS)
    slow = Slow(group, ownership)
    slow.seconds = 0.05 if rank == 1 else 0.0
    dispatchers = {ALLGATHER: slow, ALLTOALL: AllToAllDispatcher(group, ownership)}
    found["times"] = measure(dispatchers, message_shape(auto, torch.float32), mesh, CPU)
    return found


def test_auto_takes_what_is_fastest_on_the_slowest_rank() -> None:
    results = run_distributed(one_rank, 4)
    first = results[0]
    for rank, result in enumerate(results):
        assert result["times"] == first["times"]
        for what, answer in first.items():
            if what.startswith("hierarchical"):
                assert result[what] == answer.replace("failed on rank 0", f"failed on rank {rank}")
    times = first["times"]
    assert times[ALLGATHER] >= 50 > times[ALLTOALL] > 0
    for what, measured in (("nodes of 2", 3), ("one node", 2), ("unequal nodes", 2)):
        chosen, lines = first[what]
        assert {result[what][0] for result in results} == {chosen}
        table = {line.split()[0]: line for line in lines if line.startswith("  ")}
        assert list(table) == ["allgather", "alltoall", "hierarchical", "symmetric"]
        assert "symmetric    not measured: it needs GPUs of CUDA, and this run is on cpu" in table["symmetric"]
        assert sum(" ms" in line for line in table.values()) == measured
        assert [name for name, line in table.items() if "<- used" in line] == [chosen]
    for what in ("no memory on rank 1", "no memory in one group of two"):
        assert {result[what][0] for result in results} == {first[what][0]} <= {"allgather", "alltoall"}
        [line] = [line for line in first[what][1] if "symmetric" in line]
        assert "not measured: allocating 0 MiB of shared memory failed on rank 1: " in line
    assert "16 tokens x 16 (float32) a rank over 4 ranks" in first["nodes of 2"][1][0]
    assert first["deterministic"] == (
        "allgather",
        ["token dispatcher: allgather, without a measurement because of deterministic=True"],
    )
    assert first["ep 1"] == ("allgather", [])
    assert first["hierarchical, fits"] == "hierarchical"
    refused = "moe_token_dispatcher_type=symmetric failed on rank"
    reason = "it needs GPUs of CUDA, and this run is on cpu; use allgather or alltoall"
    for rank, result in enumerate(results):
        assert result["symmetric"] == f"error: {refused} {rank}: {reason}"
        memory = result["shared memory"]
        assert memory["layers share it"] and memory["made anew where one rank has lost it"]
        assert "(4, 8, 2, torch.float32), (5, 8, 2, torch.float32)" in memory["other shape"]
        assert memory["own GPUs"] is None
        assert "needs a GPU of its own" in memory["shared GPUs"] and "[0, 0, 1, 1]" in memory["shared GPUs"]
        assert f"cuda:{rank + 1} cannot map the memory of devices 4 of its node" in memory["far GPUs"]
    assert "4 ranks of a node must be 2 or more" in first["hierarchical, one node"]
    assert "nodes have from 1 to 3 ranks" in first["hierarchical, unequal nodes"]
