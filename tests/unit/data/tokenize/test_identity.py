"""Which tokenizer made the data: recorded by preprocessing, and compared by what defines its ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.optimus.config.schema import TokenizerType
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.tokenize.identity import TokenizerIdentity, check_same, read_identity, write_identity
from megatron.optimus.data.tokenize.preprocess import preprocess
from megatron.optimus.data.tokenize.tokenizer import train_bpe
from tests.unit.data.tokenize.makers import CORPUS, tokenizer_of


def test_each_type_has_a_fingerprint_of_what_defines_its_ids(tmp_path: Path) -> None:
    found = {}
    for kind in TokenizerType:
        location = tokenizer_of(kind, tmp_path / kind.value)
        found[kind] = TokenizerIdentity.of(kind, location)
        assert found[kind] == TokenizerIdentity.of(kind, location)
        assert TokenizerIdentity.from_json(json.loads(json.dumps(found[kind].to_json())), "x") == found[kind]
    assert len({identity.fingerprint for identity in found.values()}) == len(TokenizerType)
    tiktoken = tmp_path / TokenizerType.TIKTOKEN.value / "v.tiktoken"
    Path(f"{tiktoken}.json").write_text('{"pattern": "[a-z]+|[^a-z]+"}')  # other words, hence other ids
    assert (
        TokenizerIdentity.of(TokenizerType.TIKTOKEN, tiktoken).fingerprint != found[TokenizerType.TIKTOKEN].fingerprint
    )


def test_spacing_truncation_and_older_merges_change_nothing(tmp_path: Path) -> None:
    train_bpe(CORPUS * 9, 300, tmp_path / "a")
    first = TokenizerIdentity.of(TokenizerType.HF, tmp_path / "a")
    state = json.loads((tmp_path / "a" / "tokenizer.json").read_text())
    (tmp_path / "b").mkdir()
    state["model"]["merges"] = [" ".join(pair) for pair in state["model"]["merges"]]
    state["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(state))
    assert TokenizerIdentity.of(TokenizerType.HF, tmp_path / "b").fingerprint == first.fingerprint
    state["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(state))
    assert TokenizerIdentity.of(TokenizerType.HF, tmp_path / "b").fingerprint != first.fingerprint


@pytest.mark.parametrize("options", [{}, {"partitions": 3}, {"per_file": True}])
def test_preprocessing_records_it_beside_the_pair(tmp_path: Path, options: dict[str, object]) -> None:
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS * 9))
    location = tokenizer_of(TokenizerType.HF, tmp_path / "source")
    report = preprocess([str(tmp_path / "c.jsonl")], str(tmp_path / "x"), tokenizer_model=str(location), **options)
    [prefix] = report.tokens
    assert read_identity(prefix) == TokenizerIdentity.of(TokenizerType.HF, location)
    with IndexedDatasetWriter(prefix, "uint16") as writer:  # another program's data under the same name
        writer.add_document([1, 2])
    assert read_identity(prefix) is None


def test_differences_name_both_and_the_remedy(tmp_path: Path) -> None:
    a, b = (TokenizerIdentity("HuggingFaceTokenizer", f"/{name}", 300, name * 64) for name in "ab")
    assert (
        check_same(a, [("p", a), ("q", a)]) == check_same(None, [("p", a), ("q", None)]) == check_same(None, []) == ""
    )
    assert check_same(a, [("p", None), ("q", a)]).startswith("1 of 2 token files, such as p, do not say")
    with pytest.raises(
        DataError, match=r"q was made with .* /b \(300 ids, .*b\), but this run has .* /a .*remove q\.tok"
    ):
        check_same(a, [("p", a), ("q", b)])
    with pytest.raises(DataError, match=r"q was made with .* /b .*, but p with .* /a "):
        check_same(None, [("n", None), ("p", a), ("r", a), ("q", b)])
    for content in ("[", "[]", '{"type": 3}', '{"type": "x", "model": null, "vocab_size": "9", "fingerprint": "f"}'):
        (tmp_path / "x.tokenizer").write_text(content)
        with pytest.raises(DataError, match=r"x\.tokenizer: .*remove it"):
            read_identity(str(tmp_path / "x"))
    (tmp_path / "x.tokenizer").unlink()
    write_identity(str(tmp_path / "x"), a)
    assert read_identity(str(tmp_path / "x")) == a
