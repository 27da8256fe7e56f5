"""The ways in which a run names its data."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.optimus.config.schema import ConfigError, DataConfig
from megatron.optimus.data.sources import read_sources

from .cases import STAGES, YAML, L, blend

LINES = (
    "# weight prefix corpus\n0.1 web/part-0 web\n\n0.2 web/part-1.bin web\n0.3 web/part-2 web\n0.3 code/part-0 code\n"
)


def test_ways_of_naming_data(corpora_folder: Path) -> None:
    plain = read_sources(DataConfig(data_path=["a", "b.bin", "c.idx"]))
    assert not plain.is_blend and plain.prefixes == ["a", "b", "c"]
    words = read_sources(DataConfig(data_path=["2", "a", "0.5", "b"]))
    assert words.is_blend and words.prefixes == ["a", "b"]
    assert [float(w) for w in words.stages[0].weights] == [2, 0.5]
    lines = blend(corpora_folder, LINES, "list.txt")
    assert [corpus.name for corpus in lines.corpora] == ["web", "code"]
    assert [float(w) for w in lines.stages[0].weights] == [0.6, 0.3]  # exact: the sum of 0.1, 0.2 and 0.3
    assert lines.prefixes[1] == str(corpora_folder / "web/part-1")
    short = blend(corpora_folder, "1 web/part-0\n2 web/part-1\n", "short.txt")
    assert [corpus.name for corpus in short.corpora] == short.prefixes
    yaml = blend(corpora_folder, YAML + STAGES)
    assert [len(corpus.prefixes) for corpus in yaml.corpora] == [3, 2, 1]
    assert [stage.first_sample(L) for stage in yaml.stages] == [0, 100, 200]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["1", "a", "b"], "begins with the weight 1 but"),
        (["1", "a", "x", "b"], "begins with the weight 1 but"),
        (["0", "a", "1", "b"], "data_path, a: weight 0 must be a finite number, above 0"),
        (["1", "a", "-2", "b"], "data_path, b: weight -2"),
        (["1", "a", "2", "a"], "a is named"),
        (["a", "b", "a"], "a is named twice"),
        (["a", "./x/../a"], r"\./x/\.\./a is named twice"),
    ],
)
def test_impossible_words(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_sources(DataConfig(data_path=words))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no files"),
        ("0.5\n", "list.txt:1: expected 'weight prefix corpus', got 1 words"),
        ("1 a b c\n", "got 4 words"),
        ("1 a b\nx c d\n", "list.txt:2: weight x"),
        ("inf a b\n", "list.txt:1: weight inf"),
        ("nan a b\n", "weight nan"),
        ("0 a b\n", "weight 0"),
        ("1e999999999 a b\n", "list.txt:1: weight 1e999999999 must be a finite number"),  # would fill the memory
        ("1 a b\n1 a c\n", "named in corpora b and c"),
    ],
)
def test_impossible_lists(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        blend(tmp_path, text, "list.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected names with values"),
        ("[" * 5000, "too deep"),
        ("corpora: {}", "no corpora"),
        ("corpora: {a: {paths: [x], weight: 1}, a: {paths: [y]}}", "given twice"),
        ("corpora: {a: {path: [x]}}", "unknown path; it takes paths, weight"),
        ("corpora: {a: {paths: x}}", "paths must be a list"),
        ("corpora: {a: {paths: ['none*']}}", "no file matches"),
        ("corpora: {a: {paths: [x], weight: -1}}", "corpus a: weight -1"),
        ("corpora: {a: {paths: [x], weight: 1}, b: {paths: [y]}}", "corpus b: weight None"),
        ("corpora: {a: {paths: [x], weight: 0}}", "weight 0"),
        ("corpora: {a: {paths: [x], weight: true}}", "weight True"),
        ("corpora: {a: {paths: [x]}}\nstages: [{start_tokens: 5, weights: {a: 1}}]", "every corpus needs a weight"),
        ("corpora: {a: {paths: [x], weight: 1}}\nstages: [{weights: {a: 1}}]", "start_tokens or start_samples"),
        ("corpora: {a: {paths: [x], weight: 1}}\nstages: [{start_tokens: 0, weights: {a: 1}}]", "above 0"),
        ("corpora: {a: {paths: [x], weight: 1}}\nstages: [{start_tokens: 9, weights: {}}]", "no weight for a"),
        ("corpora: {a: {paths: [x], weight: 1}}\nstages: [{start_tokens: 9, weights: {b: 1}}]", "unknown b"),
        ("corpora: {a: {paths: [x], weight: 1}}\nstages: [{start_tokens: 9, weights: {a: 0}}]", "all weights are 0"),
    ],
)
def test_impossible_yaml(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        blend(tmp_path, text)
    assert "blend.yaml" in str(caught.value)


def test_a_list_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("1 a b\n", encoding="utf-8-sig")
    [corpus] = read_sources(DataConfig(data_file_list=str(tmp_path / "list.txt"))).corpora
    assert corpus.name == "b"


def test_both_ways_at_once() -> None:
    with pytest.raises(ConfigError, match="both given"):
        DataConfig(data_path=["a"], data_file_list="b")
