"""`optimus sweep`: which runs it starts, what it does not repeat, and the table of what came out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.optimus.commands import sweep

BASE = ["--", "--preset", "mula-tiny"]
LOSSES = {"1e-3": 3.0, "1e-2": 2.0, "1e-1": 2.5}


class Runs:
    """Stands for run_trial: writes metrics, and answers each rate's code."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.codes: dict[str, tuple[int, bool]] = {}

    def __call__(self, options: Sequence[str], folder: Path, num_ranks: int | None) -> tuple[int, bool]:
        rate = options[options.index("--lr") + 1]
        self.started.append(folder.name)
        (folder / "output.txt").write_text(f"starting\nerror: rate {rate} is wrong\n")
        code, is_told = self.codes.get(rate, (0, False))
        if code != 2:
            lines = [{"step": step, "loss": LOSSES[rate] + 1 / step} for step in range(1, 101)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            (folder / "checkpoints").mkdir(exist_ok=True)
        return code, is_told


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    found = Runs()
    monkeypatch.setattr(sweep, "run_trial", found)
    return found


def grid(folder: Path, *words: str) -> list[str]:
    return ["--vary", "lr=1e-3,1e-2,1e-1", "--run-dir", str(folder), *words, *BASE]


def rows(text: str) -> dict[str, list[str]]:
    """Cells of the table by rate."""
    cells = [line.split() for line in text.splitlines()]
    return {words[words[0] == "*"]: words for words in cells if words and words[words[0] == "*"] in LOSSES}


def test_a_failing_run_is_a_row_and_ended_runs_are_not_repeated(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.codes = {"1e-3": (2, False), "1e-1": (4, False)}
    assert sweep.main(grid(tmp_path)) == 0
    out = capsys.readouterr().out
    assert runs.started == ["lr=1e-3", "lr=1e-2", "lr=1e-1"]
    found = rows(out)
    assert found["1e-2"][:5] == ["*", "1e-2", "done", "100", f"{2 + sum(1 / n for n in range(91, 101)) / 10:.5g}"]
    assert found["1e-3"][1:3] == ["failed", "(2)"] and found["1e-1"][1] == "diverged"
    assert "lr=1e-3: rate 1e-3 is wrong" in out
    assert (tmp_path / "sweep.png").exists() and len(json.loads((tmp_path / "sweep.json").read_text())) == 3
    assert not list(tmp_path.glob("*/checkpoints"))

    runs.started, runs.codes = [], {}
    assert sweep.main(grid(tmp_path)) == 0
    assert runs.started == ["lr=1e-3"]  # it may have been mended; one that diverged would diverge again
    assert rows(capsys.readouterr().out)["1e-3"][1] == "done"


def test_a_stop_ends_the_sweep_and_the_next_start_goes_on(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.codes = {"1e-2": (143, True)}
    assert sweep.main(grid(tmp_path)) == 143
    assert runs.started == ["lr=1e-3", "lr=1e-2"] and (tmp_path / "lr=1e-2/checkpoints").exists()
    assert sweep.main(grid(tmp_path, "--show")) == 0
    assert [rows(capsys.readouterr().out)[rate][-6] for rate in ("1e-2",)] == ["unfinished"]
    runs.started, runs.codes = [], {}
    assert sweep.main(grid(tmp_path, "--keep-checkpoints")) == 0
    assert runs.started == ["lr=1e-2", "lr=1e-1"] and (tmp_path / "lr=1e-2/checkpoints").exists()


def test_a_run_that_a_signal_killed_does_not_end_the_sweep(tmp_path: Path, runs: Runs) -> None:
    runs.codes = {"1e-2": (137, False)}
    assert sweep.main(grid(tmp_path)) == 0 and len(runs.started) == 3
    assert sweep.main(grid(tmp_path)) == 0 and runs.started[3:] == ["lr=1e-2"]


def test_a_grid_is_all_combinations_and_an_array_runs_one_of_them(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--vary", "lr=1e-3,1e-2", "--vary", "moe-layer-freq=1,0 1 0 1", "--run-dir", str(tmp_path / "a b")]
    assert sweep.main([*words, "--index", "3", *BASE]) == 0
    assert runs.started == ["lr=1e-2,moe_layer_freq=0_1_0_1"]
    options = json.loads((tmp_path / "a b" / runs.started[0] / "sweep_run.json").read_text())["options"]
    assert options[:-2] == [*BASE[1:], "--lr", "1e-2", "--moe-layer-freq", "0", "1", "0", "1"]
    assert sweep.main([*words, "--index", "4", *BASE]) == 2
    capsys.readouterr()

    for name, index, head in (
        ("slurm", "SLURM_ARRAY_TASK_ID", "#SBATCH --array=0-3"),
        ("pbs", "PBS_ARRAY_INDEX", "#PBS -J 0-3"),
    ):
        assert sweep.main([words[0], words[1], f"--print_array={name}", *words[2:], *BASE]) == 0
        script = capsys.readouterr().out
        assert script.startswith("#!/bin/bash\n") and head in script and f'--index "${index}" -- --preset' in script
        assert "'moe-layer-freq=1,0 1 0 1'" in script and "/a b'" in script and "print" not in script


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vary", "lrr=1,2"], "did you mean lr?"),
        (["--vary", "lr"], "NAME=VALUE,VALUE is meant"),
        (["--vary", "lr=1,x"], "expected a number"),
        (["--vary", "lr=1,1"], "names a value twice"),
        (["--vary", "lr=1", "--vary", "lr=2"], "lr is given twice"),
        (["--vary", "run_dir=a,b"], "run_dir is set by the sweep"),
        (["--vary", "lr=1", "--print-array", "pbs"], "no array"),
        (["--vary", "lr=1", "--print-array", "lsf"], "'lsf' is not one of slurm, pbs"),
        (["--vary", "lr=1", "--", "--no-such"], "unknown option --no-such"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], message: str, tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.main(["--run-dir", str(tmp_path), *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line and runs.started == []


def test_a_folder_of_other_options_is_refused(tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(grid(tmp_path)) == 0
    assert sweep.main([*grid(tmp_path), "--train-iters", "7"]) == 2
    assert "holds a run with other options" in capsys.readouterr().err and len(runs.started) == 3
