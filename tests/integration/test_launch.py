"""The launcher: exit codes, no rank left behind, jobs of PBS and SLURM with stand-ins for their commands."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.optimus.launch import main
from megatron.optimus.launcher.agent import run_local_ranks
from tests.integration.conftest import ROOT, TINY, environment
from tests.integration.imitated_cluster import ImitatedCluster


def ranks(program: str, count: int = 3) -> int:
    return run_local_ranks([sys.executable, "-c", program], count)


def test_every_rank_gets_its_place() -> None:
    code = (
        "import os; e = os.environ; assert e['WORLD_SIZE'] == e['LOCAL_WORLD_SIZE'] == '3'; "
        "assert e['RANK'] == e['LOCAL_RANK'] in '012'; int(e['MASTER_PORT']); e['MASTER_ADDR']; "
        "assert len(e['OPTIMUS_RENDEZVOUS_TOKEN']) == 32"
    )
    assert ranks(code) == 0


def test_one_failure_ends_all_and_gives_its_exit_code() -> None:
    started = time.monotonic()
    assert ranks("import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)") == 7
    assert time.monotonic() - started < 20


def test_a_killed_rank_is_named_and_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    assert ranks("import os, time; os.kill(os.getpid(), 9) if os.environ['RANK'] == '2' else time.sleep(60)") == 137
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: rank 2 ended with signal SIGKILL and the other")


def test_a_rank_that_explained_itself_is_not_explained_again(capfd: pytest.CaptureFixture[str]) -> None:
    assert ranks("import sys; sys.exit(2)") == 2
    assert capfd.readouterr().err == ""


def test_termination_reaches_the_ranks() -> None:
    rank = "import time; print(1, flush=True); time.sleep(60)"
    start = f"sys.exit(run_local_ranks({[sys.executable, '-c', rank]}, 2))"
    words = [
        sys.executable,
        "-c",
        f"from megatron.optimus.launcher.agent import run_local_ranks; import sys; {start}",
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment())
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM


def test_no_rank_outlives_the_launcher(tmp_path: Path) -> None:
    rank = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)"  # whole lines, also unbuffered
    start = f"run_local_ranks({[sys.executable, '-c', rank]}, 2)"
    words = [sys.executable, "-c", f"from megatron.optimus.launcher.agent import run_local_ranks; {start}"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "--nproc-per-node is missing"),
        (["--nproc-per-node", "0"], "'0'"),
        (["--nproc-per-node=two"], "'two'"),
        (["--nproc-per-node"], "--nproc-per-node needs a value"),
        (["--nproc-per-node", "2", "--system", "auror"], "did you mean aurora?"),
        (["--nprocs-per-node", "2"], "did you mean --nproc-per-node?"),
        (["--nproc-per-node", "2", "--max-restart", "3"], "did you mean --max-restarts?"),
        (["--nproc-per-node", "2", "--preset", "mula-tiny", "--global-batch-size", "3"], "global_batch_size=3"),
        (["--nproc-per-node", "2", "--preset", "mula-tiny"], "data_path is empty"),
        (["--nproc-per-node", "999999", "--data-path", "x", "--global-batch-size", "999999"], "use at most"),
        (["--nproc-per-node", "2", "--launcher", "mpirun"], "mpiexec"),
        (["--nproc-per-node", "3", "--preset", "mula-20b-a2b", "--dry-run"], "expert_model_parallel_size=12"),
    ],
)
def test_wrong_command_lines(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert expected in capsys.readouterr().err


def test_a_pbs_job_replaces_a_lost_node_and_goes_on_from_the_memory_of_the_others(tmp_path: Path, tokens: Path) -> None:
    """Without agents, as mpiexec itself binds the ranks."""
    words = "--cpu-bind depth".split()
    words += "--nodes 2 --max-restarts 1 --train-iters 60 --save-interval 0 --memory-checkpoint-interval 4".split()
    with ImitatedCluster(tmp_path / "job", ["x0", "x1", "x2"], tmp_path / "run") as job:
        job.launch(*TINY, *words, "--data-path", str(tokens), "--eval-interval", "0")
        job.wait_until(lambda: len(job.steps()) >= 10)
        job.lose("x1", "x1.hsn: shepherd died from signal 9\n")
        assert job.process.wait(timeout=120) == 0, job.log.read_text()
    assert job.attempts == [["x0", "x1"], ["x0", "x2"]]
    text = job.log.read_text()
    assert "lost nodes: x1" in text and "no agents on the nodes" in text
    assert "rank 1 got its state of step" in text and "resumed from host memory: step" in text
    assert [line["step"] for line in job.steps()] == list(range(1, 61))
    [lost] = [line["lost_steps"] for line in job.steps() if line.get("lost_steps") is not None and line["step"] > 1]
    assert lost <= 7  # less than an interval since the last copy, and one where that was not complete
    assert [job.memory(host).exists() for host in ("x0", "x1", "x2")] == [False] * 3  # given back


def test_a_starter_that_is_not_there(tmp_path: Path) -> None:
    words = ["--launcher", "srun", "--nproc-per-node", "2", "--max-restarts", "3", "--preset", "mula-tiny"]
    words += ["--data-path", "corpus"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron.optimus.launch", *words],
        env={**environment(), "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: srun is not on PATH")


SCRIPTS = sorted(path for path in (ROOT / "examples").glob("*/mula_*") if path.suffix in (".sh", ".pbs"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_job_scripts(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script's own words, with the user's after them, describe a run that could start."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")  # a tree without a virtual environment to activate
    copied = tmp_path / script.relative_to(ROOT)
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "DATA_FILE_LIST": "/data/list of files.txt"}
    env["OPTIONS"] = "--tensorboard-dir 'two words'"
    done = subprocess.run(
        ["bash", str(copied), "--lr", "0.0035"], env=env, capture_output=True, text=True, cwd="/", check=True
    )
    words = done.stdout.splitlines()
    assert words[:2] == ["-m", "megatron.optimus.launch"]
    assert script.parent.name == "local" or "/data/list of files.txt" in words
    assert script.parent.name != "aurora" or "two words" in words
    assert main([*words[2:], "--dry-run", "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert "  lr: 0.0035" in shown
    assert f"runs/{script.stem.replace('_', '-')}" in shown


def test_a_job_script_ends_where_its_options_would_be_lost(tmp_path: Path) -> None:
    """Quotes that are not closed, and a job that was not submitted from the source tree: nothing may start without the
    options that were asked for."""
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\necho started\n")
    python.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    for script in SCRIPTS:
        elsewhere = {"PBS_O_WORKDIR": str(tmp_path), "SLURM_SUBMIT_DIR": str(tmp_path)}
        start, where = script, tmp_path
        if script.parent.name == "local":  # finds its tree by itself, but where SLURM runs a copy
            start = Path(shutil.copy(script, tmp_path / "slurm_script"))
            where = tmp_path.parent.parent
        done = subprocess.run(
            ["bash", str(start)], env=env | elsewhere, capture_output=True, text=True, cwd="/", check=False
        )
        assert done.returncode == 2 and not done.stdout, script
        assert done.stderr.startswith(f"error: {where} is not the root of the source tree; s"), (script, done.stderr)
        assert done.stderr.count("\n") == 1, done.stderr
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    script = tmp_path / "examples/aurora/mula_1b.pbs"
    done = subprocess.run(
        ["bash", str(script)], env=env | {"OPTIONS": "--lr '2e-4"}, capture_output=True, text=True, cwd="/", check=False
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == "error: OPTIONS=--lr '2e-4 is not a list of words for the shell; close its quotes\n"


def test_the_dry_run_of_the_largest_model_is_the_papers_layout(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--system", "aurora", "--launcher", "mpiexec", "--nodes", "256", "--preset", "mula-220b-a10b"]
    assert main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "# 256 nodes x 12 ranks = 3072 ranks" in shown
    assert "mpiexec --envall --line-buffer -n 3072 --ppn 12" in shown
    assert "export CCL_KVS_USE_MPI_RANKS=1  # " in shown
    assert "expert view pp=8 edp=32 ep=12" in shown
