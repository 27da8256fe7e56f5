"""The checks before a run, on three real ranks: clean, and with a fault of each kind."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from megatron.optimus.checkpoint import latest, load_manifest
from megatron.optimus.commands.preflight import check_folder, compare
from megatron.optimus.config.load import load as config_of
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.launch import main as launch_main
from megatron.optimus.launcher.preflight import bad_nodes
from megatron.optimus.planner.reliability import checkpoint_bytes
from megatron.optimus.platform import device_checks
from tests.helpers import start_program
from tests.integration.conftest import TINY, environment

PROGRAM = "tests.distributed.preflight_program"
WORDS = [*TINY, "--data-path", "none"]


def test_three_ranks_without_a_fault(tmp_path):
    done = start_program(PROGRAM, ["clean", *WORDS, "--save", str(tmp_path / "save")], 3, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum("bfloat16 tflops" in line for line in lines) == 3 and "folder write" in done.stdout
    assert lines[-1].startswith("preflight: 3 ranks on 1 nodes: all is well, after ")
    assert not list((tmp_path / "save").iterdir())


def test_each_fault_is_one_line_with_value_limit_and_remedy(tmp_path):
    (tmp_path / "file").touch()
    done = start_program(PROGRAM, ["faults", *WORDS, "--save", str(tmp_path / "file" / "save")], 3, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    found = sorted(line for line in done.stdout.splitlines() if "FAILED" in line)
    for line, rank, words in zip(
        found,
        ("", "rank 0", "rank 1", "rank 1", "rank 2"),
        (
            ("space: 0.0009766 GiB free", "GiB more", "--save-retain"),
            ("folder ", "Not a directory", "--save"),
            ("products of torch.bfloat16 matrices", "wrong numbers", "limit 0", "out of use"),
            ("versions: optimus 0.0.1, most ranks have", "install the same"),
            ("clock: +5.0 s", "limit 1 s", "NTP"),
        ),
        strict=True,
    ):
        assert line.startswith(f"preflight: {rank}") and all(word in line for word in words), line
    assert "5 problems" in done.stdout


def test_the_size_of_checkpoints_is_that_of_the_programs_own(tmp_path, monkeypatch):
    """Weights and moments; what else is in a checkpoint, such as the random state, is small."""
    from tests.distributed.training.test_checkpointing import _train
    from tests.helpers import run_distributed
    from tests.integration.conftest import write_corpus

    write_corpus(tmp_path / "counting")
    run_distributed(_train, 2, str(tmp_path), tmp_path / "out", {}, 2)
    kinds: dict[str, int] = {}
    for entry in load_manifest(latest(tmp_path / "out" / "checkpoints")).tensors.values():
        kinds[entry.kind] = kinds.get(entry.kind, 0) + sum(piece.num_bytes for piece in entry.pieces)
    stored = sum(size for kind, size in kinds.items() if kind not in ("rng", "buffer"))
    assert checkpoint_bytes(config_of(WORDS).config)[0] == stored


def test_a_flipped_bit_of_memory_is_found(monkeypatch):
    monkeypatch.setattr(device_checks, "_HOST_BYTES", 1 << 20)
    copy = torch.Tensor.copy_

    def flip(self, other):
        copy(self, other)
        self[5] ^= 1 << 9
        return self

    assert device_checks.check_memory(torch.device("cpu"))["tested_gib"] > 0
    monkeypatch.setattr(torch.Tensor, "copy_", flip)
    with pytest.raises(device_checks.BadDevice, match=r"memory pattern: \d+ of .* words wrong .* limit 0"):
        device_checks.check_memory(torch.device("cpu"))


def test_slow_devices_and_links_are_compared_on_accelerators():
    versions = {"torch": "2"}
    one = {"versions": versions, "time": 0.0, "exchange": ""}
    everyone = [one | {"figures": {"memory_gb_s": rate, "to_host_gb_s": 40}} for rate in (3000, 3010, 2500, 2990)]
    [(rank, text)] = compare(everyone, is_accelerator=True)
    assert rank == 2 and text.startswith("memory gb s: 2500, the usual is 3000")
    assert compare(everyone, is_accelerator=False) == []
    everyone[1] = one | {"figures": {}, "exchange": "exchange: wrong numbers"}
    assert (1, "exchange: wrong numbers") in compare(everyone, is_accelerator=True)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"folder .*/file/x: Not a directory; mend it"):
        check_folder(tmp_path / "file" / "x")


MPIEXEC = """#!{python}
# Stands for mpiexec: the checks find a fault on the second node; training is done at once.
import sys
words = sys.argv[1:]
print(*open(words[words.index("--hostfile") + 1]).read().split(), file=open("{log}", "a"))
if any("preflight" in word for word in words):
    print("preflight: rank 0 on x0: memory gb s 3")
    print("preflight: rank 1 on x1: FAILED: products: 3 wrong numbers, limit 0; take this device out of use")
    sys.exit(1)
"""


def test_a_bad_node_is_exchanged_before_the_first_attempt(tmp_path: Path, monkeypatch, capfd, caplog) -> None:
    mpiexec, nodes, log = tmp_path / "mpiexec", tmp_path / "nodes", tmp_path / "log"
    mpiexec.write_text(MPIEXEC.format(python=sys.executable, log=log))
    mpiexec.chmod(0o755)
    nodes.write_text("x0\nx1\nx2\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PBS_NODEFILE", str(nodes))
    words = ["--preflight", "--mpi", "pals", "--nproc-per-node", "1", *WORDS, "--run-dir", str(tmp_path / "run")]
    assert launch_main(["--nodes", "2", *words]) == 0
    assert log.read_text().splitlines() == ["x0 x1 x2", "x0 x2"]
    [(host, entry)] = json.loads((tmp_path / "run" / "bad_nodes.json").read_text()).items()
    assert host == "x1" and entry["reason"].startswith("check: products: 3 wrong numbers")
    assert "bad node x1" in caplog.text
    nodes.write_text("x3\nx4\n")  # no spare
    assert launch_main(["--nodes", "2", *words]) == 1
    assert "no spare for the bad nodes x4; ask for more nodes" in capfd.readouterr().err


def test_what_names_no_node_is_an_error(tmp_path):
    def run(*lines, code=1):
        text = "".join(f"print({line!r});" for line in lines)
        return bad_nodes(
            [sys.executable, "-c", f"{text}import sys;sys.exit({code})"], environment(), ["a", "b", "c"], 2
        )

    with pytest.raises(ConfigError, match="preflight: space: 1 GiB free"):
        run("preflight: FAILED: space: 1 GiB free")
    assert run("preflight: rank 0 on a: ok", "[0] preflight: rank 5 on c: ok") == {"b": "no rank answered"}
    with pytest.raises(ConfigError, match="ended with code 1 and names no node: mpiexec: not allowed"):
        run("mpiexec: not allowed")
    assert run("preflight: 6 ranks on 3 nodes: all is well, after 3 s", code=0) == {}
