"""Preprocessing in parts: other formats, several processes, kills. The bytes are always those of one quiet run."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron.optimus.config.schema import ConfigError, TokenizerType
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.indexed import IndexedDataset
from megatron.optimus.data.tokenize.corpus import read_documents, split_file
from megatron.optimus.data.tokenize.partitions import hash_tokenizer
from megatron.optimus.data.tokenize.preprocess import PreprocessReport, preprocess
from megatron.optimus.platform.environment import worker_index_and_count
from tests.unit.commands.test_preprocess import BYTES, IN_ORDER, call, command, failed

TEXTS = [f"document {i}: " + "word " * (i * 37 % 90) for i in range(900)]


def run(inputs: list[object], prefix: Path, **options) -> PreprocessReport:
    options = {"tokenizer_type": TokenizerType.BYTE, "append_eod": True} | options
    return preprocess([str(each) for each in inputs], str(prefix), **options)


def result(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def json_lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same 900 documents in four formats; a.jsonl and the others together."""
    folder = tmp_path_factory.mktemp("formats")
    (folder / "a.jsonl").write_bytes(json_lines(TEXTS[:300]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(TEXTS[300:600])))
    zstandard, pyarrow = pytest.importorskip("zstandard"), pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (folder / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(json_lines(TEXTS[600:800])))

    table = pyarrow.table({"id": list(range(99)), "text": TEXTS[800:899]})
    parquet.write_table(table, folder / "d.parquet", row_group_size=10)
    (folder / "sub").mkdir()
    (folder / "sub" / "e.txt").write_text(TEXTS[899])
    (folder / "notes.pdf").write_text("not a format")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """One file, one process, one part."""
    place = tmp_path_factory.mktemp("expected")
    (place / "all.jsonl").write_bytes(json_lines(TEXTS))
    report = run([place / "all.jsonl"], place / "x")
    assert (report.documents, report.partitions_done) == (900, 1)
    return result(place / "x")


def test_every_format_in_a_folder(folder: Path, expected: list[bytes], tmp_path: Path) -> None:
    report = run([folder], tmp_path / "x")
    assert (report.documents, report.partitions_done, report.malformed) == (900, 5, 0)
    assert report.tokens == {f"{tmp_path}/x_text_document": sum(len(text) + 1 for text in TEXTS)}
    assert result(tmp_path / "x") == expected
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("partitions", [1, 2, 7, 2000])
def test_partitions_of_one_file(tmp_path: Path, expected: list[bytes], partitions: int) -> None:
    source = tmp_path / "all.jsonl"
    source.write_bytes(json_lines(TEXTS))
    parts = split_file(source, -(-source.stat().st_size // partitions))
    assert parts[0].start == 0 and parts[-1].stop == source.stat().st_size
    assert [part.stop for part in parts[:-1]] == [part.start for part in parts[1:]]
    assert len(list(read_documents(parts))) == 900
    if partitions < 100:
        assert len(parts) == partitions
        run([source], tmp_path / "x", partitions=partitions)
        assert result(tmp_path / "x") == expected


def test_line_numbers_in_a_later_part(tmp_path: Path) -> None:
    source = tmp_path / "all.jsonl"
    source.write_bytes(json_lines(TEXTS[:700]) + b"[]\n" + json_lines(TEXTS[700:]))
    with pytest.raises(DataError, match=r"all\.jsonl:701: a JSON list"):
        run([source], tmp_path / "x", partitions=5)
    assert run([source], tmp_path / "y", partitions=5, skip_malformed=True).malformed == 1


def test_ranks_share_the_parts_largest_first(folder: Path, expected: list[bytes], tmp_path: Path) -> None:
    reports = [run([folder], tmp_path / "x", rank=rank, world_size=3) for rank in (2, 0)]
    assert [report.merged for report in reports] == [False, False] and not (tmp_path / "x_text_document.idx").exists()
    last = run([folder], tmp_path / "x", rank=1, world_size=3)
    assert last.merged and last.documents == 900 and [r.partitions_done for r in [*reports, last]] == [1, 2, 2]
    assert result(tmp_path / "x") == expected and len(list(tmp_path.iterdir())) == 3
    idle = run([folder], tmp_path / "y", rank=7, world_size=8)
    assert (idle.partitions_done, idle.merged) == (0, False) and not (tmp_path / "y.parts").exists()


def test_places_of_launchers_and_arrays() -> None:
    assert worker_index_and_count({}) == (0, 1)
    assert worker_index_and_count({"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "0"}) == (3, 8)
    array = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "1"}
    array["SLURM_ARRAY_TASK_STEP"] = "2"
    assert worker_index_and_count(array) == (3, 4)
    assert worker_index_and_count({**array, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}) == (7, 8)
    with pytest.raises(ConfigError, match="SLURM_ARRAY_TASK_ID=7"):
        worker_index_and_count({"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "4"})


def test_killed_and_started_again(expected: list[bytes], tmp_path: Path) -> None:
    """Killed at the first finished part; the second run keeps that part and ends with the same bytes."""
    source, output = tmp_path / "all.jsonl", tmp_path / "out"
    source.write_bytes(json_lines(TEXTS))
    arguments = (
        "--input",
        source,
        "--output-prefix",
        output / "x",
        *BYTES,
        "--append-eod",
        *IN_ORDER,
        "--partitions",
        6,
    )
    process = subprocess.Popen(
        command("tools/preprocess_data.py", *arguments, "--workers", 1), stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not list(output.glob("x.parts/00*.json")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    finished = {mark.name: mark.stat().st_mtime_ns for mark in output.glob("x.parts/00*.json")}
    if not finished:
        pytest.skip("the run ended before it could be killed")
    assert not (output / "x_text_document.idx").exists()
    # an interrupted writer's leftovers, and a changed option
    (output / "x.parts" / "000005_text_document.bin.0000.tmp").write_bytes(b"left")
    assert "was begun with other options" in failed(
        call("tools/preprocess_data.py", *(word for word in arguments if word != "--append-eod"))
    )
    again = call("tools/preprocess_data.py", *arguments)
    assert again.returncode == 0, again.stderr
    assert f"{len(finished)} parts were done before, {6 - len(finished)} now" in again.stdout
    assert result(output / "x") == expected and len(list(output.iterdir())) == 3


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        (TokenizerType.HF, {"tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}),
        (TokenizerType.HF, {"vocab.json": b"{}", "merges.txt": b"a b"}),
        (TokenizerType.SENTENCEPIECE, {"tokenizer.model": b"\n\x01"}),
        (TokenizerType.TIKTOKEN, {"x.tiktoken": b"IQ== 0\n", "x.tiktoken.json": b"{}"}),
    ],
)
def test_every_file_of_a_tokenizers_folder_is_told_apart(
    kind: TokenizerType, files: dict[str, bytes], tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    before = hash_tokenizer(kind, str(tmp_path))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content + b" ")
        assert hash_tokenizer(kind, str(tmp_path)) != before
        (tmp_path / name).write_bytes(content)
    assert hash_tokenizer(kind, str(tmp_path)) == before


def test_after_a_malformed_line_both_remedies_work(expected: list[bytes], tmp_path: Path) -> None:
    """Repairing the file and skipping the line keep the parts that are done; a part with a gap is not kept for long."""
    sources = [tmp_path / f"{name}.jsonl" for name in "abc"]
    for i, source in enumerate(sources):
        source.write_bytes(json_lines(TEXTS[300 * i : 300 * i + 300]))
    good = sources[1].read_bytes()
    sources[1].write_bytes(good + b"oops\n")
    for prefix in (tmp_path / "x", tmp_path / "y"):
        with pytest.raises(DataError, match=r"b\.jsonl:301: not JSON .*; repair the line, or pass --skip-malformed"):
            run(sources, prefix, world_size=2, rank=0)  # of largest, middle and smallest, the first and the last
    skipping = run(sources, tmp_path / "x", world_size=2, rank=0, skip_malformed=True)
    assert (skipping.malformed, skipping.merged) == (1, False)
    with pytest.raises(DataError, match=r"b\.jsonl:301: not JSON"):  # what was skipped is not taken for done
        run(sources, tmp_path / "x", world_size=2, rank=0)
    skipped = run(sources, tmp_path / "x", skip_malformed=True)
    assert (skipped.documents, skipped.malformed, skipped.partitions_found) == (900, 1, 1)
    assert result(tmp_path / "x") == expected

    run(sources, tmp_path / "y", world_size=2, rank=1)
    sources[1].write_bytes(good)
    repaired = run(sources, tmp_path / "y")
    assert (repaired.documents, repaired.malformed, repaired.partitions_found) == (900, 0, 1)
    assert result(tmp_path / "y") == expected


def test_empty_files_are_skipped(expected: list[bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inputs = tmp_path / "in"
    inputs.mkdir()
    (inputs / "a.jsonl").write_bytes(b"")
    (inputs / "b.jsonl").write_bytes(json_lines(TEXTS))
    (inputs / "c.jsonl.gz").write_bytes(gzip.compress(b""))
    (inputs / "d.txt").write_bytes(b"")
    report = run([inputs], tmp_path / "x")
    assert (report.documents, report.empty_files) == (900, 3)
    assert result(tmp_path / "x") == expected
    assert [f"skipped: {inputs / name}: the file is empty" in caplog.text for name in ("a.jsonl", "d.txt")] == [
        True
    ] * 2
    each = run([inputs], tmp_path / "each", per_file=True)
    assert (each.documents, each.empty_files) == (900, 3)
    with pytest.raises(DataError, match=r"no tokens \(0 documents, .* and 3 empty files skipped\)"):
        run([inputs / "a.jsonl", inputs / "c.jsonl.gz", inputs / "d.txt"], tmp_path / "z")


def test_a_pair_per_file(folder: Path, tmp_path: Path) -> None:
    options = {"per_file": True}
    first = run([folder], tmp_path / "out", rank=0, world_size=2, **options)
    assert (first.partitions_done, first.merged) == (3, True)
    second = run([folder], tmp_path / "out", **options)
    assert (second.partitions_done, second.partitions_found, second.documents) == (2, 3, 900)
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.idx")}
    assert names == {f"{name}_text_document.idx" for name in ("a", "b", "c", "d", "sub/e")}
    assert len(IndexedDataset(tmp_path / "out" / "b_text_document")) == 300
    source = folder / "a.jsonl"
    os.utime(source, ns=(1, 1))  # another file under the same name is done again, others are not
    with pytest.raises(DataError, match=r"a_text_document\.idx: is there already; add --overwrite"):
        run([folder], tmp_path / "out", **options)
    third = run([folder], tmp_path / "out", overwrite=True, **options)
    assert (third.partitions_done, third.partitions_found) == (1, 4)


def test_errors_of_other_formats(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    path = tmp_path / "d.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), path)
    with pytest.raises(DataError, match=r"d\.parquet:2: key 'text' holds a NoneType"):
        list(read_documents([path]))
    with pytest.raises(DataError, match=r"d\.parquet: no column 'body'; it has \['text'\]"):
        list(read_documents([path], "body"))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"d\.parquet:1: cannot read on"):
        list(read_documents([path]))
    (tmp_path / "e.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"e\.txt:1: not UTF-8 at byte 0 of the file"):
        list(read_documents([tmp_path / "e.txt"]))
    (tmp_path / "a.jsonl").write_bytes(json_lines(["x"]))
    (tmp_path / "a.json").write_bytes(json_lines(["x"]))
    with pytest.raises(DataError, match="two input files would both become a"):
        run([tmp_path / "a.jsonl", tmp_path / "a.json"], tmp_path / "x", per_file=True)
