"""Tasks of held-out texts: which texts they are made of, and that the harness asks what the files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.optimus.commands.make_tasks import main
from megatron.optimus.inference.held_out import NUM_EXAMPLES
from tests.unit.inference.cases import DOCUMENTS, OPTIONS, read_questions, text_of

pytest.importorskip("lm_eval")


def test_they_are_made_of_the_held_out_documents_alone(tasks: Path) -> None:
    held_out = {text_of(document) for document in range(31, DOCUMENTS)}  # 30 lies across the border of the halves
    assert {line["text"] for line in read_questions(tasks, "held_out_text")} == held_out
    passages = [line["context"] + line["target"] for line in read_questions(tasks, "held_out_cloze")]
    examples = [line["context"] + line["target"] for line in read_questions(tasks, "held_out_cloze", "train")]
    assert len(passages) == 30 and len(examples) == NUM_EXAMPLES and not {*passages} & {*examples}
    for passage in (*passages, *examples):
        assert len(passage.split()) == 8 and any(passage in text for text in held_out)
    assert all(len(line["target"].split()) == 1 for line in read_questions(tasks, "held_out_cloze"))


def test_one_of_four_choices_goes_on_and_the_others_are_of_other_documents(tasks: Path) -> None:
    lines = read_questions(tasks, "held_out_choice")
    for line in lines:
        texts = [line["context"] + choice for choice in line["choices"]]
        own = line["context"].partition("w")[0]
        is_right = [any(text in text_of(document) for document in range(DOCUMENTS)) for text in texts]
        assert is_right == [number == line["answer"] for number in range(4)]
        assert [choice.split()[0].partition("w")[0] == own for choice in line["choices"]] == is_right
    assert {line["answer"] for line in lines} == {0, 1, 2, 3}


def test_the_seed_alone_decides(pair: Path, tasks: Path, tmp_path: Path) -> None:
    for name, words in {"same": [], "other": ["--seed", "7"]}.items():
        assert main([str(pair), "--out", str(tmp_path / name), *OPTIONS, *words]) == 0
    for task in ("held_out_cloze", "held_out_choice"):
        assert (
            read_questions(tmp_path / "same", task)
            == read_questions(tasks, task)
            != read_questions(tmp_path / "other", task)
        )
