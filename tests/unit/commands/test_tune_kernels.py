"""The command that tunes kernels: what it cannot tune is one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.optimus import ops


@pytest.fixture
def auto_backend() -> Iterator[None]:
    """The tool chooses Triton for its process."""
    yield
    ops.set_backend("auto")


@pytest.mark.usefixtures("auto_backend")
def test_the_tool_refuses_what_it_cannot_tune(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from megatron.optimus.commands.tune_kernels import main

    cases = {
        ("--preset", "mula-1b", "--device", "cpu"): "num_experts=0: a model without experts has no expert kernels",
        ("--preset", "mula-7b-a1b", "--tokens", "many"): "--tokens='many' must be a whole number of 1 or more",
        ("--preset", "mula-7b-a1b", "--tokens=0"): "--tokens='0' must be",
        (
            "--preset",
            "mula-7b-a1b",
            "--params-dtype",
            "fp32",
        ): "params_dtype=fp32: the Triton kernels support bf16 only",
        ("--preset", "mula-7b-a1b", "--token", "5"): "--tokens",
        ("--preset", "mula-7b-a1b", "--device", "cpu"): "backend 'triton' cannot run on cpu bfloat16",
    }
    for words, message in cases.items():
        assert main(words) == 2
        written = capsys.readouterr()
        assert written.err.startswith("error: ") and written.err.count("\n") == 1 and message in written.err, written
