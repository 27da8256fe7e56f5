"""What saves need is reserved before the first one, for the saves that are due at intervals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.optimus.config.load import load
from megatron.optimus.training.checkpointing import Checkpoints


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--save-interval 5", ["full"]),
        ("--save-interval 5 --model-only-save-interval 7", ["full", "model"]),
        ("--save-interval 0 --model-only-save-interval 7", ["model"]),
        ("--save-interval 0", []),  # a copy of the whole state in pinned memory, which no restart waits for then
    ],
)
def test_memory_is_reserved_for_saves_at_intervals(words: str, expected: list[str]) -> None:
    prepared: list[str] = []
    checkpoints = object.__new__(Checkpoints)
    checkpoints._config = load(["--preset", "mula-tiny", "--data-path", "x", *words.split()]).config
    checkpoints._saver = SimpleNamespace(prepare=lambda slices, header: prepared.append(header))  # type: ignore[assignment]
    checkpoints._slices = lambda kind: ([], None)  # type: ignore[method-assign]
    checkpoints._header = lambda kind, step, samples: kind  # type: ignore[assignment,method-assign,return-value]
    checkpoints._memory = None
    checkpoints.prepare()
    assert prepared == expected
