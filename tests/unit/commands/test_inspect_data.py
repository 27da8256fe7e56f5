"""Looking into token files and runs from the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.optimus.commands.inspect_data import plot_shares
from megatron.optimus.config.schema import DataConfig
from megatron.optimus.data.dataset import Split
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.mixture import Mixture
from megatron.optimus.data.sources import read_sources

from .test_preprocess import call

BYTES = ("--tokenizer-type", "ByteLevelTokenizer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, texts in (("a", [f"text number {i}" for i in range(40)] + ["", "text number 3"]), ("b", ["other"] * 20)):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for text in texts:
                writer.add_document(np.frombuffer(text.encode(), np.uint8).astype(np.uint16))
    (folder / "blend.yaml").write_text("corpora:\n  a: {paths: [a], weight: 3}\n  b: {paths: [b], weight: 1}\n")
    return folder


def inspect(*arguments: object) -> tuple[int, str]:
    result = call("tools/inspect_data.py", *arguments)
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, result.stdout + result.stderr


def test_statistics_and_histogram(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, out = inspect("stats", folder / "a.idx", folder / "b", "--histogram", tmp_path / "h.png")
    assert code == 0 and "a: 42 documents (1 empty), 563 tokens, uint16" in out
    assert "all: 62 documents (1 empty), 663 tokens" in out and "median 13, p90 14" in out
    assert (tmp_path / "h.png").read_bytes()[1:4] == b"PNG"


def test_documents_as_text(folder: Path) -> None:
    assert inspect("show", folder / "a", "--documents", 7, -1, *BYTES)[1].splitlines()[1::2] == [
        "text number 7",
        "text number 3",
    ]
    assert "116 101 120 116" in inspect("show", folder / "a")[1]
    assert inspect("show", folder / "a", "--documents", 42)[0] == 2
    with IndexedDatasetWriter(folder / "foreign", np.int32) as writer:
        writer.add_document([104, 105, 257, 70000])
        writer.add_document([27, 91, 50, 74])
    assert "\n\\x1b[2J\n" in inspect("show", folder / "foreign", "--documents", 1, *BYTES)[1]
    out = inspect("show", folder / "foreign", *BYTES)[1]
    assert "hi\n[2 of 4 ids, such as 257, are not among the tokenizer's 257: the file is of another tokenizer]" in out


def test_full_check(folder: Path, tmp_path: Path) -> None:
    assert inspect("check", folder / "a", folder / "b", "--vocab-size", 256)[0] == 0
    code, out = inspect("check", folder / "a", "--vocab-size", 110)
    assert code == 2 and "outside the vocabulary of 110" in out
    for suffix in (".bin", ".idx"):
        (tmp_path / f"a{suffix}").write_bytes((folder / f"a{suffix}").read_bytes())
    raw = bytearray((tmp_path / "a.idx").read_bytes())
    raw[34 + 8] ^= 1  # a length inside the index, which the quick look at the start does not read
    (tmp_path / "a.idx").write_bytes(raw)
    assert "pointer of sequence 3" in inspect("check", tmp_path / "a")[1]


def test_duplicates_across_splits(folder: Path) -> None:
    code, out = inspect("duplicates", folder / "a", "--split", "80,20,0")
    assert code == 1 and f"{folder}/a document 3 (train) = {folder}/a document 41 (valid)" in out
    assert "1 duplicates" in out
    assert inspect("duplicates", folder / "a", "--split", "1,0,0")[0] == 0
    assert "20 duplicates" in inspect("duplicates", folder / "a", folder / "b", "--anywhere")[1]


def test_a_sample_and_a_blend(folder: Path, tmp_path: Path) -> None:
    data = ("--data-file-list", folder / "blend.yaml", "--seq-length", 10, "--split", "1,0,0")
    code, out = inspect("sample", 5, *data, *BYTES)
    assert code == 0 and "sample 5: corpus" in out and "of document" in out
    assert "text" in inspect("sample", 5, "--data-path", folder / "a", "--seq-length", 30, "--split", "1", *BYTES)[1]
    pytest.importorskip("matplotlib")
    code, out = inspect("blend", *data, "--samples", 400, "--picture", tmp_path / "b.png")
    assert "a: 1 file, 563 tokens, 300 samples (75.0000 %), 5.3571 epochs" in out
    assert (tmp_path / "b.png").stat().st_size > 10_000
    assert inspect("blend", "--data-file-list", folder / "none", "--seq-length", 10, "--samples", 4)[0] == 2
    code, out = inspect("blend", *data, "--samples", 400, "--picture", tmp_path / "no" / "b.png")
    assert code == 2 and "no/b.png: cannot be written: No such file or directory" in out
    code, out = inspect("blend", *data, "--samples", 0)
    assert code == 2 and "--samples='0' must be a whole number of 1 or more" in out
    code, out = inspect("sample", -5, *data)
    assert code == 2 and "position: '-5' must be a whole number of 0 or more" in out
    for words, message in (
        (("blend", *data, "--samples", 0), "--samples='0' must be a whole number of 1 or more"),
        (("check", folder / "a", "--vocab-size", "x"), "--vocab-size='x' must be a whole number of 1 or more"),
        (("blend", "--data-path", folder / "a", *data[2:], "--samples", 4, "--picture", "x.png"), "one corpus"),
    ):
        code, out = inspect(*words)
        assert code == 2 and message in out
    (tmp_path / "list").write_text("1 a a", encoding="utf-16")
    code, out = inspect("blend", "--data-file-list", tmp_path / "list", "--seq-length", 10, "--samples", 4)
    assert code == 2 and "list is no UTF-8 text, at byte 0" in out


def test_the_picture_follows_stages(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both panels cover the run, nothing lies outside of them, and distances stay near the targets of every stage."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    listed = tmp_path / "stages.yaml"
    listed.write_text(
        f"corpora:\n  a: {{paths: [{folder}/a], weight: 0.75}}\n  b: {{paths: [{folder}/b], weight: 0.25}}\n"
        "stages:\n  - {start_samples: 150, weights: {a: 0.1, b: 0.9}}\n  - {start_samples: 333, weights: {a: 0, b: 1}}"
    )
    sources = read_sources(DataConfig(data_file_list=str(listed)))
    data = Mixture(sources, 10, split="1,0,0", part=Split.TRAIN, seed=1)
    targets = data.targets(np.array([0, 100, 150, 250, 333, 400]))
    assert targets[:, 0] == pytest.approx([0, 75, 112.5, 122.5, 130.8, 130.8], abs=1e-6)
    assert targets.sum(axis=1) == pytest.approx([0, 100, 150, 250, 333, 400])
    plot_shares(data, 400, tmp_path / "b.png")
    left, right = pyplot.gcf().axes
    assert left.get_xlim() == right.get_xlim() == (0, 400)
    heights = [collection.get_paths()[0].vertices[:, 1] for collection in left.collections]
    assert min(map(min, heights)) == 0 and max(map(max, heights)) == pytest.approx(100)
    for line in [line for line in right.lines if len(line.get_xdata()) > 2]:
        x, y = (np.asarray(values) for values in line.get_data())
        assert x[-1] >= 380 and np.abs(y).max() < 2 and np.abs(y).max() <= right.get_ylim()[1] and np.ptp(y) > 0
    monkeypatch.undo()
    pyplot.close("all")
