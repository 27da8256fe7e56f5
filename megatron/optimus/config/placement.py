"""Placement of experts on the ranks of an expert-parallel group, and the file that stores one.

The placement of a layer lists, for each rank, the global ids of its experts in local order; every rank has the same
number of experts. Weights, checkpoints and initial values are addressed by global id, so a placement does not change
the model, and a run can be resumed with another one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron.optimus.config.schema import ConfigError, ExpertPlacement

LayerPlacement = tuple[tuple[int, ...], ...]  # for each rank, the global ids of its experts


def regular_placement(num_experts: int, num_ranks: int, placement: ExpertPlacement) -> LayerPlacement:
    """Returns the placement of option ``moe_expert_placement``; ``num_ranks`` divides ``num_experts``."""
    per_rank = num_experts // num_ranks
    if placement is ExpertPlacement.CONTIGUOUS:
        return tuple(tuple(range(rank * per_rank, (rank + 1) * per_rank)) for rank in range(num_ranks))
    return tuple(tuple(range(rank, num_experts, num_ranks)) for rank in range(num_ranks))


def balanced_placement(load_E: Sequence[int], num_ranks: int) -> LayerPlacement:
    """Returns a placement that balances the load of ranks with the same number of experts each.

    The longest-processing-time rule assigns the busiest remaining expert to the least loaded rank that has room. Then
    experts of the busiest rank are swapped with those of others as long as that lowers its load. The result is not
    always optimal (that is NP-hard), and never busier than the rule alone.

    Args:
        load_E: load of each expert, such as its tokens.
        num_ranks: number of ranks; divides the number of experts.

    Returns:
        The placement, experts of a rank in ascending order.
    """
    per_rank = len(load_E) // num_ranks
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for expert in sorted(range(len(load_E)), key=lambda expert: -load_E[expert]):
        rank = min((r for r in range(num_ranks) if len(ranks[r]) < per_rank), key=lambda r: loads[r])
        ranks[rank].append(expert)
        loads[rank] += load_E[expert]
    while _swap_one(load_E, ranks, loads):
        pass
    return tuple(tuple(sorted(experts)) for experts in ranks)


def _swap_one(load_E: Sequence[int], ranks: list[list[int]], loads: list[int]) -> bool:
    """Swaps an expert of the busiest rank so that the higher load of both ranks is lowest; False where none helps."""
    busiest = max(range(len(ranks)), key=lambda rank: loads[rank])
    best: tuple[int, int, int, int] | None = None
    for rank in range(len(ranks)):
        for given in ranks[busiest]:
            for taken in ranks[rank]:
                moved = load_E[given] - load_E[taken]
                busier = max(loads[busiest] - moved, loads[rank] + moved)
                if moved > 0 and busier < (best[0] if best else loads[busiest]):
                    best = busier, rank, given, taken
    if best is None:
        return False
    _, rank, given, taken = best
    moved = load_E[given] - load_E[taken]
    ranks[busiest][ranks[busiest].index(given)] = taken
    ranks[rank][ranks[rank].index(taken)] = given
    loads[busiest] -= moved
    loads[rank] += moved
    return True


def busiest_over_mean(load_E: Sequence[int], placement: LayerPlacement) -> float:
    """Returns the load of the busiest rank divided by the mean of ranks; 1 is perfect balance, or no load."""
    loads = [sum(load_E[expert] for expert in experts) for experts in placement]
    return max(loads) * len(loads) / total if (total := sum(loads)) else 1.0


def to_json(layers: Sequence[LayerPlacement]) -> str:
    """Returns the content of a ``moe_expert_placement_file`` for the MoE layers in order."""
    return json.dumps({"experts_of_ranks_of_layers": layers}) + "\n"


def from_json(
    text: str, source: object, *, num_layers: int, num_experts: int, num_ranks: int
) -> tuple[LayerPlacement, ...]:
    """Reads the text of a ``moe_expert_placement_file``.

    Args:
        text: content of the file.
        source: its path, for errors.
        num_layers: MoE layers of the model.
        num_experts: experts of a layer.
        num_ranks: ranks of an expert-parallel group.

    Returns:
        The placement of each MoE layer.

    Raises:
        ConfigError: where the file does not hold placements of such a model over such ranks.
    """
    wanted = f"{num_layers} layers of {num_ranks} ranks with {num_experts // num_ranks} of {num_experts} experts each"
    remedy = f"moe_expert_placement_file={source} must hold {wanted}; write it with `optimus expert-balance`"
    try:
        record: Any = json.loads(text)
        layers = tuple(tuple(tuple(map(int, rank)) for rank in layer) for layer in record["experts_of_ranks_of_layers"])
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{remedy} ({type(error).__name__}: {error})") from error
    if len(layers) != num_layers:
        raise ConfigError(f"{remedy} (it has {len(layers)} layers)")
    for number, layer in enumerate(layers):
        sizes = {len(experts) for experts in layer}
        if len(layer) != num_ranks or sizes != {num_experts // num_ranks}:
            raise ConfigError(f"{remedy} (layer {number} has {len(layer)} ranks with {sorted(sizes)} experts)")
        if sorted(expert for experts in layer for expert in experts) != list(range(num_experts)):
            raise ConfigError(f"{remedy} (layer {number} does not have every expert once)")
    return layers
