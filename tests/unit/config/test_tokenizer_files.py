"""The type of a tokenizer, by the content of its file; what contradicts it is an error."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from megatron.optimus.config.schema import ConfigError, TokenizerType
from megatron.optimus.config.tokenizer_files import definition_file, settle_tokenizer_type

HF, PIECES, TIKTOKEN, BYTE = list(TokenizerType)


@pytest.fixture
def files(tmp_path: Path) -> dict[TokenizerType, Path]:
    """A folder for each type. Llama 3's file of tiktoken has the name of SentencePiece's."""
    content = {
        HF: ("tokenizer.json", b'\n {"model": {}}'),
        PIECES: ("spiece.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02"),
        TIKTOKEN: ("tokenizer.model", base64.b64encode(b"!") + b" 0\n"),
    }
    for kind, (name, data) in content.items():
        (tmp_path / kind.value).mkdir()
        (tmp_path / kind.value / name).write_bytes(data)
    return {kind: tmp_path / kind.value / name for kind, (name, _) in content.items()}


def test_types_are_guessed_from_files_and_folders(files: dict[TokenizerType, Path], tmp_path: Path) -> None:
    for kind, file in files.items():
        for location in (file, file.parent):
            guess, notice = settle_tokenizer_type(None, str(location))
            assert guess is kind and notice == f"tokenizer_type={kind.value}, guessed from {file}"
            assert settle_tokenizer_type(kind, str(location)) == (kind, "")
            assert definition_file(kind, location) == file
    gpt2 = tmp_path / "gpt2"
    gpt2.mkdir()
    for name in ("vocab.json", "merges.txt"):
        assert settle_tokenizer_type(None, str(gpt2)) == (HF, "")  # its reader says that nothing is there
        (gpt2 / name).write_text("{}")
    assert settle_tokenizer_type(None, str(gpt2))[1].endswith("gpt2/vocab.json")
    assert settle_tokenizer_type(None, None) == (HF, "") and settle_tokenizer_type(BYTE, None) == (BYTE, "")


def test_contradictions_name_both(files: dict[TokenizerType, Path], tmp_path: Path) -> None:
    for kind, file in files.items():
        for other in set(files) - {kind}:
            with pytest.raises(ConfigError, match=f"tokenizer_type={other.value}, but {file} is of a {kind.value}"):
                settle_tokenizer_type(other, str(file))
        with pytest.raises(ConfigError, match=r"ByteLevelTokenizer reads no file, but tokenizer_model="):
            settle_tokenizer_type(BYTE, str(file))
    (tmp_path / "noise").write_bytes(b"\xff" * 9)
    with pytest.raises(ConfigError, match=r"noise' is not a tokenizer: it can be tokenizer\.json, .*\.tiktoken file"):
        settle_tokenizer_type(None, str(tmp_path / "noise"))
    # a folder that holds both is of the type that is asked for
    (files[HF].parent / "tokenizer.model").write_bytes(files[PIECES].read_bytes())
    assert settle_tokenizer_type(PIECES, str(files[HF].parent)) == (PIECES, "")
    assert settle_tokenizer_type(None, str(files[HF].parent))[0] is HF
