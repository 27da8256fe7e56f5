"""Context parallelism: the c ranks of a group share each sequence, and each has 1/c of its positions.

All but attention works on each position alone. Attention brings positions together in one of two ways.

Ulysses (arXiv 2309.14509): an all-to-all turns some positions of all heads into all positions of some heads, the serial
attention runs on these, and a second all-to-all returns its result. Ranks have consecutive positions. Where the query
heads divide over the ranks but the key/value heads do not, these are repeated first, which sends them more than once.

Ring attention (arXiv 2310.01889, balanced as in arXiv 2311.09431; ring_attention.py): queries stay, keys and values
travel round the ranks. Rank r has the r-th and the r-th last of 2c pieces of the sequence, so every rank has the same
work under the causal mask.

RoPE is applied before either, with the positions of this rank's tokens; documents are those of whole sequences.

Gradients: the loss of a rank is the mean over its own tokens. The exchange of attention is part of autograd, so a
weight's gradient on a rank holds what reaches it from all ranks' losses, and the average over the group is the gradient
of the mean over all tokens.

Shapes: B sequences, S positions of a rank, H query heads, G key/value heads, d head width, c ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.optimus.config.schema import ContextCommunication, ParallelConfig
from megatron.optimus.layers.attention import causal_attention
from megatron.optimus.layers.documents import Documents
from megatron.optimus.models.decoder import Block, Decoder
from megatron.optimus.parallel.ring_attention import RingAttention
from megatron.optimus.platform.collectives import all_to_all_rows
from megatron.optimus.platform.mesh import Mesh


def own_positions(length: int, config: ParallelConfig, mesh: Mesh) -> Tensor | None:
    """Positions of a sequence that this rank has.

    Args:
        length: tokens of the whole sequence.
        config: the kind of context parallelism.
        mesh: this rank's index on axis "cp".

    Returns:
        int64 positions in the order in which the rank has them; None where it has all of them.
    """
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
    """Ulysses as an attention's ``core_attention``."""

    group: dist.ProcessGroup
    size: int

    def __call__(self, q_BHSd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, documents: Documents | None) -> Tensor:
        groups = k_BGSd.shape[1]
        repeats = math.lcm(groups, self.size) // groups
        if repeats > 1:
            k_BGSd, v_BGSd = (x.repeat_interleave(repeats, dim=1) for x in (k_BGSd, v_BGSd))
        widths = [x.shape[1] // self.size for x in (q_BHSd, k_BGSd, v_BGSd)]
        # One exchange for all three: [c, heads of a rank, B, S, d], of which block r of dim 0 goes to rank r.
        parts = [x.unflatten(1, (self.size, -1)).permute(1, 2, 0, 3, 4) for x in (q_BHSd, k_BGSd, v_BGSd)]
        received = self._exchange(torch.cat(parts, dim=1))
        q, k, v = received.permute(2, 1, 0, 3, 4).flatten(2, 3).split(widths, dim=1)  # [B, heads, c * S, d]
        out = causal_attention(q, k, v, documents)
        blocks = out.unflatten(2, (self.size, -1)).permute(2, 1, 0, 3, 4)
        return self._exchange(blocks).flatten(0, 1).transpose(0, 1)

    def _exchange(self, x: Tensor) -> Tensor:
        return all_to_all_rows(x, [1] * self.size, [1] * self.size, self.group)


def apply_context_parallelism(model: Decoder, config: ParallelConfig, mesh: Mesh) -> None:
    """Replaces the core attention of every layer. config/checks.py refuses sizes that do not divide."""
    group = mesh.group("cp")
    if group is None:
        return
    model.sequence_shards = mesh.size("cp")
    is_ring = config.cp_comm_type is ContextCommunication.P2P
    core_attention = RingAttention(group) if is_ring else UlyssesAttention(group, mesh.size("cp"))
    for block in model.layers:
        assert isinstance(block, Block)
        block.attention.core_attention = core_attention
