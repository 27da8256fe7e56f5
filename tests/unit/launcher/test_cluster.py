"""Nodes of a job, from the variables of PBS and SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.launcher.cluster import BatchSystem, detect_allocation, expand_slurm


def test_outside_of_a_job() -> None:
    found = detect_allocation({"HOME": "/"})
    assert (found.scheduler, found.hosts) == (BatchSystem.NONE, ())


def test_pbs_names_a_node_once_for_each_chunk(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("x1.domain\nx1.domain\nx2.domain\n\n")
    found = detect_allocation({"PBS_NODEFILE": str(nodes)})
    assert (found.scheduler, found.hosts) == (BatchSystem.PBS, ("x1.domain", "x2.domain"))


@pytest.mark.parametrize("content", [None, "\n"])
def test_an_unusable_node_file(tmp_path: Path, content: str | None) -> None:
    nodes = tmp_path / "nodes"
    if content is not None:
        nodes.write_text(content)
    with pytest.raises(ConfigError, match="PBS_NODEFILE"):
        detect_allocation({"PBS_NODEFILE": str(nodes)})


def test_slurm_also_says_how_many_devices() -> None:
    found = detect_allocation({"SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_GPUS_ON_NODE": "4"})
    assert (found.scheduler, found.hosts, found.devices_per_node) == (BatchSystem.SLURM, ("gpu1", "gpu2"), 4)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("one", ["one"]),
        ("a,b", ["a", "b"]),
        ("gpu[003-005,9],login1", ["gpu003", "gpu004", "gpu005", "gpu9", "login1"]),
        ("n[09-11]-ib", ["n09-ib", "n10-ib", "n11-ib"]),
        ("r[1-2]n[08,9],x", ["r1n08", "r1n9", "r2n08", "r2n9", "x"]),
    ],
)
def test_slurm_lists(text: str, hosts: list[str]) -> None:
    assert list(expand_slurm(text)) == hosts


@pytest.mark.parametrize(
    "text", ["gpu[1-x]", "gpu[1", "a]b", "gpu[5-3]", "gpu[]", "a,,b", "gpu[1-999999999]", "a[1-999]b[1-999]"]
)
def test_slurm_lists_of_another_form(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST"):
        expand_slurm(text)
