"""The layout of a run on fewer nodes than it was asked for, under ``optimus launch --min-nodes``.

The global batch, the order of samples and the tensor, pipeline, context and expert-tensor sizes stay; the data-parallel
size follows from the number of ranks, and gradient accumulation from that. One rule chooses: the most nodes on which
the run's options fit with its ``expert_model_parallel_size``; where there are none, the same with the next smaller one
that divides the experts, unless a file of expert placement is for that size. A smaller one puts more experts on every
rank, which may not fit its memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.optimus.config.checks import check
from megatron.optimus.config.schema import ConfigError, RunConfig, divisors, one_of


@dataclass(frozen=True)
class ElasticLayout:
    """On how many nodes an attempt runs, and over how many ranks its experts are spread."""

    num_nodes: int
    expert_parallel: int


@dataclass(frozen=True)
class ElasticLayouts:
    """The layouts of one run.

    Args:
        config: the run.
        ranks_per_node: the same on all nodes.
        num_nodes: that the run was asked for.
        min_nodes: the fewest.
    """

    config: RunConfig
    ranks_per_node: int
    num_nodes: int
    min_nodes: int

    def best(self, available: int) -> ElasticLayout | None:
        """Returns the layout on at most ``available`` nodes; None where there is none on ``min_nodes`` or more."""
        most = min(available, self.num_nodes)
        wanted, is_fixed = (
            self.config.parallel.expert_model_parallel_size,
            self.config.parallel.moe_expert_placement_file,
        )
        sizes = [] if is_fixed else [ep for ep in divisors(self.config.model.num_experts or 1) if ep < wanted]
        for ep in [wanted, *reversed(sizes)]:
            for nodes in range(most, self.min_nodes - 1, -1):
                if not self._problem(nodes, ep):
                    return ElasticLayout(nodes, ep)
        return None

    def fit(self, available: int) -> int:
        """Returns on how many of so many nodes ``best`` runs; 0 where there is no layout."""
        layout = self.best(available)
        return 0 if layout is None else layout.num_nodes

    def options(self, num_nodes: int) -> tuple[str, ...]:
        """Returns the options of pretrain in which an attempt on so many nodes differs from the run."""
        layout = self.best(num_nodes)
        if layout is None or layout.expert_parallel == self.config.parallel.expert_model_parallel_size:
            return ()
        return ("--expert-model-parallel-size", str(layout.expert_parallel))

    def check_min_nodes(self) -> None:
        """Raises ConfigError where the run cannot be laid out on exactly ``min_nodes``."""
        if self.min_nodes > self.num_nodes:
            raise ConfigError(f"--min-nodes={self.min_nodes} exceeds the {self.num_nodes} nodes of the run; use fewer")
        if self.best(self.min_nodes) is None:
            sizes = range(1, self.num_nodes + 1)
            fitting = [size for size in sizes if replace(self, min_nodes=size).best(size) is not None]
            problem = self._problem(self.min_nodes, self.config.parallel.expert_model_parallel_size)
            raise ConfigError(
                f"--min-nodes={self.min_nodes}: the run does not fit on so many nodes ({problem}); "
                f"use {one_of(fitting)}"
            )

    def _problem(self, num_nodes: int, expert_parallel: int) -> str:
        parallel = replace(self.config.parallel, expert_model_parallel_size=expert_parallel)
        try:
            check(replace(self.config, parallel=parallel), num_nodes * self.ranks_per_node)
        except ConfigError as error:
            return str(error)
        return ""
