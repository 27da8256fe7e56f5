"""Tasks for the harness: it asks what the files say, and counts what a model by itself would."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron.optimus.inference.held_out import TASKS
from megatron.optimus.inference.score import score
from megatron.optimus.inference.tasks import Variant, find_tasks, load_tasks, run_tasks, scores
from tests.unit.inference.cases import checkpoint, loaded, read_questions

pytest.importorskip("lm_eval")


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

    asked = [logprob(line["context"], line["target"]) for line in read_questions(tasks, "held_out_cloze")]
    mean = math.fsum(one for one, _ in asked) / len(asked)
    assert results["held_out_cloze"]["perplexity,none"] == pytest.approx(math.exp(-mean), rel=1e-5)
    assert results["held_out_cloze"]["acc,none"] == sum(greedy for _, greedy in asked) / len(asked)
    right = []
    for line in read_questions(tasks, "held_out_choice"):
        chances = [logprob(line["context"], choice)[0] for choice in line["choices"]]
        right.append(chances.index(max(chances)) == line["answer"])
    assert results["held_out_choice"]["acc,none"] == pytest.approx(sum(right) / len(right))
    assert 2 < results["held_out_text"]["bits_per_byte,none"] < 20
    shots = run_tasks(model, found, batch_size=8, limit=2, variant=Variant(1), samples=True)["samples"]
    examples = [line["context"] + line["target"] for line in read_questions(tasks, "held_out_cloze", "train")]
    for sample in shots["held_out_cloze"]:
        example, _, question = sample["arguments"][0][0].partition("\n\n")
        assert example in examples and question == sample["doc"]["context"]
