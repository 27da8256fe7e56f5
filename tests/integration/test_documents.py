"""Documents inside samples through the whole program: masks, positions and labels, on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.tokenize.tokenizer import HuggingFaceTokenizer, train_bpe

from .conftest import Program

OPTIONS = ["--tokenizer-type", "ByteLevelTokenizer", "--vocab-size", 257]
DOCUMENTS = ["--reset-attention-mask", "true", "--reset-position-ids", "true", "--eod-mask-loss", "true"]
SAME_STATISTICS = ["--moe-router-load-balancing-type", "none"]  # those of micro-batches depend on their size


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Documents of 2 to 40 bytes, whose ends are marked; in some samples many, in some none."""
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "words", np.dtype(np.uint16)) as writer:
        for _ in range(800):
            writer.add_document([*rng.integers(97, 123, int(rng.integers(1, 40))).tolist(), 256])
    return tmp_path / "words"


def metrics(run_dir: Path) -> list[tuple[float, ...]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"], row.get("valid_loss") or 0.0) for row in rows]


def test_masked_labels_are_averaged_over_the_global_batch(tmp_path: Path, words: Path, train: Program) -> None:
    """Ranks and micro-batches have different numbers of labels; losses and gradients must not depend on the cut."""
    runs = {}
    for name, ranks, micro_batch in (("one", 1, 8), ("two", 2, 2)):
        options = [*OPTIONS, *DOCUMENTS, *SAME_STATISTICS, "--data-path", words, "--micro-batch-size", micro_batch]
        result = train(tmp_path / name, *options, "--train-iters", 4, ranks=ranks)
        assert result.returncode == 0, result.stderr[-2000:]
        runs[name] = metrics(tmp_path / name)
    assert len(runs["one"]) == 4
    np.testing.assert_allclose(runs["two"], runs["one"], rtol=2e-5)


def test_packed_and_filled_in_documents_resume_as_if_unbroken(tmp_path: Path, train: Program) -> None:
    texts = [f"def f{i}(x):\n    return x + {i}\n" * (1 + i % 3) for i in range(300)]
    train_bpe(texts, 300, tmp_path / "tokenizer", ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"])
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer")
    with IndexedDatasetWriter(tmp_path / "code", np.dtype(np.uint16)) as writer:
        for text in texts:
            writer.add_document([*tokenizer.encode(text), tokenizer.eod_id])
    options = ["--packing", "best-fit", "--reset-attention-mask", "true", "--fim-rate", 0.5, "--vocab-size", 300]
    options += ["--tokenizer-model", tmp_path / "tokenizer", "--data-path", tmp_path / "code"]
    for run, parts in (("whole", [6]), ("broken", [4, 6])):
        for stop in parts:
            exits = ["--exit-interval", stop] if stop < 6 else []
            result = train(tmp_path / run, *options, "--train-iters", 6, *exits)
            assert result.returncode == 0, result.stderr[-2000:]
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "broken") and len(metrics(tmp_path / "whole")) == 6


def test_documents_whose_ends_are_not_marked(tmp_path: Path, tokens: Path, train: Program) -> None:
    result = train(tmp_path / "run", *OPTIONS, "--reset-attention-mask", "true")
    assert result.returncode == 2 and "ends with token 0, not with 256" in result.stderr
    assert "--append-eod" in result.stderr and "Traceback" not in result.stderr
    result = train(tmp_path / "run", "--reset-position-ids", "true")
    assert result.returncode == 2 and "need the token that ends a document" in result.stderr
