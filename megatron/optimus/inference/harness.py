"""A model as lm-eval's harness asks it: log-likelihoods of continuations, of whole texts, and completions.

Imported only where the package lm_eval is installed. Every rank asks the same; ``generate`` and ``score`` divide the
work and give all ranks all answers, so each rank is a world of its own to the harness.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron.optimus.inference.generate import Limits, generate
from megatron.optimus.inference.load import TextModel
from megatron.optimus.inference.sampling import Sampling
from megatron.optimus.inference.score import score

_MAX_NEW_TOKENS = 256  # where a task does not say, as lm-eval's own models
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

_Pair = tuple[Sequence[int], Sequence[int]]  # token ids of a context and of its continuation


class HarnessModel(TemplateLM):
    """lm-eval's interface. Its methods are collective over the model's ranks."""

    def __init__(self, loaded: TextModel, batch_size: int) -> None:
        """Wraps a model.

        Args:
            loaded: model and tokenizer.
            batch_size: texts at a time on each rank that has texts of its own.
        """
        super().__init__()
        self._loaded, self._batch_size = loaded, batch_size
        self.max_length = loaded.config.max_position_embeddings

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, which also stands before a text without context."""
        return self._loaded.tokenizer.eod_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encodes a text; nothing is added, as in training."""
        return self._loaded.tokenizer.encode(string)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations in nats, and whether each is the greedy one."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)  # a bar of milliseconds
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts in nats; long ones are cut into windows, as the harness defines them."""
        windows = [self._windows(request.args[0]) for request in requests]
        scores = iter(self._scores([pair for own in windows for pair in own]))
        return [math.fsum(next(scores)[0] for _ in own) for own in windows]

    def _windows(self, text: str) -> list[_Pair]:
        ids = self.tok_encode(text)
        cut = get_rolling_token_windows(ids, self.prefix_token_id, max_seq_len=self.max_length, context_len=1)
        return [make_disjoint_window(pair) for pair in cut]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return self._scores([(context, continuation) for _, context, continuation in requests])

    def _scores(self, pairs: list[_Pair]) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the greedy one. Contexts lose their beginning."""
        # The longest first: texts of a batch have similar lengths, and memory that does not suffice is missed at once.
        order = sorted(range(len(pairs)), key=lambda place: -len(pairs[place][0]) - len(pairs[place][1]))
        texts = [[*pairs[place][0], *pairs[place][1]][-self.max_length - 1 :] for place in order]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for place, result in zip(order, score(self._loaded, texts, batch_size=self._batch_size), strict=True):
            if count := len(pairs[place][1]):
                found[place] = math.fsum(result.logprobs[-count:]), all(result.is_greedy[-count:])
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Completions, greedy unless a task asks for sampling, up to its stop strings."""
        found = [""] * len(requests)
        for options, places in _by_options(requests):
            limits, sampling = self._options(options)
            room = max(1, self.max_length - limits.max_new_tokens)
            contexts = [requests[place].args[0] for place in places]
            prompts = [self.tok_encode(context)[-room:] or [self.prefix_token_id] for context in contexts]
            completions = generate(self._loaded, prompts, sampling, limits, batch_size=self._batch_size)
            for place, completion in zip(places, completions, strict=True):
                found[place] = completion.text
        return found

    def _options(self, options: dict[str, Any]) -> tuple[Limits, Sampling]:
        until = options.get("until") or []
        stops = tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)
        most = int(options.get("max_gen_toks", options.get("max_new_tokens", _MAX_NEW_TOKENS)))
        chosen = {name: options[name] for name in _SAMPLING if name in options}
        if not options.get("do_sample", chosen.get("temperature", 0) > 0):
            chosen["temperature"] = 0
        return Limits(min(most, self.max_length - 1), stops), Sampling(**chosen)


def _by_options(requests: Sequence[Instance]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Groups the requests by how their tokens are chosen; prompts of equal length follow each other."""
    groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for place, request in enumerate(requests):
        options = request.args[1]
        groups.setdefault(repr(sorted(options.items())), (options, []))[1].append(place)
    for options, places in groups.values():
        yield options, sorted(places, key=lambda place: -len(requests[place].args[0]))
