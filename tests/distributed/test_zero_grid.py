"""The optimizer on grids of (edp, ep, tp, pp) up to eight gloo ranks against torch.optim.AdamW in one process.

DeepSpeed's engine has no such parallelism for foreign models, so the optimizer is driven directly. The loss of a rank
is a weighted sum of sin(weight * coefficient) over elements, with coefficients from (step, micro-batch, data-parallel
rank) and a weight that stands for its number of tokens: any element's gradient follows from the element alone, so every
rank can compute the gradient of exactly what it holds, and one process that of everything.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed_ext
from tests.helpers import run_distributed

STEPS, ACCUMULATION, MAX_NORM = 5, 2, 0.05
LR, DECAY, BETAS, EPS = 3e-3, 0.1, (0.9, 0.95), 1e-8
NO_DECAY = ("norm", "down")  # among them experts: stock DeepSpeed loses their own weight decay


@dataclass(frozen=True)
class Tensor_:
    """A parameter of the whole model. ``stage``: pipeline stage; ``cut``: tensor-parallel ranks share its columns;
    ``experts``: dim 0 is spread over expert-parallel ranks."""

    name: str
    shape: tuple[int, ...]
    stage: int
    cut: bool = False
    experts: bool = False


# The second stage alone has experts, of an odd number of elements, and more parameters.
MODEL = [
    Tensor_("embedding", (30, 40), 0),
    Tensor_("qkv", (36, 44), 0, cut=True),
    Tensor_("norm0", (11,), 0),
    Tensor_("mlp", (20, 52), 1, cut=True),
    Tensor_("router", (4, 9), 1),
    Tensor_("up", (4, 13, 30), 1, experts=True),
    Tensor_("down", (4, 7, 9), 1, experts=True),
    Tensor_("norm1", (17,), 1),
    Tensor_("head", (40, 31), 1),
]


@dataclass(frozen=True)
class Grid:
    edp: int
    ep: int
    tp: int
    pp: int

    @property
    def dp(self) -> int:
        return self.edp * self.ep

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(pp, dp, tp): pipeline outermost, tensor innermost; expert-parallel peers are consecutive in dp."""
        return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp


GRIDS = [Grid(1, 1, 1, 1), Grid(1, 2, 2, 2), Grid(2, 1, 2, 2), Grid(2, 2, 2, 1), Grid(2, 2, 1, 2), Grid(2, 4, 1, 1)]
WORLD = 8


def _tokens(step: int, micro: int, dp_rank: int) -> int:
    return 1 + (7 * step + 3 * micro + 5 * dp_rank) % 6


def _coefficients(tensor: Tensor_, step: int, micro: int, dp_rank: int) -> torch.Tensor:
    seed = hash((MODEL.index(tensor), step, micro, dp_rank)) % (1 << 31)
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))


def _initial(tensor: Tensor_) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(MODEL.index(tensor))) * 0.2


def _param_groups(params: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups of the same name, which stock DeepSpeed would merge."""
    plain = [p for n, p in params.items() if n.startswith(NO_DECAY)]
    decayed = [p for n, p in params.items() if not n.startswith(NO_DECAY)]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "name": "g"},
        {"params": plain, "name": "g", "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(params: dict[str, nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(_param_groups(params), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


@functools.cache
def _reference(dp: int) -> tuple[dict[str, dict[str, torch.Tensor]], list[float]]:
    """One process, the whole global batch, the mean over its tokens."""
    params = {t.name: nn.Parameter(_initial(t)) for t in MODEL}
    optimizer = _adamw(params)
    norms = []
    for step in range(STEPS):
        batches = [(micro, rank) for micro in range(ACCUMULATION) for rank in range(dp)]
        total = sum(_tokens(step, *where) for where in batches)
        loss = torch.zeros(())
        for micro, rank in batches:
            for tensor in MODEL:
                x = torch.sin(params[tensor.name] * _coefficients(tensor, step, micro, rank)).sum()
                loss = loss + x * (_tokens(step, micro, rank) / total)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(params.values(), MAX_NORM)))
        optimizer.step()
    states = {n: {"master": p.detach(), **_moments(optimizer, p)} for n, p in params.items()}
    return states, norms


def _moments(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> dict[str, torch.Tensor]:
    return {kind: optimizer.state[param][kind] for kind in ("exp_avg", "exp_avg_sq")}


class _Rank:
    """What one rank of a grid holds, and its optimizer."""

    def __init__(self, grid: Grid, rank: int, groups: deepspeed_ext.ZeroGroups, stage: int) -> None:
        self.grid = grid
        self.stage, self.dp_rank, self.tp_rank = grid.coordinates(rank)
        self.tensors = [t for t in MODEL if t.stage == self.stage or grid.pp == 1]
        self.params = {t.name: nn.Parameter(self.part(t, _initial(t)).clone()) for t in self.tensors}
        for tensor in self.tensors:
            param = self.params[tensor.name]
            param.tensor_model_parallel = tensor.cut  # type: ignore[attr-defined]
            if tensor.experts:
                param.allreduce, param.group_name = False, f"ep_size_{grid.ep}"  # type: ignore[attr-defined]
        self.optimizer = deepspeed_ext.EPZeroOptimizer(
            _adamw(self.params),
            {param: name for name, param in self.params.items()},
            groups=groups,
            options=deepspeed_ext.ZeroOptions(stage=stage, bucket_numel=600, max_norm=MAX_NORM),
        )

    def part(self, tensor: Tensor_, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a global tensor, as a view."""
        if tensor.experts:
            whole = whole.chunk(self.grid.ep)[self.dp_rank % self.grid.ep]
        return whole.chunk(self.grid.tp, dim=1)[self.tp_rank] if tensor.cut else whole

    def train_step(self, step: int) -> float | None:
        total = sum(_tokens(step, m, r) for m in range(ACCUMULATION) for r in range(self.grid.dp))
        for micro in range(ACCUMULATION):
            self.optimizer.set_gradient_accumulation_boundary(micro == ACCUMULATION - 1)
            loss = torch.zeros(())
            for tensor in self.tensors:
                ep = self.grid.ep
                # The exchange of tokens brings an expert the tokens of all its expert-parallel peers.
                peers = (
                    range(self.dp_rank // ep * ep, self.dp_rank // ep * ep + ep) if tensor.experts else [self.dp_rank]
                )
                for peer in peers:
                    c = self.part(tensor, _coefficients(tensor, step, micro, peer))
                    tokens = _tokens(step, micro, peer) / total * self.grid.dp  # the optimizer averages over dp
                    loss = loss + torch.sin(self.params[tensor.name] * c).sum() * tokens
            loss.backward()
            if self.optimizer.options.stage == 2 or micro == ACCUMULATION - 1:
                self.optimizer.reduce_gradients()
            self.optimizer.backward_epilogue()
        self.optimizer.step()
        return self.optimizer._global_grad_norm

    def _indices(self, shard: deepspeed_ext.StateShard) -> torch.Tensor:
        """Where a shard's elements lie in the flattened global tensor."""
        tensor = next(t for t in self.tensors if t.name == shard.name)
        numbers = torch.arange(torch.Size(tensor.shape).numel()).view(tensor.shape)
        return self.part(tensor, numbers).reshape(-1)[shard.start : shard.stop]

    def dump(self) -> list[tuple[str, torch.Tensor, dict[str, torch.Tensor]]]:
        return [
            (s.name, self._indices(s), {kind: t.clone() for kind, t in s.tensors.items()})
            for s in self.optimizer.state_shards()
        ]

    def load(self, states: dict[str, dict[str, torch.Tensor]]) -> None:
        for shard in self.optimizer.state_shards():
            where = self._indices(shard)
            for kind, target in shard.tensors.items():
                target.copy_(states[shard.name][kind].view(-1)[where])
        self.optimizer.sync_params_from_master()


def _groups(grid: Grid, rank: int) -> deepspeed_ext.ZeroGroups | None:
    """Groups of the grid's ranks, None on the others; collective over all ranks."""
    ranks = range(grid.world)

    def mine(key: Any) -> Any:
        found = None
        for value in sorted({key(r) for r in ranks}):
            members = [r for r in ranks if key(r) == value]
            group = dist.new_group(members)
            if rank in members:
                found = group
        return found

    def place(r: int) -> tuple[int, int, int]:
        return grid.coordinates(r)

    dense = mine(lambda r: (place(r)[0], place(r)[2]))
    edp = mine(lambda r: (place(r)[0], place(r)[2], place(r)[1] % grid.ep))
    model = mine(lambda r: place(r)[1])
    tensor = mine(lambda r: (place(r)[0], place(r)[1]))
    if rank >= grid.world:
        return None
    return deepspeed_ext.ZeroGroups(dense=dense, expert={f"ep_size_{grid.ep}": edp}, model=model, tensor=tensor)


def _assemble(dumps: list[list[Any]], grid: Grid) -> dict[str, dict[str, torch.Tensor]]:
    """Global tensors; fails unless every element has one owner (one on each tensor-parallel rank if not cut)."""
    kinds = ("master", "exp_avg", "exp_avg_sq")
    states = {t.name: {kind: torch.full(t.shape, torch.nan) for kind in kinds} for t in MODEL}
    owners = {t.name: torch.zeros(t.shape).view(-1) for t in MODEL}
    for dump in dumps:
        for name, where, tensors in dump:
            owners[name][where] += 1
            for kind, values in tensors.items():
                flat = states[name][kind].view(-1)
                assert (flat[where].isnan() | (flat[where] == values)).all(), "replicas must agree bitwise"
                flat[where] = values
    for tensor in MODEL:
        assert (owners[tensor.name] == (1 if tensor.cut else grid.tp)).all(), tensor.name
    return states


def _all_dumps(rank: _Rank | None, grid: Grid) -> list[Any]:
    dumps: list[Any] = [None] * WORLD
    dist.all_gather_object(dumps, rank.dump() if rank is not None else None)
    return dumps[: grid.world]


def _run(rank: int, world: int) -> dict[tuple[Grid, int], tuple[list[float | None], Any, bool]]:
    results = {}
    loaded: dict[str, dict[str, torch.Tensor]] | None = None
    for grid in GRIDS:
        groups = _groups(grid, rank)
        for stage in (1, 2):
            mine = None if groups is None else _Rank(grid, rank, groups, stage)
            survives = True
            if loaded is not None:  # the state of the layout before, at this one
                if mine is not None:
                    mine.load(loaded)
                again = _assemble(_all_dumps(mine, grid), grid)
                survives = all(torch.equal(again[n][k], t) for n, kinds in loaded.items() for k, t in kinds.items())
                mine = None if groups is None else _Rank(grid, rank, groups, stage)
            norms = [mine.train_step(step) for step in range(STEPS)] if mine is not None else []
            loaded = _assemble(_all_dumps(mine, grid), grid)
            results[grid, stage] = (norms, loaded if rank == 0 else None, survives)
    return results


@functools.cache
def _all_results() -> list[dict[tuple[Grid, int], tuple[list[float | None], Any, bool]]]:
    return run_distributed(_run, WORLD)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_equals_one_process(grid: Grid, stage: int) -> None:
    """Weights, moments and norms; stock DeepSpeed leaves experts out of the norm where tensor-parallel ranks repeat
    them, and waits for ever where only one pipeline stage has experts or stages cut theirs differently."""
    expected, norms = _reference(grid.dp)
    assert min(norms) > 1.5 * MAX_NORM, "clipping must be active for this test to mean anything"
    results = _all_results()
    for rank in range(grid.world):
        assert results[rank][grid, stage][0] == pytest.approx(norms, rel=1e-5), f"norm on rank {rank}"
    states = results[0][grid, stage][1]
    for name, kinds in expected.items():
        for kind, tensor in kinds.items():
            error = (states[name][kind] - tensor).abs().max()
            assert error <= 1e-5 * tensor.abs().max(), (name, kind, error)


def test_state_of_one_layout_loads_at_any_other_bitwise() -> None:
    results = _all_results()
    assert len(results[0]) == 2 * len(GRIDS)
    assert all(survives for result in results for _, _, survives in result.values())
