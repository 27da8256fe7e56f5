"""A tiny corpus, and the training program started the way a user starts it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.optimus.data.indexed import IndexedDatasetWriter
from tests.helpers import start_program

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-experts 4 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 24 --vocab-size 64 --max-position-embeddings 32 --seq-length 32 --params-dtype fp32 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 3e-3 --min-lr 3e-4 --lr-warmup-iters 2 --adam-eps 1e-6 "
    "--train-iters 8 --eval-interval 4 --eval-iters 1 --save-interval 2 --device cpu"
).split()


def command_of(ranks: int, torchrun: bool = False) -> list[str]:
    """How a user starts this many ranks."""
    if torchrun:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return [sys.executable, "-m", *launcher, "-m", "megatron.optimus.pretrain"]
    if ranks > 1:
        return [sys.executable, "-m", "megatron.optimus.launch", "--nproc-per-node", str(ranks)]
    return [sys.executable, "-m", "megatron.optimus.pretrain"]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # A process that aborts says where all its threads were.
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


Program = Callable[..., "subprocess.CompletedProcess[str]"]


def write_corpus(prefix: Path, seed: int = 0) -> Path:
    """A corpus with some structure to learn: noisy counting modulo 61."""
    rng = np.random.default_rng(seed)
    with IndexedDatasetWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(200):
            start, length = int(rng.integers(61)), int(rng.integers(20, 90))
            ids = (start + np.arange(length)) % 61 + 1
            ids[rng.random(length) < 0.1] = 63
            writer.add_document(np.append(ids, 0).tolist())
    return prefix


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its prefix."""
    return write_corpus(tmp_path_factory.mktemp("data") / "counting")


@pytest.fixture(scope="session")
def pretrain(tokens: Path) -> Program:
    """``pretrain(run_dir, *options, ranks=1)`` runs megatron.optimus.pretrain in processes of its own."""

    def run(
        run_dir: Path,
        *options: object,
        ranks: int = 1,
        torchrun: bool = False,
        max_file_bytes: int = resource.RLIM_INFINITY,
    ) -> subprocess.CompletedProcess[str]:
        command = [*command_of(ranks, torchrun), *TINY, "--run-dir", str(run_dir), "--data-path", str(tokens)]
        command += map(str, options)

        def limit_files() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))

        return subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=240, env=environment(), preexec_fn=limit_files
        )

    return run


@pytest.fixture(scope="session")
def train(tokens: Path, pretrain: Program) -> Program:
    """``pretrain`` for tests of what is trained, not of how it is started: the ranks are forked from a process that has
    imported everything, which saves most of a short run. Where there is a GPU they are not: DeepSpeed has chosen it."""
    if torch.accelerator.is_available():
        return pretrain

    def run(run_dir: Path, *options: object, ranks: int = 1) -> subprocess.CompletedProcess[str]:
        words = [*TINY, "--run-dir", str(run_dir), "--data-path", str(tokens), *map(str, options)]
        return start_program("megatron.optimus.pretrain", words, ranks, timeout=240)

    return run
