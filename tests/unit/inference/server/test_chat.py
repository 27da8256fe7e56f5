"""Chat templates that lie in a tokenizer's folder are taken without --chat-template, from both places there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.optimus.data.tokenize.tokenizer import build_tokenizer, train_bpe
from tests.unit.inference.server.served import WORDS

pytest.importorskip("fastapi")
pytest.importorskip("transformers")
from megatron.optimus.config.schema import TokenizerType
from megatron.optimus.inference.server.chat import ChatTemplate
from megatron.optimus.inference.server.protocol import Message

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", None])
@pytest.mark.parametrize("names_file", [False, True])
def test_a_template_of_the_tokenizer_is_found(place: str | None, names_file: bool, tmp_path: Path) -> None:
    train_bpe([" ".join(WORDS)] * 20, 264, tmp_path)
    if place == "chat_template.jinja":
        (tmp_path / place).write_text(TEMPLATE)
    elif place is not None:
        config = json.loads((tmp_path / place).read_text())
        (tmp_path / place).write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    chat = ChatTemplate(tmp_path / "tokenizer.json" if names_file else tmp_path, None)
    assert chat.is_there is (place is not None)
    if place is None:
        return
    tokenizer = build_tokenizer(TokenizerType.HF, tmp_path)
    turns = [Message(role="user", content="the cat"), Message(role="assistant", content="sat")]
    end = tokenizer.eod_id
    ids = [*tokenizer.encode("user: the cat"), end, *tokenizer.encode("assistant: sat"), end]
    assert chat.encode(turns) == [*ids, *tokenizer.encode("assistant:")]
