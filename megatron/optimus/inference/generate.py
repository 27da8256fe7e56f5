"""Generation: prompts in batches, the prompt in one forward, then one token a step.

Ranks that share the model's matrices have the same prompts, others have prompts of their own. All take the same steps
until the whole batch is done, since experts of one rank compute tokens of others, and all know what every prompt got.

Shapes: B sequences of this rank, S positions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.inference.cache import KVCache
from megatron.optimus.inference.load import TextModel
from megatron.optimus.inference.sampling import NOT_FINITE, Sampler, Sampling
from megatron.optimus.inference.text import TextStream
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.process_groups import all_gather_single
from megatron.optimus.platform.ranks import REPORTED_BY_ANOTHER_RANK

Show = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """When a completion ends besides at a token that ends texts.

    Raises:
        ConfigError: a value is outside its range.
    """

    max_new_tokens: int = 128
    stops: tuple[str, ...] = ()
    ignore_end: bool = False  # tokens that end texts are tokens as others

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens {self.max_new_tokens} must be 1 or more")
        if "" in self.stops:
            raise ConfigError("--stop is empty; name the text that ends a completion")


@dataclass
class Completion:
    """The completion of a prompt, without the token that ended it; a stop string is cut from the text alone."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of these tokens by the model, in nats, before any filter
    text: str = ""
    finish_reason: str | None = None  # "stop": a token that ends texts, or a stop string; "length"


@dataclass
class Speed:
    """Counts tokens and seconds of the two phases, over all ranks' prompts."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0  # with the first token of each prompt
    new_tokens: int = 0  # but the first of each prompt
    new_seconds: float = 0.0

    def __str__(self) -> str:
        phases = [("prompt", self.prompt_tokens, self.prompt_seconds), ("generated", self.new_tokens, self.new_seconds)]
        return "; ".join(
            f"{name}: {tokens:,} tokens in {seconds:.2f} s ({tokens / seconds:,.0f} tokens/s)"
            for name, tokens, seconds in phases
            if tokens
        )


def check_lengths(prompts: Sequence[Sequence[int]], max_positions: int) -> None:
    """Raises ConfigError for a prompt that leaves no position for a token."""
    for number, prompt in enumerate(prompts, 1):
        if len(prompt) >= max_positions:
            raise ConfigError(
                f"prompt {number} has {len(prompt)} tokens, and the model was trained on {max_positions} positions "
                f"(max_position_embeddings); shorten it to {max_positions - 1} tokens or fewer"
            )


def not_finite(loaded: TextModel) -> ConfigError:
    """Returns the error of logits that are not finite. All ranks raise it alike; rank 0 prints it."""
    error = ConfigError(NOT_FINITE)
    setattr(error, REPORTED_BY_ANOTHER_RANK, loaded.mesh.rank > 0)
    return error


@torch.no_grad()  # not inference_mode: a model in training keeps tensors of its forward
def generate(
    loaded: TextModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    limits: Limits,
    *,
    batch_size: int = 8,
    show: Show | None = None,
    speed: Speed | None = None,
) -> Iterator[Completion]:
    """Generates a completion of every prompt. Collective: all ranks have the same arguments and get the same results.

    Args:
        loaded: model and tokenizer.
        prompts: token ids, at least one each.
        sampling: how tokens are chosen.
        limits: when a completion ends; it also ends at the model's last position.
        batch_size: prompts at a time on each rank that has prompts of its own.
        show: called with each piece of text as soon as it is certain, for a single prompt.
        speed: counts.

    Yields:
        Completions in the order of the prompts, a batch at a time.

    Raises:
        ConfigError: a prompt is too long, or the model's logits are not finite.
    """
    check_lengths(prompts, loaded.config.max_position_embeddings)
    speed = speed or Speed()
    size = batch_size * loaded.mesh.size("dp")
    for first in range(0, len(prompts), size):
        batch = [
            Request(loaded, number, list(prompt), limits, TextStream(loaded.tokenizer, limits.stops), show)
            for number, prompt in enumerate(prompts[first : first + size], first)
        ]
        _complete(loaded, batch, sampling, speed)
        yield from (request.completion for request in batch)


@dataclass
class Request:
    """A prompt whose completion is being generated.

    Attributes:
        number: of the prompt, which its random numbers depend on.
        stream: the text of the tokens so far.
        show: called with each piece of text as soon as it is certain.
    """

    loaded: TextModel
    number: int
    prompt: list[int]
    limits: Limits
    stream: TextStream
    show: Show | None
    completion: Completion = field(default_factory=Completion)

    @property
    def most_tokens(self) -> int:
        """Most tokens of the completion: the limit asked for, or the positions that the prompt leaves."""
        return min(self.limits.max_new_tokens, self.loaded.config.max_position_embeddings - len(self.prompt))

    @property
    def is_done(self) -> bool:
        """Whether the completion has ended."""
        return self.completion.finish_reason is not None

    def add(self, token: int, logprob: float) -> None:
        """Takes the next token, unless the completion has ended."""
        completion = self.completion
        if self.is_done:
            return
        if token in self.loaded.end_ids and not self.limits.ignore_end:
            return self._end("stop")
        completion.token_ids.append(token)
        completion.logprobs.append(logprob)
        self._show(self.stream.add(token))
        if self.stream.stopped:
            self._end("stop")
        elif len(completion.token_ids) == self.most_tokens:
            self._end("length")
        return None

    def _end(self, reason: str) -> None:
        self._show(self.stream.finish())
        self.completion.text = self.stream.text
        # The last characters, which were incomplete until now, may have completed a stop string.
        self.completion.finish_reason = "stop" if self.stream.stopped else reason

    def _show(self, text: str) -> None:
        if self.show is not None and text:
            self.show(text)


def _complete(loaded: TextModel, batch: Sequence[Request], sampling: Sampling, speed: Speed) -> None:
    """Generates until every request of a batch has ended. Collective."""
    mesh, device = loaded.mesh, loaded.device
    own = own_share(batch, mesh)
    width = max(len(request.prompt) for request in batch)  # over all ranks: experts take equally many tokens of each
    paddings = [width - len(request.prompt) for request in own]
    rows = [[0] * padding + request.prompt for padding, request in zip(paddings, own, strict=True)]
    tokens_BS = torch.tensor(rows, device=device)
    capacity = width + max(request.most_tokens for request in batch)
    cache = KVCache(loaded.model, paddings, capacity, device)
    sampler = Sampler(sampling, [request.prompt for request in own], [request.number for request in own])
    is_first = True
    while not all(request.is_done for request in batch):
        began, before = time.perf_counter(), sum(len(request.completion.token_ids) for request in batch)
        logits_BV = loaded.logits(cache.forward(tokens_BS)[:, -1:])[:, 0]
        tokens_B, logprobs_B = sampler.next(logits_BV)
        chosen_B2 = _same_on_tensor_ranks(torch.stack([tokens_B.double(), logprobs_B.double()], dim=1), mesh)
        for request, (token, logprob) in zip(batch, of_all_ranks(chosen_B2, mesh), strict=False):
            if not math.isfinite(logprob):
                raise not_finite(loaded)
            request.add(int(token), logprob)
        tokens_BS = chosen_B2[:, :1].long()
        seconds = time.perf_counter() - began  # the tokens are on the host, so the device is done
        if is_first:
            speed.prompt_tokens += sum(len(request.prompt) for request in batch)
            speed.prompt_seconds += seconds
        else:
            speed.new_tokens += sum(len(request.completion.token_ids) for request in batch) - before
            speed.new_seconds += seconds
        is_first = False


def own_share(batch: Sequence[T], mesh: Mesh) -> list[T]:
    """Returns this rank's items of a batch; the last item is repeated so that every rank has the same number."""
    size, index = mesh.size("dp"), mesh.index("dp")
    share = -(-len(batch) // size)
    return [batch[min(place, len(batch) - 1)] for place in range(index * share, (index + 1) * share)]


def _same_on_tensor_ranks(values: Tensor, mesh: Mesh) -> Tensor:
    """The first tensor-parallel rank's values: another one's sums may differ in their last bits."""
    group = mesh.group("tp")
    if group is not None:
        dist.broadcast(values, group=group, group_src=0)
    return values


def of_all_ranks(values_BN: Tensor, mesh: Mesh) -> list[list[float]]:
    """Rows of all ranks that have prompts of their own, in the order of the prompts."""
    group = mesh.group("dp")
    if group is None:
        return values_BN.tolist()
    all_BN = values_BN.new_empty(mesh.size("dp") * len(values_BN), values_BN.shape[1])
    all_gather_single(all_BN, values_BN.contiguous(), group=group)
    return all_BN.tolist()
