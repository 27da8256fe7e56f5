"""Distributions of sampled tokens against theory and against the processors of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.inference.sampling import Sampler, Sampling, draw, filtered

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.0, -0.5, -1.0, -3.0, -float("inf")])
DRAWS = 40_000


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible].double() * counts.sum()
    return float(((counts[possible] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (dict(temperature=1.0), 7),
        (dict(temperature=0.5), 7),
        (dict(temperature=2.0), 7),
        (dict(top_k=3), 3),
        (dict(top_p=0.7), 2),
        (dict(min_p=0.2), 3),
        (dict(temperature=1.5, top_k=6, top_p=0.9, min_p=0.1), 5),
    ],
)
def test_draws_follow_the_distribution(options: dict[str, Any], kept: int) -> None:
    expected = (LOGITS / options.get("temperature", 1.0)).softmax(dim=-1)
    expected = torch.where(torch.arange(8) < kept, expected, 0.0)  # LOGITS descend
    expected /= expected.sum()
    numbers = range(DRAWS)
    sampler = Sampler(Sampling(**options, seed=3), [[0]] * DRAWS, numbers)
    tokens, logprobs = sampler.next(LOGITS.expand(DRAWS, -1))
    counts = torch.bincount(tokens, minlength=8)
    # 99.9 % of a chi-square distribution with 6 degrees of freedom lie below 22.5, with fewer below less.
    assert chi_square(counts, expected) < 22.5
    torch.testing.assert_close(logprobs, LOGITS.log_softmax(dim=-1)[tokens])  # by the model, before any filter


def test_one_prompts_draws_follow_the_distribution() -> None:
    sampler = Sampler(Sampling(seed=5), [[0]], [0])
    tokens = torch.stack([sampler.next(LOGITS[None])[0][0] for _ in range(10_000)])
    assert chi_square(torch.bincount(tokens, minlength=8), LOGITS.softmax(dim=-1)) < 22.5


def test_filters_equal_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(50, 200, generator=torch.Generator().manual_seed(1)) * 3
    ids = torch.zeros(50, 1, dtype=torch.int64)
    for options in (
        dict(temperature=0.7),
        dict(top_k=17),
        dict(top_k=1000),
        dict(top_p=0.83),
        dict(top_p=1e-6),
        dict(min_p=0.05),
        dict(min_p=1.0),
        dict(temperature=1.3, top_k=40, top_p=0.9, min_p=0.02),
    ):
        expected = logits
        for name, make in (
            ("temperature", transformers.TemperatureLogitsWarper),
            ("top_k", lambda k: transformers.TopKLogitsWarper(min(k, 200))),
            ("top_p", transformers.TopPLogitsWarper),
            ("min_p", transformers.MinPLogitsWarper),
        ):
            if name in options:
                expected = make(options[name])(ids, expected)
        torch.testing.assert_close(filtered(logits, Sampling(**options)), expected)


def test_the_repetition_penalty_equals_that_of_transformers_over_several_steps() -> None:
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(1)
    prompts = [[3, 5, 5], [7, 1, 2]]
    sampler = Sampler(Sampling(temperature=0, repetition_penalty=1.8), prompts, [0, 1])
    ids = torch.tensor(prompts)
    for _ in range(20):
        logits = torch.randn(2, 12, generator=generator)
        expected = transformers.RepetitionPenaltyLogitsProcessor(1.8)(ids, logits.clone()).argmax(dim=-1)
        tokens, _ = sampler.next(logits)
        assert tokens.tolist() == expected.tolist()
        ids = torch.cat([ids, tokens[:, None]], dim=1)


def test_draw_never_takes_a_token_of_probability_zero() -> None:
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    uniforms = [0.0, 0.2499, 0.25, 0.5, math.nextafter(1.0, 0.0), float(torch.tensor(1.0).nextafter(torch.tensor(0.0)))]
    found = draw(probabilities.expand(len(uniforms), -1), torch.tensor(uniforms).clamp(max=1 - 2**-24))
    assert found.tolist() == [1, 1, 3, 3, 3, 3]


def test_a_prompt_gets_the_same_draws_in_every_batch() -> None:
    logits = torch.randn(4, 6, 50, generator=torch.Generator().manual_seed(1))  # steps, prompts, vocabulary
    options = Sampling(seed=11)

    def tokens(numbers: list[int]) -> list[list[int]]:
        sampler = Sampler(options, [[0]] * len(numbers), numbers)
        return torch.stack([sampler.next(step[numbers])[0] for step in logits], dim=1).tolist()

    together = tokens(list(range(6)))
    assert [tokens([number])[0] for number in range(6)] == together
    assert tokens([4, 2, 0]) == [together[4], together[2], together[0]]
    options = Sampling(seed=12)
    assert tokens(list(range(6))) != together


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=-0.1), "--temperature -0.1 must be 0"),
        (dict(temperature=math.nan), "--temperature nan"),
        (dict(temperature=math.inf), "--temperature inf"),
        (dict(top_k=-1), "--top-k -1"),
        (dict(top_p=0.0), "--top-p 0.0 must be above 0"),
        (dict(top_p=1.5), "--top-p 1.5"),
        (dict(min_p=-0.5), "--min-p -0.5"),
        (dict(min_p=math.nan), "--min-p nan"),
        (dict(repetition_penalty=0.0), "--repetition-penalty 0.0 must be above 0"),
        (dict(seed=-1), "--seed -1"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)
