"""``optimus drill`` on two ranks: faults are noticed, named and recovered from, and wrong command lines are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.optimus.commands import drill
from megatron.optimus.commands.drill_faults import FAULTS, Fault
from megatron.optimus.config.schema import ConfigError


def test_short_drill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", "2", "--faults", "kill,flip,disk-full,link-cut,coordinator-recovery", "--steps", "70"]
    words += ["--out", str(tmp_path / "out")]
    assert drill.main(words) == 0, capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "drill.json").read_text())
    assert sorted(one["fault"] for one in found["faults"]) == [
        "coordinator-recovery",
        "disk-full",
        "flip",
        "kill",
        "link-cut",
    ]
    for one in found["faults"]:
        assert one["identical"] and one["noticed_s"] < one["recovered_s"], one
        if FAULTS[one["fault"]].names:
            assert one["named"] in one["ranks"], one
    assert "| SIGKILL of a rank in a step | 1 |" in (tmp_path / "out" / "drill.md").read_text()
    assert not list((tmp_path / "out").glob("round-*"))  # only those with a broken promise are kept


@pytest.mark.parametrize(
    ("gpus", "possible"),
    [(2, lambda fault: not fault.needs_tcp), (1, lambda fault: fault.needs_agents)],
)
def test_gpus_say_which_faults_are_possible(
    gpus: int, possible: Callable[[Fault], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on two nodes: on one GPU, which nodes share, with agents alone. NCCL uses no TCP inside a host."""
    monkeypatch.setattr(drill, "device_count", lambda kind: gpus)
    options = drill._parse(["--device", "cuda", "--ranks", "2", "--out", str(tmp_path / "out")])
    assert options.faults == [one for one in FAULTS.values() if possible(one)] and options.steps > drill._STEPS
    words = ["--device", "cuda", "--ranks", "2", "--faults", "link-cut", "--out", str(tmp_path / "out")]
    if gpus == 2:
        assert [one.name for one in drill._parse(words).faults] == ["link-cut"]
        return
    with pytest.raises(ConfigError, match="--faults=link-cut: this machine has 2 ranks, each on a cuda device of its"):
        drill._parse(words)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--faults", "kil"], "unknown fault 'kil'"),
        (["--faults", "agent", "--device", "xpu"], "--faults=agent: --device=xpu cannot be divided"),
        (["--faults", "agent", "--device", "cuda"], "a simulated node has 2 ranks, each on a cuda device of its"),
        (["--device", "cuda"], "this machine has 4 ranks, each on a cuda device of its own, and 0 are seen"),
        (["--faults", "two-nodes", "--nodes", "1"], "--faults=two-nodes: it needs --nodes=2 or more"),
        (["--ranks", "3"], "--ranks=3 must be 2 or more and a multiple of --nodes=2"),
        (["--out", "/"], "/ is not empty"),
    ],
)
def test_bad_command_lines(
    words: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(drill, "device_count", lambda kind: 0)
    assert drill.main(["--out", str(tmp_path / "out"), *words]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_parts_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Faults, rounds and broken promises of all parts are in one table; the same part twice is refused."""

    def part(seed: int, broken: str) -> str:
        fault = {"fault": "kill", "step": 7, "ranks": [1], "noticed_s": seed, "named": 1, "recovered_s": seed + 1.0}
        fault |= {"round": 1, "steps_lost": 0, "identical": not broken, "broken": broken}
        (tmp_path / str(seed)).mkdir()
        found = {"command": f"optimus drill --seed {seed}", "rounds": 2, "seconds": 10, "faults": [fault]}
        found |= {"ranks": 8, "cores": 640, "steps": 50, "load": float(seed)}
        (tmp_path / str(seed) / "drill.json").write_text(json.dumps(found))
        return str(tmp_path / str(seed))

    first, second, out = part(1, ""), part(3, "no new step"), tmp_path / "out"
    assert drill.main(["--join", first, second, "--out", str(out)]) == 1
    found = json.loads((out / "drill.json").read_text())
    assert [one["round"] for one in found["faults"]] == [1, 3] and (found["rounds"], found["seconds"]) == (4, 20)
    # Of the machine that the drills ran on.
    assert (found["ranks"], found["cores"], found["load"], found["command"]) == (
        8,
        640,
        3.0,
        "optimus drill --join 1 3 --out DIR",
    )
    text = (out / "drill.md").read_text()
    assert "| SIGKILL of a rank in a step | 2 | 2 (3) | 2 | 2: 3 (4) | 0 (0) | 1 |" in text
    assert "kill in round 3: no new step" in text
    for parts, problem in (([first, first], "two parts have the same command"), ([str(tmp_path)], "drill.json")):
        assert drill.main(["--join", *parts, "--out", str(tmp_path / "new")]) == 2
        assert problem in capsys.readouterr().err and not (tmp_path / "new").exists()
