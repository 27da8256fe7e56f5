"""The loop of generation on one process."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.inference.generate import Completion, Limits, Speed, generate
from megatron.optimus.inference.load import TextModel
from megatron.optimus.inference.sampling import Sampling
from tests.unit.inference.cases import checkpoint, loaded, prompts

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return loaded(checkpoint(tmp_path_factory.mktemp("model"), "moe"))


def run(model: TextModel, ids: list[list[int]], sampling: Sampling, limits: Limits, **options: int) -> list[Completion]:
    return list(generate(model, ids, sampling, limits, **options))


def without_cache(model: TextModel, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens by the training forward over the whole text, once for each token."""
    ids, logprobs = list(prompt), []
    for _ in range(count):
        distribution = model.model(torch.tensor([ids])).logits_BSV[0, -1].log_softmax(dim=-1)
        ids.append(int(distribution.argmax()))
        logprobs.append(float(distribution[ids[-1]]))
    return ids[len(prompt) :], logprobs


def test_greedy_tokens_equal_those_without_a_cache(model: TextModel) -> None:
    ids = prompts(11)
    found = run(model, ids, GREEDY, Limits(9, ignore_end=True), batch_size=4)
    assert len(found) == 11
    for prompt, completion in zip(ids, found, strict=True):
        tokens, logprobs = without_cache(model, prompt, 9)
        assert completion.token_ids == tokens
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-5)
        assert completion.text == model.tokenizer.decode(tokens)
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.9, top_p=0.95, seed=3), GREEDY])
def test_a_prompt_gets_the_same_in_every_batch(model: TextModel, sampling: Sampling) -> None:
    ids = prompts(10, seed=4)
    alone = run(model, ids, sampling, Limits(8), batch_size=1)
    for batch_size in (3, 16):
        found = run(model, ids, sampling, Limits(8), batch_size=batch_size)
        assert [one.token_ids for one in found] == [one.token_ids for one in alone]


def test_the_seed_decides(model: TextModel) -> None:
    ids = [[65, 66]] * 3
    first, again, other = (run(model, ids, Sampling(seed=seed), Limits(12)) for seed in (1, 1, 2))
    assert first == again
    assert len({tuple(one.token_ids) for one in [*first, *other]}) == 6  # equal prompts differ too


def test_a_completion_ends_at_a_token_that_ends_texts(model: TextModel) -> None:
    [whole] = run(model, [[65, 66]], GREEDY, Limits(10, ignore_end=True))
    end = whole.token_ids[4]
    ending = TextModel(model.model, model.tokenizer, frozenset([end]), model.mesh, model.device)
    [found] = run(ending, [[65, 66]], GREEDY, Limits(10))
    first = whole.token_ids.index(end)
    assert (found.token_ids, found.finish_reason) == (whole.token_ids[:first], "stop")
    [found] = run(ending, [[65, 66]], GREEDY, Limits(10, ignore_end=True))
    assert found == whole


def test_a_batch_goes_on_after_some_have_ended(model: TextModel) -> None:
    ids = prompts(4, seed=6)
    whole = run(model, ids, GREEDY, Limits(10, ignore_end=True))
    end = whole[0].token_ids[2]
    ending = TextModel(model.model, model.tokenizer, frozenset([end]), model.mesh, model.device)
    for all_tokens, found in zip(whole, run(ending, ids, GREEDY, Limits(10)), strict=True):
        cut = all_tokens.token_ids.index(end) if end in all_tokens.token_ids else 10
        assert found.token_ids == all_tokens.token_ids[:cut]


def test_stop_strings_cut_the_text(model: TextModel) -> None:
    [whole] = run(model, [[65]], Sampling(seed=2), Limits(40, ignore_end=True))
    stop = whole.text[7:9]
    [found] = run(model, [[65]], Sampling(seed=2), Limits(40, stops=(stop,), ignore_end=True))
    assert (found.text, found.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    assert len(found.token_ids) < 40


def test_a_completion_ends_at_the_last_position(model: TextModel) -> None:
    ids = [[65] * 60, [66] * 5]
    found = run(model, ids, GREEDY, Limits(1000, ignore_end=True))
    assert [len(one.token_ids) for one in found] == [4, 59]  # of 64 positions
    assert {one.finish_reason for one in found} == {"length"}
    assert found[1].token_ids == without_cache(model, ids[1], 59)[0]


def test_a_prompt_beyond_the_last_position_is_refused(model: TextModel) -> None:
    with pytest.raises(ConfigError, match=r"prompt 2 has 64 tokens, .* 64 positions .*shorten it to 63"):
        run(model, [[65], [66] * 64], GREEDY, Limits(1))


def test_text_is_shown_as_it_comes(model: TextModel) -> None:
    shown: list[str] = []
    speed = Speed()
    [found] = generate(model, [[65, 66, 67]], Sampling(seed=8), Limits(30), show=shown.append, speed=speed)
    assert "".join(shown) == found.text and len(shown) > 3
    assert (speed.prompt_tokens, speed.new_tokens) == (3, len(found.token_ids) - 1)
    assert "generated: 29 tokens" in str(speed)


@pytest.mark.parametrize(
    ("limits", "message"), [(dict(max_new_tokens=0), "--max-new-tokens 0"), (dict(stops=("",)), "--stop is empty")]
)
def test_limits_that_are_none_are_refused(limits: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Limits(**limits)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3), Sampling(top_k=5), Sampling(top_p=0.5)])
def test_weights_that_are_not_finite_are_an_error(model: TextModel, sampling: Sampling) -> None:
    weight = model.model.final_norm.weight
    before = weight.clone()
    weight.fill_(math.nan)
    try:
        with pytest.raises(ConfigError, match="logits are not finite: the checkpoint has NaN"):
            run(model, [[65, 66]], sampling, Limits(4))
    finally:
        weight.copy_(before)
