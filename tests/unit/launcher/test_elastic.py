"""Layouts on fewer nodes: the rule that chooses, and command lines that no attempt could follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.optimus import launch
from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.launch import main
from megatron.optimus.launcher.elastic import ElasticLayout, ElasticLayouts

MODEL = "--preset mula-tiny --num-experts 8 --micro-batch-size 1".split()


def layouts(options: str, num_nodes: int, min_nodes: int = 1, ranks_per_node: int = 1) -> ElasticLayouts:
    return ElasticLayouts(load([*MODEL, *options.split()]).config, ranks_per_node, num_nodes, min_nodes)


@pytest.mark.parametrize(
    ("options", "ranks_per_node", "available", "expected"),
    [
        ("--global-batch-size 48", 1, 8, ElasticLayout(8, 1)),
        ("--global-batch-size 48", 1, 7, ElasticLayout(6, 1)),  # 48 samples on 7 ranks do not divide
        ("--global-batch-size 48", 1, 5, ElasticLayout(4, 1)),
        (
            "--global-batch-size 48 --expert-model-parallel-size 2",
            1,
            3,
            ElasticLayout(2, 2),
        ),  # 3 only with 1
        ("--global-batch-size 48 --expert-model-parallel-size 4", 1, 3, ElasticLayout(2, 2)),  # none with 4
        ("--global-batch-size 48 --expert-model-parallel-size 4", 4, 3, ElasticLayout(3, 4)),
        ("--global-batch-size 48 --expert-model-parallel-size 4 --moe-expert-placement-file x.json", 1, 3, None),
        (
            "--global-batch-size 48 --tensor-model-parallel-size 2",
            1,
            5,
            ElasticLayout(4, 1),
        ),  # whole copies
        ("--global-batch-size 48 --tensor-model-parallel-size 2", 1, 1, None),
    ],
)
def test_the_most_nodes_with_the_experts_spread_as_they_were(
    options: str, ranks_per_node: int, available: int, expected: ElasticLayout | None
) -> None:
    assert layouts(options, 8, ranks_per_node=ranks_per_node).best(available) == expected


def test_no_fewer_than_asked_for() -> None:
    assert layouts("--global-batch-size 48", 8, min_nodes=7).best(7) is None
    with pytest.raises(ConfigError, match=r"--min-nodes=7: the run does not fit on so many nodes .*48.*; use 1, 2, 3"):
        layouts("--global-batch-size 48", 8, min_nodes=7).check_min_nodes()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--min-nodes", "5"], "--min-nodes=5 exceeds the 4 nodes of the run; use fewer"),
        (["--min-nodes", "3"], "--min-nodes=3: the run does not fit on so many nodes"),
        (["--min-nodes", "0"], "'0'"),
        (["--min-nodes", "2", "--max-restarts", "0"], "--max-restarts is 0; give it too"),
        (["--min-nodes", "2", "--launcher", "local", "--nproc-per-node", "4"], "needs the nodes of a PBS or SLURM job"),
    ],
)
def test_one_line_before_anything_starts(
    words: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "local" not in words:
        (tmp_path / "nodes").write_text("x0\nx1\nx2\nx3\n")
        monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    run = ["--nproc-per-node", "1", "--max-restarts", "1", *MODEL, "--global-batch-size", "8", "--data-path", "corpus"]
    assert main([*run, *words]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_without_agents_too_an_attempt_has_the_layout_of_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(launch.shutil, "which", str)
    monkeypatch.setattr(launch, "run_monitored", lambda command, env, *_: started.append((command, env)))

    def restart_with_two(attempt_on: Callable[[Sequence[str]], object], *_: Any) -> int:
        attempt_on(["x0", "x1", "x2", "x3"])
        attempt_on(["x0", "x2"])
        return 0

    monkeypatch.setattr(launch, "run_with_restarts", restart_with_two)
    (tmp_path / "nodes").write_text("x0\nx1\nx2\nx3\n")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    run = "--nproc-per-node 1 --max-restarts 1 --min-nodes 2 --launcher torchrun --global-batch-size 8".split()
    memory = "--memory-checkpoint-interval 2 --expert-model-parallel-size 4 --data-path corpus".split()
    assert main([*run, *MODEL, *memory, "--run-dir", str(tmp_path / "run")]) == 0
    (of_four, env), (of_two, env_of_two) = started
    flag = "--expert-model-parallel-size"
    assert [words[len(words) - words[::-1].index(flag)] for words in (of_four, of_two)] == ["4", "2"]
    assert env["OPTIMUS_MEMORY_FOLDER"] == env_of_two["OPTIMUS_MEMORY_FOLDER"]
    assert env["OPTIMUS_RENDEZVOUS_TOKEN"] != env_of_two["OPTIMUS_RENDEZVOUS_TOKEN"]
