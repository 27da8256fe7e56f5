"""Log-probabilities of given texts against the training forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.inference import score as module
from megatron.optimus.inference.score import score
from tests.unit.inference.cases import checkpoint, loaded, prompts


@pytest.mark.parametrize("name", ["dense", "shared"])
def test_scores_equal_the_training_forward(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(checkpoint(tmp_path, name))
    texts = prompts(9)
    texts[3] = [65]
    whole = list(score(model, texts, batch_size=4))
    for text, found in zip(texts, whole, strict=True):
        distribution = model.model(torch.tensor([text])).logits_BSV[0].log_softmax(dim=-1)
        expected = [float(distribution[place, token]) for place, token in enumerate(text[1:])]
        assert found.logprobs == pytest.approx(expected, abs=1e-5)
        greedy = distribution.argmax(dim=-1).tolist()
        assert found.is_greedy == [token == best for token, best in zip(text[1:], greedy, strict=False)]
    assert [found.logprobs for found in score(model, [[65], [66]])] == [[], []]
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 5 * model.config.vocab_size)  # five tokens at a time
    for found, expected in zip(score(model, texts, batch_size=4), whole, strict=True):
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-6)


def test_a_text_beyond_the_last_position_and_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = loaded(checkpoint(tmp_path, "dense"))
    [found] = score(model, [[65] * 65])
    assert len(found.logprobs) == 64
    with pytest.raises(ConfigError, match="text 1 has 66 tokens"):
        list(score(model, [[65] * 66]))
    model.model.final_norm.weight.fill_(float("nan"))
    with pytest.raises(ConfigError, match="logits are not finite: the checkpoint has NaN"):
        list(score(model, [[65, 66]]))
