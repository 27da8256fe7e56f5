"""Shuffled corpora: an exact permutation that depends on seed and texts alone, and splits that share no document."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron.optimus.config.schema import ConfigError, SplitBy, TokenizerType
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.indexed import IndexedDataset
from megatron.optimus.data.inspection import document_offsets
from megatron.optimus.data.splits import NO_HASH_SPLITS, hash_range, read_splits
from megatron.optimus.data.tokenize import shuffle as module
from megatron.optimus.data.tokenize.preprocess import PreprocessReport, preprocess
from megatron.optimus.data.tokenize.shuffle import shuffled, text_hashes
from tests.unit.commands.test_preprocess import BYTES, call, command, failed

TEXTS = [f"document {i}: " + "word " * (i * 37 % 90) for i in range(900)] + ["said often"] * 60 + [""] * 5
SUFFIXES = (".bin", ".idx", ".splits.json")


def run(inputs: list[Path], prefix: Path, **options) -> PreprocessReport:
    options = {"tokenizer_type": TokenizerType.BYTE, "append_eod": True, "split_by": SplitBy.HASH} | options
    return preprocess([str(each) for each in inputs], str(prefix), **options)


def result(prefix: Path, suffixes: tuple[str, ...] = SUFFIXES) -> list[bytes]:
    return [Path(f"{prefix}_text_document{suffix}").read_bytes() for suffix in suffixes]


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "title": f"of {text}"}) + "\n" for text in texts))
    return path


def documents(prefix: Path, key: str = "text") -> list[str]:
    data = IndexedDataset(f"{prefix}_{key}_document")
    bounds = document_offsets(data)
    return [bytes(data.tokens[a:b][:-1].astype(np.uint8)).decode() for a, b in itertools.pairwise(bounds.tolist())]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("expected")
    report = run([write(folder / "a.jsonl", TEXTS)], folder / "x")
    assert (report.documents, report.empty_documents) == (965, 5)
    found = documents(folder / "x")
    assert Counter(found) == Counter(TEXTS) and found != TEXTS
    said = [i for i, text in enumerate(found) if text == "said often"]
    assert said[-1] - said[0] < 80  # equal documents share a bucket
    numbers = [int(text.split()[1][:-1]) for text in found if text.startswith("document")]
    assert abs(np.corrcoef(numbers, np.arange(900))[0, 1]) < 0.1
    return result(folder / "x")


def test_the_order_depends_on_texts_and_seed_alone(
    expected: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the order of documents, files, parts, runs, processes or memory."""
    backwards = write(tmp_path / "b.jsonl", TEXTS[::-1])
    halves = [write(tmp_path / f"{name}.jsonl", part) for name, part in (("c", TEXTS[500:]), ("d", TEXTS[:500]))]
    run([backwards], tmp_path / "one", partitions=5, workers=2)
    assert result(tmp_path / "one") == expected
    for size in (1000, 20_000):
        monkeypatch.setattr(module, "RUN_BYTES", size)
        monkeypatch.setattr(module, "BATCH_BYTES", size)
        reports = [run(halves, tmp_path / f"{size}", rank=rank, world_size=2) for rank in (1, 0)]
        assert [report.merged for report in reports] == [False, True]
        assert result(tmp_path / f"{size}") == expected
    run([backwards], tmp_path / "other", seed=7)
    other = result(tmp_path / "other")
    assert other[0] != expected[0] and sorted(other[0]) == sorted(expected[0])
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("one")) == [
        f"one_text_document{suffix}" for suffix in sorted([*SUFFIXES, ".tokenizer"])
    ]


def test_shuffled_by_position(expected: list[bytes], tmp_path: Path) -> None:
    """The same order without the split file; in the order of the input neither, and a file left over goes."""
    source = write(tmp_path / "a.jsonl", TEXTS)
    run([source], tmp_path / "x")
    run([source], tmp_path / "x", split_by=SplitBy.POSITION, shuffle=True, overwrite=True)
    assert result(tmp_path / "x", SUFFIXES[:2]) == expected[:2]
    assert not Path(f"{tmp_path}/x_text_document.splits.json").exists()
    run([source], tmp_path / "x", split_by=SplitBy.POSITION, overwrite=True)
    assert documents(tmp_path / "x") == TEXTS


@pytest.mark.parametrize("split", ["969,30,1", "1,1,1", "0.5,0.25,0.25"])
def test_no_document_is_in_two_splits(tmp_path: Path, split: str) -> None:
    """Of two corpora with documents in common, either; shares are kept and every document is in some split."""
    corpora = {"a": TEXTS[:700], "b": TEXTS[300:] + TEXTS[:200]}
    owners: dict[str, set[int]] = {}
    for name, texts in corpora.items():
        run([write(tmp_path / f"{name}.jsonl", texts)], tmp_path / name)
        prefix = f"{tmp_path / name}_text_document"
        data = IndexedDataset(prefix)
        bounds = document_offsets(data)
        splits = read_splits(prefix, data.tokens_total, split)
        ranges = [hash_range(splits, data.tokens_total, part) for part in range(3)]
        assert ranges[0][0] == 0 and ranges[2][1] == data.tokens_total
        assert all(first[1] == second[0] for first, second in itertools.pairwise(ranges))
        assert set(np.array(ranges).ravel().tolist()) <= set(bounds.tolist())  # documents stay whole
        for text, start, stop in zip(documents(tmp_path / name), bounds, bounds[1:], strict=False):
            parts = {part for part, (first, last) in enumerate(ranges) if first <= start and stop <= last}
            if start < stop:
                assert len(parts) == 1
                owners.setdefault(text, set()).update(parts)
    assert owners.keys() == set(TEXTS) - {""} and all(len(parts) == 1 for parts in owners.values())
    numbers = np.bincount([*map(min, owners.values())], minlength=3) / len(owners)
    shares = np.array([float(part) for part in split.split(",")])
    assert np.abs(numbers - shares / shares.sum()).max() < 0.06


def test_several_keys_stay_together(tmp_path: Path) -> None:
    run([write(tmp_path / "a.jsonl", TEXTS)], tmp_path / "x", json_keys=("text", "title"))
    texts, titles = (documents(tmp_path / "x", key) for key in ("text", "title"))
    assert titles == [f"of {text}" for text in texts]


def test_a_pair_per_file(tmp_path: Path) -> None:
    sources = [write(tmp_path / f"{name}.jsonl", TEXTS[i::2]) for i, name in enumerate("ab")]
    assert run(sources, tmp_path / "out", per_file=True).partitions_done == 2
    assert run(sources, tmp_path / "out", per_file=True).partitions_found == 2
    run(sources[:1], tmp_path / "one")
    alone = result(tmp_path / "one")
    assert [(tmp_path / "out" / f"a_text_document{suffix}").read_bytes() for suffix in SUFFIXES] == alone
    assert not list((tmp_path / "out").glob("*.runs"))


def test_equal_documents_do_not_stand_side_by_side() -> None:
    texts = [f"text {i}" for i in range(20_000)] + ["often"] * 300
    order = shuffled(text_hashes(texts, 1))
    places = np.flatnonzero(order >= 20_000)
    assert sorted(order.tolist()) == list(range(20_300)) and np.diff(places).max() > 1


def test_every_place_is_as_likely() -> None:
    """Chi-square of the tenths in which one document lands over 2,000 seeds: 9 degrees of freedom."""
    texts = [f"text {i}" for i in range(50)]
    places = [int(np.flatnonzero(shuffled(text_hashes(texts, seed)) == 17)[0]) for seed in range(2000)]
    counts = np.bincount(np.array(places) // 5, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9  # exceeded once in 1,000


def test_killed_and_started_again(expected: list[bytes], tmp_path: Path) -> None:
    source, output = write(tmp_path / "all.jsonl", TEXTS), tmp_path / "out"
    arguments = ("--input", source, "--output-prefix", output / "x", *BYTES, "--append-eod", "--partitions", 6)
    process = subprocess.Popen(
        command("tools/preprocess_data.py", *arguments, "--workers", 1), stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not list(output.glob("x.parts/00*.json")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    finished = list(output.glob("x.parts/00*.json"))
    if not finished:
        pytest.skip("the run ended before it could be killed")
    assert not (output / "x_text_document.idx").exists()
    (output / "x.parts" / "000005.runs").mkdir(exist_ok=True)
    (output / "x.parts" / "000005.runs" / "9.hashes").write_bytes(b"left")
    for other in (("--seed", 5), ("--split-by", "position")):
        assert "was begun with other options (shuffle)" in failed(call("tools/preprocess_data.py", *arguments, *other))
    again = call("tools/preprocess_data.py", *arguments)
    assert again.returncode == 0, again.stderr
    assert f"{len(finished)} parts were done before" in again.stdout
    assert result(output / "x") == expected and len(list(output.iterdir())) == 4


def test_damage_and_bad_options(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(ConfigError, match=r"seed=-1 must lie in \[0, 2\^63\)"):
        run([source], tmp_path / "x", seed=-1)
    run([source], tmp_path / "x", partitions=3, rank=0, world_size=2)
    tokens = next((tmp_path / "x.parts").glob("*.runs/0.0.tokens"))
    tokens.write_bytes(tokens.read_bytes()[:-100])
    with pytest.raises(DataError, match="a part cannot be read"):
        run([source], tmp_path / "x", partitions=3)
    run([source], tmp_path / "y")
    prefix, path = f"{tmp_path}/y_text_document", Path(f"{tmp_path}/y_text_document.splits.json")
    size = IndexedDataset(prefix).tokens_total
    assert read_splits(prefix, size, "1").seed == 1234 and read_splits(f"{prefix}x", size, "1") == NO_HASH_SPLITS
    with pytest.raises(DataError, match=r"describes \d+ tokens, the \.bin file has 7: it belongs to another pair"):
        read_splits(prefix, 7, "1")
    content = json.loads(path.read_text())
    for change in ({"format": 2}, {"seed": -1}, {"seed": "1"}, {"bucket_starts": [0, size]}, {"bucket_starts": 5}):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(DataError, match=r"splits\.json: is damaged or of another version"):
            read_splits(prefix, size, "1")
    path.write_text("[" * 10)
    with pytest.raises(DataError, match="is damaged"):
        read_splits(prefix, size, "1")
