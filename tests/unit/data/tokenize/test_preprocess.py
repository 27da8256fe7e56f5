"""From the ids of documents to what is written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.optimus.data.errors import DataError
from megatron.optimus.data.tokenize.preprocess import PreprocessReport, _check_tokens, _join_documents


@pytest.mark.parametrize("source", [np.uint8, np.int32, np.uint32])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_documents_are_joined_and_ended(source: type[np.integer], dtype: type[np.integer]) -> None:
    """In the library's type and the file's; an empty document stays empty; the end may need more bits than the ids."""
    documents = [np.array(ids, dtype=source) for ids in ([7, 255], [], [9], [])]
    ids, lengths = _join_documents(documents, 40000, np.dtype(dtype))
    assert ids.dtype == dtype and ids.tolist() == [7, 255, 40000, 9, 40000]
    assert lengths == [3, 0, 2, 0]
    ids, lengths = _join_documents(documents, None, np.dtype(dtype))
    assert ids.dtype == dtype and ids.tolist() == [7, 255, 9]
    assert lengths == [2, 0, 1, 0]
    for nothing in ([], documents[1:2]):
        ids, lengths = _join_documents(nothing, 40000, np.dtype(dtype))
        assert ids.dtype == dtype and ids.size == 0 and lengths == [0] * len(nothing)


def test_an_id_that_the_files_type_cannot_hold_is_an_error() -> None:
    documents = [np.array([7], dtype=np.int32), np.array([65536], dtype=np.int32)]
    with pytest.raises(DataError, match="token id 65536 does not fit uint16"):
        _join_documents(documents, 9, np.dtype(np.uint16))
    assert _join_documents(documents, 9, np.dtype(np.int32))[0].tolist() == [7, 9, 65536, 9]


def test_every_key_must_give_tokens() -> None:
    """Also one whose name ends in another's."""
    plan: Any = SimpleNamespace(keys=["raw_text", "text"], final_prefix=lambda part, key: f"o{part}_{key}_document")
    tokens = {"o0_raw_text_document": 0, "o1_raw_text_document": 0, "o0_text_document": 5, "o1_text_document": 0}
    with pytest.raises(DataError, match="o0_raw_text_document: the input gives no tokens"):
        _check_tokens(PreprocessReport(tokens=tokens), plan, [0, 1])
    _check_tokens(PreprocessReport(tokens=tokens | {"o1_raw_text_document": 1}), plan, [0, 1])
