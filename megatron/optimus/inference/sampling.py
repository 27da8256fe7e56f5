"""Choice of the next token from the logits.

Every prompt has a random generator of its own, made from the seed and the prompt's number, and each of its tokens takes
one number of it. What a prompt gets therefore does not depend on the prompts that it shares a batch with.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.platform.seeding import generator_for

NOT_FINITE = "the model's logits are not finite: the checkpoint has NaN or infinite weights"


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The filters apply in this order, that of transformers.

    Attributes:
        repetition_penalty: logits of tokens that are in the prompt or were generated are divided by it where they are
            positive, else multiplied (arXiv 1909.05858); 1: none.
        temperature: logits are divided by it; 0: the most likely token is taken, and the other filters do nothing.
        top_k: the K most likely tokens are kept; 0: all.
        top_p: the smallest set of most likely tokens is kept whose probabilities reach it (arXiv 1904.09751); 1: all.
        min_p: tokens with this share of the highest probability are kept (arXiv 2407.01082); 0: all.
        seed: of the random numbers.

    Raises:
        ConfigError: a value is outside its range.
    """

    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1234

    def __post_init__(self) -> None:
        _require(0 < self.repetition_penalty < math.inf, "repetition_penalty", self.repetition_penalty, "above 0")
        _require(0 <= self.temperature < math.inf, "temperature", self.temperature, "0 (greedy) or above")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (all) or above")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1 (all)")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 (all) to 1")
        _require(0 <= self.seed < 2**63, "seed", self.seed, "from 0 to 2^63 - 1")

    def generator(self, number: int) -> torch.Generator:
        """The random numbers of a prompt, by its number among the prompts."""
        return generator_for(self.seed, "generate", number)


def _require(is_valid: bool, name: str, value: float, limit: str) -> None:
    if not is_valid:
        raise ConfigError(f"--{name.replace('_', '-')} {value} must be {limit}")


class Sampler:
    """Chooses the next token of every sequence of a batch."""

    def __init__(self, options: Sampling, prompts: Sequence[Sequence[int]], numbers: Sequence[int]) -> None:
        """Makes the generators.

        Args:
            options: how tokens are chosen.
            prompts: token ids of each sequence.
            numbers: of each prompt, which its random numbers depend on.
        """
        self._options, self._prompts = options, prompts
        self._generators = [options.generator(number) for number in numbers]
        self._seen_BV: Tensor | None = None  # tokens of prompts and completions, with a repetition penalty

    def next(self, logits_BV: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses a token for every sequence.

        Args:
            logits_BV: of the model, any float dtype.

        Returns:
            Token ids, int64 [B], and the logarithms of their probabilities by the model alone, fp32 [B].
        """
        logits_BV = logits_BV.float()
        if self._options.repetition_penalty != 1 and self._seen_BV is None:
            self._seen_BV = torch.stack([tokens_seen(prompt, logits_BV[0]) for prompt in self._prompts])
        tokens_B = choose(logits_BV, self._options, self._generators, self._seen_BV)
        if self._seen_BV is not None:
            self._seen_BV.scatter_(1, tokens_B[:, None], True)
        logprobs_B = logits_BV.log_softmax(dim=-1).gather(1, tokens_B[:, None])[:, 0]
        return tokens_B, logprobs_B


def tokens_seen(prompt: Sequence[int], logits_V: Tensor) -> Tensor:
    """Marks the tokens of a prompt: bool [V], on the device of the logits."""
    seen_V = torch.zeros_like(logits_V, dtype=torch.bool)
    seen_V[torch.tensor(prompt, device=seen_V.device)] = True
    return seen_V


def choose(
    logits_BV: Tensor, options: Sampling, generators: Sequence[torch.Generator], seen_BV: Tensor | None
) -> Tensor:
    """Chooses the next tokens of sequences with the same options.

    Args:
        logits_BV: fp32.
        options: how tokens are chosen; the seed is that of the generators.
        generators: one of each sequence, which takes one number of it unless the choice is greedy.
        seen_BV: tokens that the repetition penalty counts, bool; None without one.

    Returns:
        Token ids, int64 [B].
    """
    if seen_BV is not None:
        penalty = options.repetition_penalty
        penalized_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        logits_BV = torch.where(seen_BV, penalized_BV, logits_BV)
    if options.temperature == 0:
        return logits_BV.argmax(dim=-1)
    uniforms = [torch.rand((), generator=generator).item() for generator in generators]
    uniforms_B = torch.tensor(uniforms, device=logits_BV.device)
    return draw(filtered(logits_BV, options).softmax(dim=-1), uniforms_B)


def filtered(logits_BV: Tensor, options: Sampling) -> Tensor:
    """Applies temperature, top-k, top-p and min-p: logits of the tokens that are kept, -inf for the others."""
    logits_BV = logits_BV / options.temperature
    if 0 < options.top_k < logits_BV.shape[-1]:
        smallest_B1 = logits_BV.topk(options.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -math.inf)
    if options.top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
        probabilities_BV = sorted_BV.softmax(dim=-1)
        # A token stays if those before it do not reach top_p: the first always does.
        before_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV
        sorted_BV = sorted_BV.masked_fill(before_BV >= options.top_p, -math.inf)
        logits_BV = torch.empty_like(logits_BV).scatter_(1, order_BV, sorted_BV)
    if options.min_p > 0:
        probabilities_BV = logits_BV.softmax(dim=-1)
        least_B1 = options.min_p * probabilities_BV.amax(dim=-1, keepdim=True)
        logits_BV = logits_BV.masked_fill(probabilities_BV < least_B1, -math.inf)
    return logits_BV


def draw(probabilities_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Draws a token of each distribution by its inverse cumulative distribution.

    Args:
        probabilities_BV: fp32; they need not sum to one.
        uniforms_B: fp32, at least 0 and below 1.

    Returns:
        int64 [B]; never a token of probability 0. Where a probability is NaN, any token.
    """
    # In float64 u * total stays below the total, so that a token is always found.
    cumulative_BV = probabilities_BV.double().cumsum(dim=-1)
    targets_B1 = (uniforms_B * cumulative_BV[:, -1])[:, None]
    # With NaN none is found: a token that does not exist would end a GPU's process where it is looked up.
    return torch.searchsorted(cumulative_BV, targets_B1, right=True)[:, 0].clamp(max=probabilities_BV.shape[1] - 1)
