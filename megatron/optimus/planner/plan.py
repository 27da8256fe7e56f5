"""Plans one run on one machine: memory of every pipeline rank, what is sent, and the time of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.optimus.config.checks import check
from megatron.optimus.config.costs import Collective
from megatron.optimus.config.rank_plan import RankPlan, first_of_each_kind, rank_plans
from megatron.optimus.config.schema import ConfigError, RunConfig, TokenDispatcherType, one_of
from megatron.optimus.models.activations import CUDA
from megatron.optimus.parallel.traffic import num_communicators
from megatron.optimus.planner.communication import collectives
from megatron.optimus.planner.hardware import Machine
from megatron.optimus.planner.memory import Memory, memory_of
from megatron.optimus.planner.step_time import PredictedStepTime, step_time

MODELLED_STAGES = (1, 2)  # ZeRO stages of our optimizer


@dataclass(frozen=True)
class Plan:
    """A plan of one run, made by ``plan``; the run has passed the trainer's own checks."""

    config: RunConfig
    world_size: int
    machine: Machine

    @cached_property
    def ranks(self) -> list[RankPlan]:
        """One for each pipeline rank."""
        return rank_plans(self.config, self.world_size)

    @cached_property
    def memories(self) -> list[Memory]:
        """One for each pipeline rank. Ranks in the middle of a pipeline differ in what is in flight alone."""
        return [memory_of(rank, self.machine.kernels) for rank in self.ranks]

    @cached_property
    def worst(self) -> Memory:
        """The memory of the rank that needs most."""
        kernels = self.machine.kernels
        return max(
            (memory_of(rank, kernels) for rank in first_of_each_kind(self.ranks)), key=lambda memory: memory.peak
        )

    @cached_property
    def communicators(self) -> int:
        """Communicators that a rank is in; one fewer in the middle of a pipeline where the embedding is tied."""
        return num_communicators(self.ranks[0])

    @property
    def usable(self) -> float:
        """Bytes that a rank has for live tensors."""
        return self.machine.usable(self.communicators)

    @property
    def fits(self) -> bool:
        """Whether every rank's peak is within what it can use."""
        return self.worst.peak <= self.usable

    @cached_property
    def time(self) -> PredictedStepTime:
        """Predicted time of one step."""
        return step_time(self.ranks, self.machine)

    def collectives(self, pipeline_rank: int) -> list[Collective]:
        """The collectives of one step of a rank of the pipeline."""
        return collectives(self.ranks[pipeline_rank], self.machine.kernels)


def plan(config: RunConfig, world_size: int, machine: Machine) -> Plan:
    """Plans a run. The result computes memory, communication and time when asked for them.

    Args:
        config: the run.
        world_size: number of ranks.
        machine: where it would run.

    Raises:
        ConfigError: for a run that the trainer refuses, a ZeRO stage that is not modelled, and a token dispatcher that
            does not fit the machine's nodes or devices. A run that needs too much memory is planned: see ``Plan.fits``.
    """
    check(config, world_size)
    stage = config.optimizer.zero_stage
    if stage not in MODELLED_STAGES:
        raise ConfigError(f"zero_stage={stage} is not planned here, only our optimizer's {one_of(MODELLED_STAGES)}")
    made = Plan(config, world_size, machine)
    if config.model.is_moe and made.ranks[0].expert_ranks > 1:
        _check_dispatcher(made.ranks[0], machine)
    return made


def _check_dispatcher(rank: RankPlan, machine: Machine) -> None:
    """Raises ConfigError for what the program finds out when the ranks have met. Only where tokens travel."""
    parallel, expert_ranks, where = rank.config.parallel, rank.expert_ranks, ""
    if parallel.moe_token_dispatcher_type is TokenDispatcherType.HIERARCHICAL:
        started = min(machine.devices_per_node, rank.layout.world_size)
        problem = rank.layout.hierarchy_problem(parallel.moe_hierarchical_node_size or started)
        if problem is not None:
            raise ConfigError(problem)
    if parallel.moe_token_dispatcher_type is not TokenDispatcherType.SYMMETRIC:
        return
    if machine.kernels is not CUDA:
        where = f"needs GPUs of CUDA, which {machine.name} has not"
    elif expert_ranks > machine.devices_per_node:
        where = f"needs the {expert_ranks} ranks that share the experts on one node of {machine.devices_per_node}"
    if where:
        raise ConfigError(f"moe_token_dispatcher_type=symmetric {where}; use allgather or alltoall")
