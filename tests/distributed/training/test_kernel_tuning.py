"""All ranks run rank 0's tiles of the Triton expert kernels, whatever each one's own file says."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from megatron.optimus.config.schema import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TokenDispatcherType,
    TrainingConfig,
)
from megatron.optimus.context import RunContext
from megatron.optimus.ops.triton import tile_cache
from megatron.optimus.ops.triton import tiles as tiles_module
from megatron.optimus.ops.triton.candidates import CANDIDATES, Entry
from megatron.optimus.ops.triton.tiles import Hardware, Problem, layer_problems, tiles_for
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.training import kernel_tuning as settling
from megatron.optimus.training.health import TrainingError
from tests.helpers import run_distributed

CPU, BF16 = torch.device("cpu"), torch.bfloat16
MACHINE = Hardware("a GPU", 100, 232448, has_tma=True, keeps_last_stage=True)
UP = Problem("up_swiglu", BF16, 4, 32, 16, 64)
GRADIENT = Problem("weight_gradient_add_fp32", BF16, 4, 16, 32, 64)


def config_of(**training: Any) -> RunConfig:
    sizes = dict(hidden_size=16, num_attention_heads=2, vocab_size=32, num_experts=8, moe_router_topk=2)
    return RunConfig(
        model=ModelConfig(num_layers=1, moe_ffn_hidden_size=32, **sizes),  # type: ignore[arg-type]
        parallel=ParallelConfig(expert_model_parallel_size=2),
        training=TrainingConfig(seq_length=8, micro_batch_size=2, **training),
    )


def in_use(problem: Problem) -> int:
    """The place among the candidates of the tiles that would be launched."""
    tiles = tiles_for(problem.kernel, torch.empty(0, dtype=BF16), *problem[2:])
    return CANDIDATES[problem.kernel].index(tiles)


def entry(problem: Problem, place: int, matches_default_bits: bool = True) -> dict[str, Entry]:
    return {str(problem): Entry(CANDIDATES[problem.kernel][place], 1.0, 2.0, matches_default_bits)}


def one_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    os.environ["OPTIMUS_TILES"] = f"{folder}/tiles{rank}.json"
    tiles_module.hardware = lambda device: MACHINE  # type: ignore[assignment]
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("optimus").setLevel(logging.INFO)
    logging.getLogger("optimus").addHandler(handler)
    found: dict[str, Any] = {}

    def settle(**training: Any) -> None:
        config = config_of(**training)
        mesh = Mesh(config.parallel, rank=rank, world_size=world)
        settling.select_tiles(RunContext.of(config, mesh, CPU))

    settle(tune_kernels=True)  # the CPU's own kernels
    found["nothing to tune"] = list(lines)
    settling.resolves_to_triton = lambda device, dtype: True
    tile_cache.save(MACHINE.key, {**entry(UP, rank + 1), **entry(GRADIENT, rank + 2, matches_default_bits=False)})
    settle()
    found["from disk"] = in_use(UP), in_use(GRADIENT)
    settle(deterministic=True)
    found["deterministic"] = in_use(UP), in_use(GRADIENT)
    os.environ["OPTIMUS_TILES"] = f"{folder}/missing/tiles{rank}.json"
    settle()
    found["no file"] = in_use(UP), in_use(GRADIENT)

    def fail(config: RunConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        raise RuntimeError("the device is lost")

    settling._chosen = fail
    try:
        settle()
    except TrainingError as error:
        found["error"] = str(error)
    return found


def test_every_rank_takes_what_rank_0_has(tmp_path: Path) -> None:
    first, second = run_distributed(one_rank, 2, str(tmp_path))
    assert first["from disk"] == second["from disk"] == (1, 2)
    assert first["deterministic"] == second["deterministic"] == (1, 0)  # other bits than the default's are refused
    assert first["no file"] == second["no file"] == (0, 0)
    assert first["nothing to tune"] == [
        "tune_kernels: nothing to tune, as expert layers do not run on Triton's kernels here"
    ]
    assert second["nothing to tune"] == []
    assert first["error"] == "choosing the tiles of expert kernels failed on rank 0: the device is lost"
    assert second["error"].startswith("choosing the tiles of expert kernels failed on rank 0")


def test_the_problems_of_a_run() -> None:
    config = config_of()
    problems, share = settling.problems_of(config, BF16)  # 16 tokens of each of two ranks
    assert (problems, share) == (layer_problems(4, 16, 32, 2, 32, BF16, torch.float32), 0.5)
    assert UP in problems and GRADIENT in problems
    config.parallel.moe_token_dispatcher_type = TokenDispatcherType.SYMMETRIC  # rows as all-gather has them
    assert settling.problems_of(config, BF16) == (problems, share)
    config.parallel.moe_token_dispatcher_type = TokenDispatcherType.ALLTOALL
    problems, share = settling.problems_of(config, BF16, 800)  # 3 of 4 tokens have one of two choices here
    assert (problems, share) == (layer_problems(4, 16, 32, 2, 1200, BF16, torch.float32), 0.5 / 0.75)
    config.optimizer = OptimizerConfig(zero_stage=2)
    config.parallel.expert_tensor_parallel_size = 2
    config.parallel.moe_dispatch_chunks = 2
    assert settling.problems_of(config, BF16, 800)[0] == layer_problems(4, 16, 16, 2, 1200, BF16)
    one_rank_alone = config_of()
    one_rank_alone.parallel.expert_model_parallel_size = 1
    assert settling.problems_of(one_rank_alone, BF16) == (layer_problems(8, 16, 32, 2, 16, BF16, torch.float32), 1.0)
