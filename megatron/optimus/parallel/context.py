"""Context parallelism: the ranks of a group share each sequence, each of them has the c-th part of its positions.

All but attention works on positions alone. Attention brings positions together in one of two ways.

Ulysses (arXiv 2309.14509): an all-to-all turns some positions of all heads into all positions of some heads, attention
is the serial one, and a second all-to-all turns its result back. Ranks have consecutive positions. Where the query
heads divide over the ranks but the key/value heads do not, these are repeated first, which sends them more than once.

Ring attention (arXiv 2310.01889, balanced as in arXiv 2311.09431) is in ring.py: queries stay, keys and values go
round. Rank r has the r-th and the r-th last of 2c pieces of the sequence, so every rank has the same work under the
causal mask.

RoPE is applied before either, with the positions of the tokens at hand; documents are those of whole sequences.

Gradients: the loss of every rank is the mean over its own tokens, and the exchange makes a weight's gradient on a rank
that of all ranks' losses as far as they reach it; averaging over the group then gives the mean over all tokens.

Shapes: B sequences, S positions of a rank, H query heads, G key/value heads, d head width, c ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.optimus.config.schema import ContextCommunication, ParallelConfig
from megatron.optimus.layers.attention import Attention, causal_attention
from megatron.optimus.layers.documents import Documents
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.parallel.ring_attention import RingAttention
from megatron.optimus.platform.collectives import all_to_all_rows
from megatron.optimus.platform.mesh import Mesh


def own_positions(length: int, config: ParallelConfig, mesh: Mesh) -> Tensor | None:
    """Positions of a sequence of ``length`` that this rank has, in its order: int64; None when it has all of them."""
    size, index = mesh.size("cp"), mesh.index("cp")
    if size == 1:
        return None
    positions = torch.arange(length)
    if config.cp_comm_type is ContextCommunication.A2A:
        return positions.chunk(size)[index]
    pieces = positions.chunk(2 * size)
    return torch.cat((pieces[index], pieces[2 * size - 1 - index]))


@dataclass(frozen=True)
class UlyssesAttention:
    """Causal attention of this rank's positions; see the top of the file."""

    group: dist.ProcessGroup
    size: int

    def __call__(self, q_BHSd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, documents: Documents | None) -> Tensor:
        groups = k_BGSd.shape[1]
        repeats = math.lcm(groups, self.size) // groups
        if repeats > 1:
            k_BGSd, v_BGSd = (x.repeat_interleave(repeats, dim=1) for x in (k_BGSd, v_BGSd))
        widths = [x.shape[1] // self.size for x in (q_BHSd, k_BGSd, v_BGSd)]
        # One exchange for all three: [c, heads of a rank, B, S, d], blocks of dim 0 go to their ranks.
        parts = [x.unflatten(1, (self.size, -1)).permute(1, 2, 0, 3, 4) for x in (q_BHSd, k_BGSd, v_BGSd)]
        here = self._exchange(torch.cat(parts, dim=1))
        q, k, v = here.permute(2, 1, 0, 3, 4).flatten(2, 3).split(widths, dim=1)  # [B, heads, c * S, d]
        out = causal_attention(q, k, v, documents)
        blocks = out.unflatten(2, (self.size, -1)).permute(2, 1, 0, 3, 4)
        return self._exchange(blocks).flatten(0, 1).transpose(0, 1)

    def _exchange(self, x: Tensor) -> Tensor:
        return all_to_all_rows(x, [1] * self.size, [1] * self.size, self.group)


def apply_context_parallelism(model: Decoder, config: ParallelConfig, mesh: Mesh) -> None:
    """Gives attention its exchange. Sizes that do not divide are refused by config/checks.py."""
    group = mesh.group("cp")
    if group is None:
        return
    model.sequence_shards = mesh.size("cp")
    is_ring = config.cp_comm_type is ContextCommunication.P2P
    attend = RingAttention(group) if is_ring else UlyssesAttention(group, mesh.size("cp"))
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = attend
