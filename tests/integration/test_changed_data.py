"""Token files that are overwritten between two starts of a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron.optimus.checkpoint import load_manifest
from tests.integration.conftest import Program, write_corpus

QUIET = ("--eval-interval", 0, "--save-interval", 0)


def _train(train: Program, folder: Path, steps: int, *options: object, ranks: int = 1) -> tuple[int, str]:
    data = ("--data-path", folder / "one", folder / "two", "--valid-data-path", f"held={folder / 'held'}")
    result = train(folder / "run", *QUIET, *data, "--train-iters", steps, *options, ranks=ranks)
    return result.returncode, result.stdout + result.stderr


@pytest.fixture(scope="module")
def trained(train: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("one", "two", "held")):
        write_corpus(folder / name, seed)
    code, output = _train(train, folder, 3)
    assert code == 0, output
    return folder


def _noise(prefix: Path) -> None:
    """Other valid tokens, of the same number, under the same index."""
    path = prefix.with_suffix(".bin")
    tokens = np.fromfile(path, np.uint16)
    np.random.default_rng(1).permutation(tokens).tofile(path)


def test_changed_training_files_are_an_error_that_names_them(train: Program, trained: Path) -> None:
    lines = load_manifest(trained / "run/checkpoints/step-00000003").metadata["data_files"]
    assert [line.split(" ", 2)[2] for line in lines] == [str(trained / name) for name in ("one", "two", "held")]
    assert _train(train, trained, 4)[0] == 0, "unchanged files are accepted"
    assert _train(train, trained, 5, ranks=2)[0] == 0, "also where two ranks hash a share each"

    _noise(trained / "two")
    for ranks in (1, 2):
        code, output = _train(train, trained, 6, ranks=ranks)
        errors = [line for line in output.splitlines() if line.startswith("error")]
        assert code == 2 and len(errors) == 1 and "Traceback" not in output, output
        assert f"{trained / 'two'}.bin or its .idx file holds other data" in errors[0]
        assert "--allow-changed-data" in errors[0]
    code, output = _train(train, trained, 6, "--allow-changed-data")
    assert code == 0 and f"{trained / 'two'}.bin or its .idx file holds other data" in output, output
    code, output = _train(train, trained, 7)
    assert code == 0 and "holds other data" not in output, "the newest checkpoint knows the new file"

    _noise(trained / "held")
    code, output = _train(train, trained, 8)
    assert code == 0 and f"{trained / 'held'}.bin or its .idx file holds other data" in output, output

    shutil.copytree(trained / "run", trained / "base")
    write_corpus(trained / "one", 7)
    code, output = _train(train, trained, 9)
    assert code == 2 and f"{trained / 'one'}.bin had" in output and "tokens and now has" in output, output
    options = ("--run-dir", trained / "tuned", "--load", trained / "base/checkpoints", "--finetune")
    code, output = _train(train, trained, 2, *options)
    assert code == 0 and "now has" not in output, "a new run from these weights may take any data"
