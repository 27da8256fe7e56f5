"""Which expert lives on which rank of an expert-parallel group: pure arithmetic, and the file that holds a choice.

A placement of one layer is, for each rank, the global numbers of its experts in local order; every rank has as many.
Weights, checkpoints and initial values go by global number, so a placement changes where experts are, not what the
model is: a run may go on with another one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron.optimus.config.schema import ConfigError, ExpertPlacement

LayerPlacement = tuple[tuple[int, ...], ...]  # of each rank: global numbers of its experts


def regular_placement(num_experts: int, num_ranks: int, placement: ExpertPlacement) -> LayerPlacement:
    """The placement that an option names; ``num_ranks`` divides ``num_experts``."""
    per_rank = num_experts // num_ranks
    if placement is ExpertPlacement.CONTIGUOUS:
        return tuple(tuple(range(rank * per_rank, (rank + 1) * per_rank)) for rank in range(num_ranks))
    return tuple(tuple(range(rank, num_experts, num_ranks)) for rank in range(num_ranks))


def balanced_placement(load_E: Sequence[int], num_ranks: int) -> LayerPlacement:
    """Spreads the load over ranks that have equally many experts each.

    The longest-processing-time rule: the busiest expert that is left goes to the least loaded rank that has room. Then
    experts of the busiest rank are exchanged with others' for as long as that lowers its load. Not always the best
    there is (that is NP-hard), never busier than the rule alone.
    """
    per_rank = len(load_E) // num_ranks
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for expert in sorted(range(len(load_E)), key=lambda expert: -load_E[expert]):
        rank = min((r for r in range(num_ranks) if len(ranks[r]) < per_rank), key=lambda r: loads[r])
        ranks[rank].append(expert)
        loads[rank] += load_E[expert]
    while _exchange_one(load_E, ranks, loads):
        pass
    return tuple(tuple(sorted(experts)) for experts in ranks)


def _exchange_one(load_E: Sequence[int], ranks: list[list[int]], loads: list[int]) -> bool:
    """The exchange with the busiest rank that leaves the busier of the two least loaded, if it helps."""
    busiest = max(range(len(ranks)), key=lambda rank: loads[rank])
    best: tuple[int, int, int, int] | None = None
    for rank in range(len(ranks)):
        for mine in ranks[busiest]:
            for theirs in ranks[rank]:
                moved = load_E[mine] - load_E[theirs]
                busier = max(loads[busiest] - moved, loads[rank] + moved)
                if moved > 0 and busier < (best[0] if best else loads[busiest]):
                    best = busier, rank, mine, theirs
    if best is None:
        return False
    _, rank, mine, theirs = best
    moved = load_E[mine] - load_E[theirs]
    ranks[busiest][ranks[busiest].index(mine)] = theirs
    ranks[rank][ranks[rank].index(theirs)] = mine
    loads[busiest] -= moved
    loads[rank] += moved
    return True


def busiest_over_mean(load_E: Sequence[int], placement: LayerPlacement) -> float:
    """Load of the busiest rank over the mean; 1 is perfect, and what it is without any load."""
    loads = [sum(load_E[expert] for expert in experts) for experts in placement]
    return max(loads) * len(loads) / total if (total := sum(loads)) else 1.0


def to_json(layers: Sequence[LayerPlacement]) -> str:
    """The text of a file for ``moe_expert_placement_file``; ``layers``: those with experts, in order."""
    return json.dumps({"experts_of_ranks_of_layers": layers}) + "\n"


def from_json(
    text: str, source: object, *, num_layers: int, num_experts: int, num_ranks: int
) -> tuple[LayerPlacement, ...]:
    """The placements of all layers. Raises ConfigError where they are not those of such a model over such ranks."""
    wanted = f"{num_layers} layers of {num_ranks} ranks with {num_experts // num_ranks} of {num_experts} experts each"
    remedy = f"moe_expert_placement_file={source} must hold {wanted}; write it with tools/expert_balance.py"
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
