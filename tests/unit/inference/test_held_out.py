"""Tasks of held-out texts: which texts they are made of, and that the harness asks what the files say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.optimus.commands.make_tasks import main
from megatron.optimus.inference.held_out import NUM_EXAMPLES, TASKS
from megatron.optimus.inference.score import score
from megatron.optimus.inference.tasks import Variant, find_tasks, load_tasks, run_tasks, scores
from tests.unit.inference.cases import DOCUMENTS, checkpoint, loaded, pair_of_documents, text_of

pytest.importorskip("lm_eval")

OPTIONS = ["--words", "8", "--items", "30", "--split", "50,50,0"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pair_of_documents(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def tasks(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    assert main([str(pair), "--out", str(folder), *OPTIONS]) == 0
    return folder


def read(folder: Path, task: str, name: str = "test") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{task}.{name}.jsonl").read_text().splitlines()]


def test_they_are_made_of_the_held_out_documents_alone(tasks: Path) -> None:
    held_out = {text_of(document) for document in range(31, DOCUMENTS)}  # 30 lies across the border of the halves
    assert {line["text"] for line in read(tasks, "held_out_text")} == held_out
    passages = [line["context"] + line["target"] for line in read(tasks, "held_out_cloze")]
    examples = [line["context"] + line["target"] for line in read(tasks, "held_out_cloze", "train")]
    assert len(passages) == 30 and len(examples) == NUM_EXAMPLES and not {*passages} & {*examples}
    for passage in (*passages, *examples):
        assert len(passage.split()) == 8 and any(passage in text for text in held_out)
    assert all(len(line["target"].split()) == 1 for line in read(tasks, "held_out_cloze"))


def test_one_of_four_choices_goes_on_and_the_others_are_of_other_documents(tasks: Path) -> None:
    lines = read(tasks, "held_out_choice")
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
        assert read(tmp_path / "same", task) == read(tasks, task) != read(tmp_path / "other", task)


def test_the_harness_asks_what_the_files_say(
    tasks: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores are those of the log-likelihoods of the lines; with few-shot an example stands before each question."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model = loaded(checkpoint(tmp_path / "model", "dense"))
    found = load_tasks(find_tasks(TASKS, tasks, "--tasks"))
    results = scores(run_tasks(model, found, batch_size=8))

    def logprob(context: str, continuation: str) -> tuple[float, bool]:
        encoded = model.tokenizer.encode(context), model.tokenizer.encode(continuation)
        [told] = score(model, [[*encoded[0], *encoded[1]]], batch_size=1)
        count = len(encoded[1])
        return math.fsum(told.logprobs[-count:]), all(told.is_greedy[-count:])

    asked = [logprob(line["context"], line["target"]) for line in read(tasks, "held_out_cloze")]
    mean = math.fsum(one for one, _ in asked) / len(asked)
    assert results["held_out_cloze"]["perplexity,none"] == pytest.approx(math.exp(-mean), rel=1e-5)
    assert results["held_out_cloze"]["acc,none"] == sum(greedy for _, greedy in asked) / len(asked)
    right = []
    for line in read(tasks, "held_out_choice"):
        chances = [logprob(line["context"], choice)[0] for choice in line["choices"]]
        right.append(chances.index(max(chances)) == line["answer"])
    assert results["held_out_choice"]["acc,none"] == pytest.approx(sum(right) / len(right))
    assert 2 < results["held_out_text"]["bits_per_byte,none"] < 20
    shots = run_tasks(model, found, batch_size=8, limit=2, variant=Variant(1), samples=True)["samples"]
    examples = [line["context"] + line["target"] for line in read(tasks, "held_out_cloze", "train")]
    for sample in shots["held_out_cloze"]:
        example, _, question = sample["arguments"][0][0].partition("\n\n")
        assert example in examples and question == sample["doc"]["context"]
