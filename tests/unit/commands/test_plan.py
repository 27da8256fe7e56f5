"""The planner's command: what it prints, its JSON, and what it refuses in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron.optimus.commands import plan as command
from megatron.optimus.commands import plan as plan_command
from megatron.optimus.commands.plan import main
from megatron.optimus.planner import measure
from tests.unit.planner.test_plan import SYMMETRIC
from tests.unit.planner.test_search import SMALL

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            f"{SYMMETRIC} 16 --world-size 16",
            "symmetric needs the 16 ranks that share the experts on one node of 8; use allgather or alltoall",
        ),
        (f"{SYMMETRIC} 4 --world-size 4 --system aurora", "symmetric needs GPUs of CUDA, which aurora has not; use"),
        (
            f"{SYMMETRIC.replace('symmetric', 'hierarchical')} 8 --world-size 8",
            "hierarchical needs experts over several nodes: the 8 ranks of a node must be 2 or more",
        ),
        ("--preset mula-1b --system summit", "--system='summit' is unknown; use a100, aurora, b200, h100, h200,"),
        ("--preset mula-1b --nodes none", "--nodes='none' must be a whole number of 1 or more"),
        ("--preset mula-1b --nodes \N{SUPERSCRIPT TWO}", "must be a whole number"),
        ("--preset mula-1b --nodes", "--nodes needs a value"),
        ("--preset mula-1b --world-size 99999999999", "99,999,999,999 ranks are more than the 1,000,000"),
        ("--preset mula-1b --nodes 2 --world-size 8", "--nodes=2 of h200 are 16 ranks, but --world-size=8"),
        ("--preset mula-1b --wolrd-size 8", "did you mean --world-size?"),
        ("--preset mula-tiny --world-size 7 --check-build", "could not be built: global_batch_size=16 must be"),
        ("--preset mula-1b --hidden 4", "unknown option --hidden"),
        (
            "--preset mula-1b --global-batch-size 8 --pipeline-model-parallel-size 3 --top 0",
            "must divide the number of",
        ),
        ("--preset mula-1b --zero-stage 3 --global-batch-size 8 --top 0", "zero_stage=3 is not planned here"),
        ("--preset mula-220b-a10b --weak-scaling /dev/null/x", "/dev/null/x.md cannot be written: Not a directory"),
    ],
)
def test_bad_input_is_one_clear_error(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command.main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_the_command_line_shows_a_plan_and_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    main = plan_command.main
    words = "--preset mula-220b-a10b --nodes 1024 --system aurora --global-batch-size 12288 --top 0".split()
    words += "--recompute-modules moe attention norm".split()
    assert main([*words, "--explain"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].endswith("recompute moe+attention+norm")
    for part in ("pp 8, ep 12, dp 1536", "not measured by us", "optimizer states", "tokens to experts", "MFU"):
        assert part in text
    assert main([*words, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["plan"]
    assert made["fits"] and len(made["memory"]) == 8 and made["time"]["step_s"] > 0
    assert made["memory"][0]["in_flight"] == 8 and made["memory"][7]["in_flight"] == 1


def test_the_best_layout_comes_as_options_that_give_it(capsys: pytest.CaptureFixture[str]) -> None:
    main = plan_command.main
    words = "--preset mula-20b-a2b --nodes 2 --system aurora --global-batch-size 96".split()  # stages, chunks, experts
    main([*words, "--top", "1"])
    best, options = capsys.readouterr().out.split("\n  1. ")[1].split("\n")[:2]
    assert main([*words, "--top", "0", *options.removeprefix("the first as options: ").split()]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(best.rsplit(": ", 1)[1])


def test_sizes_that_leave_nothing_to_try_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--preset mula-7b-a1b --nodes 1 --pipeline-model-parallel-size 5"
    assert plan_command.main(words.split()) == 2
    assert "the sizes named on the command line do not divide 8 ranks" in capsys.readouterr().out


def test_the_papers_curve_stands_beside_its_own_model_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for preset, paper in (("mula-220b-a10b", "97%"), ("mula-7b-a1b", "")):
        assert plan_command.main(["--preset", preset, "--weak-scaling", str(tmp_path / "v1.2")]) == 0
        assert capsys.readouterr().out.splitlines()[3].split("|")[-2].strip() == paper
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v1.2.md", "v1.2.png"]


def test_no_plan_needs_torch() -> None:
    import subprocess

    code = (
        "import sys; from megatron.optimus.commands import plan; "
        "plan.main('--preset mula-7b-a1b --nodes 1 --system aurora --top 1'.split()); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60)


def test_the_list_and_json_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    tool = plan_command
    words = f"{SMALL} --global-batch-size 16 --world-size 8 --tensor-model-parallel-size 1 --top 2".split()
    assert tool.main(words) == 0
    text = capsys.readouterr().out
    assert text.count("over 4 pipeline stages; --global-batch-size") == 2 and "\nthe first has bubble" in text
    assert tool.main([*words, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    times = [one["time"] for one in (made["plan"], *made["search"]["best"])]
    assert [time["bubble_hint"] is not None for time in times] == [time["bubble_share"] > 0.20 for time in times]
    assert f"\n{times[0]['bubble_hint']}\n" in text and f"\nthe first has {times[1]['bubble_hint']}\n" in text


@pytest.mark.parametrize("name", ["mine.txt", "nowhere/mine.yaml"])
def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(measure, "measured_yaml", lambda log: pytest.fail("measured"))
    assert command.main(["--measure", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --measure={tmp_path / name}: ")


def test_the_table_and_what_is_refused(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    words = ["--preset", "mula-220b-a10b", "--system", "aurora"]
    assert main([*words, "--nodes", "100", "--mtbf-hours", "6300", "--effective-time", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("| ranks | nodes | failure every |") and "| 1,200 | 100 | 63 h |" in shown
    assert (tmp_path / "out.md").read_text() == shown and (tmp_path / "out.png").stat().st_size > 1000
    assert main([*words, "--mtbf-hours", "0"]) == 2 and "must be 0.1 to 1e7" in capsys.readouterr().err
    assert main([*words, "--effective-time", "x"]) == 2 and "needs --mtbf-hours" in capsys.readouterr().err
