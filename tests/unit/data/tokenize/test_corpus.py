"""JSON lines: every document once, every bad line by file and number."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.optimus.data.errors import DataError
from megatron.optimus.data.files import TokenFiles
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.tokenize import corpus
from megatron.optimus.data.tokenize.corpus import (
    LineBatch,
    expand_inputs,
    parse_batch,
    read_batches,
    read_documents,
    split_file,
)

_ROOT = Path(__file__).parents[4]


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def pack(path: Path, content: bytes) -> bytes:
    if path.suffix == ".gz":
        return gzip.compress(content)
    if path.suffix == ".zst":
        return pytest.importorskip("zstandard").ZstdCompressor().compress(content)
    return content


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(texts=st.lists(st.text(max_size=20), min_size=1, max_size=20), escape=st.booleans(), newline=st.booleans())
def test_documents_round_trip(tmp_path: Path, texts: list[str], escape: bool, newline: bool) -> None:
    path = tmp_path / "a.jsonl"
    content = "\n".join(json.dumps({"text": text}, ensure_ascii=escape) for text in texts) + "\n" * newline
    path.write_text(content, encoding="utf-8", newline="")
    assert list(read_documents([path])) == texts


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_formats_and_batches(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "BATCH_BYTES", 1000)
    texts = [f"document {i} " * (i % 7) for i in range(500)]
    path = tmp_path / name
    # two compressed parts in one file, as `cat a.gz b.gz` makes
    path.write_bytes(pack(path, lines(*texts[:200])) + pack(path, lines(*texts[200:])))
    assert list(read_documents([path])) == texts
    batches = list(read_batches([path]))
    assert len(batches) > 10
    parsed = [parse_batch(batch, ["text"]) for batch in batches]
    assert sum(len(batch.documents) for batch in parsed) == 500
    assert sum(batch.num_bytes for batch in parsed) == len(lines(*texts))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_truncated_or_damaged_archive(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    whole = pack(path, lines(*[str(i**7) for i in range(5000)]))
    for content in (whole[: len(whole) // 2], whole[:-1], b"not an archive"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}:\d+: cannot read on: .+ damaged or incomplete"):
            list(read_documents([path]))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "empty line"),
        (b"  ", "empty line"),
        (b'{"text": "abc', "not JSON .* column 10"),
        (b'{"text": "a"} {"text": "b"}', "not JSON"),
        (b'["text"]', "a JSON list, expected an object"),
        (b"null", "a JSON NoneType, expected an object"),
        (b'{"content": "a"}', r"no key 'text'; the object has \['content'\]"),
        (b'{"text": 5}', "key 'text' holds a int, expected a string"),
        (b'{"text": null}', "key 'text' holds a NoneType"),
        (b'{"text": "\xff"}', "not UTF-8 at byte 10"),
        ('{"text": "a"}'.encode("utf-16"), "not UTF-8 at byte 0 of the line but UTF-16, by its first bytes: .*iconv"),
        (b"[", r"not JSON .*: '\['; a file is expected to hold an object a line, not one array"),
        (b'{"text": "\\ud83d"}', "key 'text' holds half of a surrogate pair at character 0"),
        (b'{"text": ' + b"[" * 100_000, "not JSON"),
        (b'{"text": "a", "n": ' + b"9" * 10_000 + b"}", None),
    ],
)
def test_malformed_line(tmp_path: Path, line: bytes, reason: str | None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines("first", "second") + line + b"\n" + lines("last"))
    if reason is None:  # Python 3.10 reads any number of digits; later ones refuse
        reason = "not JSON"
        try:
            json.loads(line)
        except ValueError:
            pass
        else:
            return
    with pytest.raises(DataError, match=rf"a\.jsonl:3: {reason}.*--skip-malformed"):
        list(read_documents([path]))
    assert list(read_documents([path], skip_malformed=True)) == ["first", "second", "last"]
    (batch,) = read_batches([path])
    assert len(parse_batch(batch, ["text"], skip_malformed=True).malformed) == 1


def test_a_file_that_this_user_may_not_read(tmp_path: Path) -> None:
    prefix = tmp_path / "pair"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document([1, 2, 3])
    files = TokenFiles([str(prefix)])
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines("first"))
    for file in (path, prefix.with_suffix(".bin"), prefix.with_suffix(".idx")):
        file.chmod(0)
    user = os.geteuid()
    if user == 0:  # who may read everything
        os.seteuid(65534)
    try:
        for task, message in (
            (lambda: list(read_documents([path])), r"a\.jsonl: Permission denied; give this user the right to read it"),
            (lambda: files.read(0, 0, 3), r"pair\.bin: Permission denied; give this user the right to read it"),
            (lambda: TokenFiles([str(prefix)]), r"pair\.idx: cannot be read: Permission denied"),
        ):
            with pytest.raises(DataError, match=message):
                task()
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_line_numbers_continue_over_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(pack(path, lines(*"abcdefghi") + b"oops\n" + lines("last")))
    for size in (1, 7, 15, 30, 31, 1000):
        monkeypatch.setattr(corpus, "BATCH_BYTES", size)
        with pytest.raises(DataError, match=rf"{name}:10: not JSON"):
            list(read_documents([path]))
        assert list(read_documents([path], skip_malformed=True)) == [*"abcdefghi", "last"]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    content=st.lists(st.sampled_from([b"\n", b"\r\n", b"x", b'{"text": "\xc3\xa4"}', b'{"text": "bc"}'])).map(b"".join),
    size=st.integers(1, 80),
    beyond=st.integers(1, 30),
    cuts=st.integers(1, 60),
)
def test_every_line_is_in_one_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, size: int, beyond: int, cuts: int
) -> None:
    """Wherever parts and batches are cut: the lines of the whole file, at their numbers."""
    monkeypatch.setattr(corpus, "_LINE_BYTES", beyond)
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    monkeypatch.setattr(corpus, "BATCH_BYTES", size)
    documents, malformed = [], []
    for batch in read_batches(split_file(path, cuts)) if content else ():
        parsed = parse_batch(batch, ["text"], skip_malformed=True)
        documents += [text for (text,) in parsed.documents]
        malformed += [message.split(":")[1] for message in parsed.malformed]
    whole = content.decode().replace("\r\n", "\n").removesuffix("\n").split("\n") if content else []
    good = ['{"text": "bc"}', '{"text": "\u00e4"}']
    assert documents == [json.loads(line)["text"] for line in whole if line in good]
    assert malformed == [str(number) for number, line in enumerate(whole, 1) if line not in good]


def test_the_last_batches_of_a_range_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "BATCH_BYTES", 800)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 50_000)
    sources = [batch.source for batch in read_batches([path])]
    assert all(a.stop == b.start for a, b in itertools.pairwise(sources))
    sizes = [source.stop - source.start for source in sources]
    assert sum(sizes) == 50_000 and sizes == sorted(sizes, reverse=True)
    assert sizes[:2] == [800, 800] and sizes[-2] == 200


@settings(max_examples=200, deadline=None)
@given(
    lines=st.lists(
        st.sampled_from(
            [
                *('{"text": "a"}', '{"text": "\\u00e9\\n\\"", "n": [1]}', '{"text": "\u3042\U0001f600"}'),
                *('{"text": "\\ud83d\\ude00"}', '{"text": "\\ud83d"}', '{"text": "\\uDE00x"}', '{"text": "a"} '),
                *(
                    ' {"text": "b"}',
                    '{"text": "a"}{"text": "b"}',
                    '{"text":',
                    '"b"}',
                    '{"text": 1}',
                    '["text"]',
                    "",
                    "7",
                ),
                *('{"text": "a", "text": "c"}', '{"text": "a\tb"}', '{"TEXT": "a"}', '{"text": "a"}\r', "\x0c", "{"),
            ]
        ),
        max_size=60,
    ),
    byte=st.booleans(),
)
def test_lines_together_are_those_one_by_one(lines: list[str], byte: bool) -> None:
    """Lines are decoded where they lie in a batch: as if each were alone, also beside one that is not UTF-8."""
    content = [line.encode() for line in lines] + [b'{"text": "\xff"}'] * byte
    content.append(b'{"text": "end"}')
    found = parse_batch(LineBatch("f", content=b"\n".join(content)), ["text"], skip_malformed=True)
    documents, malformed = [], []
    for number, line in enumerate(content, 1):
        try:
            documents.append(corpus._parse_line(line, ["text"]))
        except ValueError as error:
            malformed.append(f"f:{number}: {error}")
    strip = [message.split(":")[:2] for message in malformed]  # a carriage return before the end is not part of a line
    assert found.documents == documents
    assert [message.split(":")[:2] for message in found.malformed] == strip


def test_a_file_that_shrinks_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines("first", "second"))
    [batch] = read_batches([path])
    os.truncate(path, 20)
    with pytest.raises(DataError, match=r"a\.jsonl: cannot read on: it has shrunk to 20 bytes since"):
        parse_batch(batch, ["text"])
    path.unlink()
    with pytest.raises(DataError, match=r"a\.jsonl: cannot read on: No such file or directory"):
        parse_batch(batch, ["text"])
    path.write_bytes(lines("first", "second", "third"))  # what is added belongs to another run
    assert parse_batch(batch, ["text"]).documents == [["first"], ["second"]]


def test_surrogate_pairs_and_byte_order_mark_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines("\N{SLIGHTLY SMILING FACE}") + b'{"text": "b"}\r\n')
    assert list(read_documents([path])) == ["\N{SLIGHTLY SMILING FACE}", "b"]


def test_empty_input(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"no documents in the input \(0 malformed"):
        list(read_documents([path]))
    (tmp_path / "b.jsonl").write_bytes(lines("x"))
    assert list(read_documents([path, tmp_path / "b.jsonl"])) == ["x"]
    assert f"skipped: {path}: the file is empty" in caplog.text
    path.write_bytes(b"\n\n")
    with pytest.raises(DataError, match=r"no documents in the input \(2 malformed"):
        list(read_documents([path], skip_malformed=True))


def test_inputs(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "[x].jsonl"):
        (tmp_path / name).write_bytes(lines("x"))
    assert [p.name for p in expand_inputs([f"{tmp_path}/?.jsonl"])] == ["a.jsonl", "b.jsonl"]
    assert [p.name for p in expand_inputs([f"{tmp_path}/b*", f"{tmp_path}/[x].jsonl"])] == ["b.jsonl", "[x].jsonl"]
    (tmp_path / "empty").mkdir()
    assert len(expand_inputs([str(tmp_path)])) == 3
    for patterns, message in (
        ([f"{tmp_path}/none*"], "no such file"),
        ([str(tmp_path / "empty")], "no file below it ends in"),
        ([f"{tmp_path}/a*", f"{tmp_path}/a.jsonl"], "named twice"),
        ([], "no input files"),
    ):
        with pytest.raises(DataError, match=message):
            expand_inputs(patterns)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt", "a.txt.gz"])
def test_lines_beyond_the_limit_are_refused(tmp_path: Path, name: str) -> None:
    """Three lines of 3 MB are read with a limit of 4 MB, and refused with one of 2 MB."""
    line = json.dumps({"text": "a" * 3_000_000}).encode()
    content = b"a" * 3_000_000 if ".txt" in name else b"\n".join([line] * 3)
    path = tmp_path / name
    path.write_bytes(pack(path, content))
    assert {len(text) for text in read_documents([path], max_line_bytes=4_000_000)} == {3_000_000}
    with pytest.raises(DataError, match=f"{name}.*more than 2000000 bytes.*raise --max-line-bytes"):
        list(read_documents([path], max_line_bytes=2_000_000))


_BOMB = """
import resource, sys
from pathlib import Path
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.tokenize.corpus import read_documents
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (700 << 20), now + (700 << 20)))
try:
    list(read_documents([Path(sys.argv[1])], max_line_bytes=1 << 26))
except DataError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_decompression_bomb_takes_bounded_memory(tmp_path: Path, suffix: str) -> None:
    """A line of 1 GiB (.zst) or 512 MiB (.gz), read with 700 MiB of memory."""
    path = tmp_path / f"bomb.jsonl.{suffix}"
    piece = bytes(1 << 24)
    if suffix == "gz":
        with gzip.open(path, "wb", compresslevel=1) as stream:
            for _ in range(32):
                stream.write(piece)
    else:
        zstandard = pytest.importorskip("zstandard")
        with open(path, "wb") as raw, zstandard.ZstdCompressor().stream_writer(raw) as stream:
            for _ in range(64):
                stream.write(piece)
    done = subprocess.run(
        [sys.executable, "-c", _BOMB, str(path)], check=False, capture_output=True, text=True, cwd=_ROOT
    )
    assert "more than 67108864 bytes" in done.stdout, done.stdout + done.stderr[-1500:]
