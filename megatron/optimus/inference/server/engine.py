"""Computes the steps of the server on all ranks: rank 0 decides, the others follow.

All ranks compute the same tokens, so that a model that does not fit one device can be served.

Shapes: R rows of a step whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.optimus.inference.load import TextModel
from megatron.optimus.inference.server.paged_cache import PAGE_TOKENS, Chunk, PagedCache
from megatron.optimus.layers.loss import CHUNK_ELEMENTS
from megatron.optimus.platform.ranks import Ranks

# Ranks that wait for rank 0 longer than a collective's limit (10 minutes) would take it for lost.
IDLE_SECONDS = 60.0


class Engine:
    """The model with its paged cache."""

    def __init__(self, loaded: TextModel, ranks: Ranks, pages: int) -> None:
        """Makes an empty cache.

        Args:
            loaded: this rank's part of the model.
            ranks: all ranks.
            pages: number of the cache's pages.
        """
        self.loaded, self.pages, self._ranks = loaded, pages, ranks
        self._cache = PagedCache(loaded.model, pages, loaded.device)
        self._routed: list[Tensor] | None = None  # experts of the tokens of a step, one [T, K] a MoE layer
        self.moe_layers = [number for number, block in enumerate(loaded.model.layers) if block.is_moe]
        for layer in loaded.model.moe_layers():
            layer.router.register_forward_hook(self._keep_experts)

    @property
    def is_alone(self) -> bool:
        """Whether one rank holds the whole model."""
        return self._ranks.size == 1

    def _keep_experts(self, router: object, inputs: object, output: tuple) -> None:
        if self._routed is not None:
            self._routed.append(output[0].indices_TK)

    def compute(
        self, chunks: Sequence[Chunk], wanted: Sequence[range], with_experts: bool = False
    ) -> tuple[Iterator[Tensor], list[list[list[list[int]]]]]:
        """Computes one step on all ranks. Called on rank 0.

        Args:
            chunks: the next tokens of some sequences.
            wanted: of each chunk, the tokens whose logits are wanted.
            with_experts: whether to tell the experts of all tokens.

        Returns:
            Logits [R, V] of the wanted tokens in their order, in pieces, which must all be taken; and for each chunk
            the expert ids by token, MoE layer and choice.
        """
        self._announce([[list(chunk.tokens), chunk.start, list(chunk.pages)] for chunk in chunks], wanted)
        return self._compute(chunks, wanted, with_experts)

    @torch.inference_mode()
    def _compute(
        self, chunks: Sequence[Chunk], wanted: Sequence[range], with_experts: bool = False
    ) -> tuple[Iterator[Tensor], list[list[list[list[int]]]]]:
        self._routed = [] if with_experts and self.moe_layers else None
        x_TD, rows = self._cache.forward(chunks)
        experts: list[list[list[list[int]]]] = []
        if self._routed is not None:
            of_tokens = torch.stack(self._routed, dim=1).tolist()
            experts = [of_tokens[place] for place in rows]
        places = [place.start + number for place, numbers in zip(rows, wanted, strict=True) for number in numbers]
        x_RD = (
            x_TD
            if places == list(range(len(x_TD)))
            else x_TD[torch.tensor(places, dtype=torch.int64, device=x_TD.device)]
        )
        return self._logits(x_RD), experts

    def _logits(self, x_RD: Tensor) -> Iterator[Tensor]:
        for x_CD in x_RD.split(max(1, CHUNK_ELEMENTS // self.loaded.config.vocab_size)):
            if len(x_CD):
                with torch.inference_mode():
                    logits_CV = self.loaded.logits(x_CD[None])[0].float()
                yield logits_CV

    def warm_up(self) -> None:
        """Computes one token: allocates the cache and prepares the kernels before the first request."""
        logits, _ = self.compute([Chunk([self.loaded.tokenizer.eod_id], 0, [0])], [range(1)])
        for _ in logits:
            pass

    def idle(self) -> None:
        """Sends the other ranks an empty step, so that their wait for rank 0 does not time out."""
        self._announce([], [])

    def stop(self) -> None:
        """Lets the other ranks return from ``follow``."""
        self._announce(None, [])

    def _announce(self, chunks: list | None, wanted: Sequence[range]) -> None:
        if not self.is_alone:
            plan = [chunks, [[one.start, one.stop] for one in wanted]]
            self._ranks.broadcast_bytes(json.dumps(plan).encode())

    def follow(self) -> None:
        """Computes the steps of rank 0 until it calls ``stop``. Called on the other ranks."""
        while True:
            chunks, wanted = json.loads(self._ranks.broadcast_bytes(b""))
            if chunks is None:
                return
            if chunks:
                logits, _ = self._compute([Chunk(*chunk) for chunk in chunks], [range(*one) for one in wanted])
                for _ in logits:
                    pass

    @staticmethod
    def bytes_of_page(loaded: TextModel) -> int:
        """Returns the bytes of one page of the cache on this rank."""
        config = loaded.config
        heads = max(1, config.num_kv_heads // loaded.mesh.size("tp"))
        element = loaded.model.embedding.weight.element_size()
        return 2 * config.num_layers * heads * config.head_dim * element * PAGE_TOKENS
