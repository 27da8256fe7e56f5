"""Log-probabilities of given texts: one forward, without a cache. Texts of a batch are padded on the right.

Shapes: B sequences of this rank, S positions, D model width, T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.inference.cache import hidden_states
from megatron.optimus.inference.generate import not_finite, of_all_ranks, own_share
from megatron.optimus.inference.load import TextModel
from megatron.optimus.layers.loss import CHUNK_ELEMENTS
from megatron.optimus.layers.rope import rope_table


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a text's tokens from the second on; the first has nothing before it."""

    logprobs: list[float]  # in nats
    is_greedy: list[bool]  # whether the token is the most likely one


@torch.no_grad()  # not inference_mode: a model in training keeps tensors of its forward
def score(loaded: TextModel, texts: Sequence[Sequence[int]], *, batch_size: int = 8) -> Iterator[Score]:
    """Computes the log-probability of every token. Collective, as ``generate`` is.

    Args:
        loaded: model and tokenizer.
        texts: token ids, at least one each.
        batch_size: texts at a time on each rank that has texts of its own.

    Yields:
        Scores in the order of the texts.

    Raises:
        ConfigError: a text is longer than what the model was trained on, or the model's logits are not finite.
    """
    most = loaded.config.max_position_embeddings + 1  # nothing follows the last token
    for number, text in enumerate(texts, 1):
        if len(text) > most:
            raise ConfigError(
                f"text {number} has {len(text)} tokens, and the model was trained on {most - 1} positions "
                "(max_position_embeddings); cut it into shorter texts"
            )
    size = batch_size * loaded.mesh.size("dp")
    for first in range(0, len(texts), size):
        batch = texts[first : first + size]
        width = max(map(len, batch))
        own = own_share(batch, loaded.mesh)
        tokens_BS = torch.tensor([[*text, *[0] * (width - len(text))] for text in own], device=loaded.device)
        found_BN = _score(loaded, tokens_BS)
        for text, values in zip(batch, of_all_ranks(found_BN, loaded.mesh), strict=False):
            count = len(text) - 1
            logprobs, is_greedy = values[: width - 1], values[width - 1 :]
            if any(map(math.isnan, logprobs[:count])):  # a task would make an accuracy of them
                raise not_finite(loaded)
            yield Score(logprobs[:count], [bool(value) for value in is_greedy[:count]])


def _score(loaded: TextModel, tokens_BS: Tensor) -> Tensor:
    """Log-probabilities of all tokens but the first, then whether each is the most likely: float64 [B, 2 * (S - 1)]."""
    inputs_BS, labels_T = tokens_BS[:, :-1], tokens_BS[:, 1:].flatten()
    if labels_T.numel() == 0:
        return torch.empty(len(tokens_BS), 0, dtype=torch.float64, device=loaded.device)
    x_BSD = hidden_states(loaded.model, inputs_BS, rope_table(inputs_BS.shape[1], loaded.config, loaded.device))
    x_TD = x_BSD.flatten(0, 1)
    step = max(1, CHUNK_ELEMENTS // loaded.config.vocab_size)
    parts = []
    for start in range(0, len(labels_T), step):
        logits_TV = loaded.logits(x_TD[None, start : start + step])[0].float()
        labels_C = labels_T[start : start + step]
        logprobs_C = logits_TV.log_softmax(dim=-1).gather(1, labels_C[:, None])[:, 0]
        parts.append(torch.stack([logprobs_C.double(), (logits_TV.argmax(dim=-1) == labels_C).double()]))
    found_2BS = torch.cat(parts, dim=1).view(2, len(tokens_BS), -1)
    return found_2BS.transpose(0, 1).flatten(1)
