"""The checks before a run, on three real ranks: clean, and with a fault of each kind."""

import pytest

from megatron.optimus.checkpoint import latest, load_manifest
from megatron.optimus.commands.preflight import check_folder, compare
from megatron.optimus.config.load import load as config_of
from megatron.optimus.planner.reliability import checkpoint_bytes
from tests.helpers import start_program
from tests.integration.conftest import TINY

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
