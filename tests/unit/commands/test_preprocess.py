"""The command lines a user types to get from text to token files, run as real processes."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron.optimus.data.indexed import IndexedDataset
from megatron.optimus.data.tokenize.tokenizer import HuggingFaceTokenizer
from tests.unit.commands.programs import call, command, failed

BYTES = ("--tokenizer-type", "ByteLevelTokenizer")
IN_ORDER = ("--split-by", "position")


def preprocess(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    return call("tools/preprocess_data.py", *arguments, **options)


def test_from_corpus_to_tokens(corpus: Path, tmp_path: Path) -> None:
    trained = call("tools/train_tokenizer.py", "--input", corpus, "--vocab-size", 320, "--output", tmp_path / "tok")
    assert trained.returncode == 0, trained.stderr
    pairs = []
    for workers in (1, 2):
        prefix = tmp_path / f"w{workers}"
        arguments = (
            "--input",
            corpus,
            "--output-prefix",
            prefix,
            "--tokenizer-model",
            tmp_path / "tok",
            "--append-eod",
            *IN_ORDER,
        )
        keys = ("--json-keys", "text", "title", "--workers", workers, "--log-interval", 1000)
        result = preprocess(*arguments, *keys)
        assert result.returncode == 0, result.stderr
        assert "documents_per_s=" in result.stderr and "mb_per_s=" in result.stderr
        names = [f"{prefix}_{key}_document.{kind}" for key in ("text", "title") for kind in ("bin", "idx")]
        pairs.append([Path(name).read_bytes() for name in names])
    assert pairs[0] == pairs[1]
    assert {file.name for file in tmp_path.iterdir()} == {"tok"} | {
        f"w{w}_{key}_document.{kind}"
        for w in (1, 2)
        for key in ("text", "title")
        for kind in ("bin", "idx", "tokenizer")
    }

    tokenizer = HuggingFaceTokenizer(tmp_path / "tok")
    data = IndexedDataset(tmp_path / "w2_text_document")
    records = [json.loads(line) for line in corpus.read_text().splitlines()]
    texts = [record["text"] for record in records]
    assert data.document_index.size == 4001
    assert len(data) == sum(bool(text) for text in texts)  # an empty document has no sequence, as in Megatron
    for i in (0, 4, 5, 6, 1000, 3999):
        first, stop = data.document_index[i : i + 2]
        ids = data.get(int(first)).tolist() if stop > first else []
        assert ids == ([*tokenizer.encode(texts[i]), tokenizer.eod_id] if texts[i] else [])
    titles = IndexedDataset(tmp_path / "w2_title_document")
    assert tokenizer.decode(titles.get(3999).tolist()) == "Title 3999"


def test_without_end_of_document(corpus: Path, tmp_path: Path) -> None:
    result = preprocess("--input", corpus, "--output-prefix", tmp_path / "new" / "x", *BYTES, "--workers", 1)
    assert result.returncode == 0, result.stderr
    assert "without --append-eod" in result.stderr
    tokens = IndexedDataset(tmp_path / "new" / "x_text_document").tokens
    assert int(tokens.max()) < 256


@pytest.mark.parametrize("workers", [1, 2])
def test_malformed_line_late_in_the_corpus(corpus: Path, tmp_path: Path, workers: int) -> None:
    bad = tmp_path / "bad.jsonl"
    good = corpus.read_bytes().splitlines(keepends=True)
    bad.write_bytes(b"".join([*good[:3000], b'{"text": \n', *good[3000:]]))
    arguments = ("--input", bad, "--output-prefix", tmp_path / "out", *BYTES, "--append-eod", "--workers", workers)
    assert f"{bad}:3001: not JSON" in failed(preprocess(*arguments))
    assert [file.name for file in tmp_path.iterdir()] == ["bad.jsonl"]
    result = preprocess(*arguments, "--skip-malformed")
    assert result.returncode == 0, result.stderr
    assert f"skipped: {bad}:3001" in result.stderr and "malformed=1" in result.stderr
    assert IndexedDataset(tmp_path / "out_text_document").document_index.size == 4001


def test_failure_keeps_an_earlier_result(corpus: Path, tmp_path: Path) -> None:
    arguments = ("--output-prefix", tmp_path / "out", *BYTES, "--workers", 1, "--overwrite")
    assert preprocess("--input", corpus, *arguments).returncode == 0
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    (tmp_path / "bad.jsonl").write_text("[]\n")
    assert "bad.jsonl:1: a JSON list" in failed(preprocess("--input", tmp_path / "bad.jsonl", *arguments))
    (tmp_path / "bad.jsonl").unlink()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_unusable_arguments(corpus: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    hollow = tmp_path / "hollow.jsonl"
    hollow.write_text('{"text": ""}\n')
    output = ("--output-prefix", tmp_path / "out", "--workers", 1)
    for arguments, message in (
        (("--input", tmp_path / "none.jsonl", *BYTES), "none.jsonl: no such file"),
        (("--input", empty, *BYTES), "no tokens (0 documents, 0 of them empty, 0 malformed lines and 1 empty file"),
        (("--input", hollow, *BYTES), "the input gives no tokens (1 documents, 1 of them empty"),
        (("--input", corpus), "needs --tokenizer-model"),
        (("--input", corpus, "--tokenizer-model", tmp_path / "gpt2"), "gpt2: no such file or folder"),
        (("--input", corpus, *BYTES, "--json-keys", "body"), "c.jsonl:1: no key 'body'"),
        (("--input", corpus, *BYTES, "--json-keys", "text", "text"), "different keys"),
    ):
        assert message in failed(preprocess(*arguments, *output))
    inside = ("--output-prefix", hollow / "out", "--workers", 1)
    assert f"cannot write: {hollow} is a file, not a folder" in failed(preprocess("--input", corpus, *BYTES, *inside))
    assert preprocess("--input", corpus, *BYTES, "--output-prefix", "x", "--workers", 0).returncode == 2
    assert {file.name for file in tmp_path.iterdir()} == {"empty.jsonl", "hollow.jsonl"}


@pytest.mark.parametrize("written, order", [("out_text_document.bin", IN_ORDER), ("000000.runs", ())])
def test_disk_that_refuses(corpus: Path, tmp_path: Path, written: str, order: tuple[str, ...]) -> None:
    """A limit on file sizes fails a write in the middle, as a full disk does."""
    result = preprocess(
        *("--input", corpus, "--output-prefix", tmp_path / "out", *BYTES, "--workers", 1, *order),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    )
    assert f"{written}: cannot write: File too large" in failed(result)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_in_the_middle(tmp_path: Path, sent: signal.Signals) -> None:
    """No final file, and no worker that outlives the command."""
    source = tmp_path / "long.jsonl"
    source.write_bytes(b'{"text": "some words"}\n' * 2_000_000)
    output = tmp_path / "out"
    output.mkdir()
    arguments = command("tools/preprocess_data.py", "--input", source, "--output-prefix", output / "x", *BYTES)
    log = tmp_path / "log"
    with open(log, "w") as stream:
        process = subprocess.Popen(
            [*arguments, "--workers", "1", "--log-interval", "1000"],
            stderr=stream,
            # a shell starts what runs in its background with SIGINT ignored, and children inherit that
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # no threads here
        )
    deadline = time.monotonic() + 60
    while "documents=" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert process.poll() is None and children
    process.send_signal(sent)
    process.wait(timeout=60)
    assert process.returncode in {signal.SIGINT: (130,), signal.SIGTERM: (143,), signal.SIGKILL: (-9,)}[sent]
    left = [file.name for file in output.iterdir()]
    if sent is signal.SIGKILL:
        assert left == ["x.parts"]
    else:
        assert left == []
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


def test_earlier_outputs_are_not_replaced_without_a_word(corpus: Path, tmp_path: Path) -> None:
    train = ("tools/train_tokenizer.py", "--input", corpus, "--vocab-size", 300, "--output", tmp_path / "tok")
    assert call(*train).returncode == 0
    before = (tmp_path / "tok" / "tokenizer.json").stat().st_mtime_ns
    assert "tok/tokenizer.json: is there already; add --overwrite to replace it" in failed(call(*train))
    assert (tmp_path / "tok" / "tokenizer.json").stat().st_mtime_ns == before
    assert call(*train, "--overwrite").returncode == 0
    assert (tmp_path / "tok" / "tokenizer.json").stat().st_mtime_ns > before

    make = ("--input", corpus, "--output-prefix", tmp_path / "x", "--workers", 1)
    guessed = preprocess(*make, "--tokenizer-model", tmp_path / "tok")
    assert guessed.returncode == 0, guessed.stderr
    assert f"tokenizer_type=HuggingFaceTokenizer, guessed from {tmp_path / 'tok' / 'tokenizer.json'}" in guessed.stderr
    earlier = [(tmp_path / f"x_text_document.{kind}").read_bytes() for kind in ("bin", "idx", "tokenizer")]
    assert "x_text_document.idx: is there already; add --overwrite" in failed(preprocess(*make, *BYTES))
    assert [(tmp_path / f"x_text_document.{kind}").read_bytes() for kind in ("bin", "idx", "tokenizer")] == earlier
    assert preprocess(*make, *BYTES, "--overwrite").returncode == 0
    assert json.loads((tmp_path / "x_text_document.tokenizer").read_text())["type"] == "ByteLevelTokenizer"


def test_standard_library_corpus(tmp_path: Path) -> None:
    outputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for output in outputs:
        result = call("examples/local/build_corpus.py", "--output", output, "--max-mb", 3)
        assert result.returncode == 0, result.stderr
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    records = [json.loads(line) for line in outputs[0].read_text(encoding="utf-8").splitlines()]
    size = sum(len(record["text"].encode()) for record in records)
    assert 2e6 < size <= 3e6
    sources = [record["source"] for record in records]
    assert len(set(sources)) == len(sources) and sources != sorted(sources)
    assert not any("site-packages" in source for source in sources)
    assert any(source == "docstrings/builtins" for source in sources)
    assert failed(call("examples/local/build_corpus.py", "--output", outputs[0], "--max-mb", 0.0001))
