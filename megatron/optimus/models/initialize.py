"""Draws initial weights that depend on the seed and the parameter's name only, never on the layout of ranks.

Each weight draws from a generator of its own on the CPU; each expert of a 3-D expert weight from one keyed by the
expert's global number. A rank that holds a part draws the whole and keeps its part. So any device and any tensor- or
expert-parallel size starts from the same model, and a rank's CPU threads draw several weights side by side.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.optimus.config.parametrization import initial_scale
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.partition import local_shard_of, whole_shape
from megatron.optimus.platform.seeding import generator_for


@torch.no_grad()
def initialize_weights(model: Decoder, *, seed: int, device: torch.device, dtype: torch.dtype) -> None:
    """Materialises a model built on the meta device and draws its weights; buffers are 0.

    Parameters get ``dtype`` (drawn in fp32, then rounded); buffers keep theirs. On the meta device nothing is drawn.
    """
    materialize(model, device, dtype)
    if device.type != "meta":
        draw_weights(model, seed)


@torch.no_grad()
def draw_weights(model: Decoder, seed: int) -> None:
    """Sets all parameters to initial values: matrices N(0, init_method_std^2), norm scales 1, biases 0.

    With muP or CompleteP standard deviations and norm scales have a factor (config/parametrization.py). The number of
    torch's CPU threads changes the time, not the weights.
    """
    draws: list[_Draw] = []
    for name, parameter in model.named_parameters():
        scale = initial_scale(model.config, name, parameter.dim())
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else scale)
        else:
            draws += _draws(name, parameter, model.config.init_method_std * scale)
    threads = torch.get_num_threads()
    # The largest first, so that no thread begins a long one when the others are done. Each works alone: torch would
    # start a team of threads for every one of them.
    draws.sort(key=lambda draw: math.prod(draw.shape), reverse=True)
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            list(pool.map(lambda draw: draw.fill(seed), draws))
        finally:
            torch.set_num_threads(threads)


class _Draw(NamedTuple):
    """One weight to draw: all of a matrix, or that of one expert."""

    weight: Tensor  # this rank's part
    parameter: nn.Parameter
    key: tuple[str, ...]
    shape: tuple[int, ...]  # of the whole matrix
    std: float

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        whole = torch.empty(self.shape, dtype=torch.float32)
        whole.normal_(0.0, self.std, generator=generator_for(seed, *self.key))
        part = local_shard_of(whole, self.parameter, dropped_dims=self.parameter.dim() - whole.dim())
        self.weight.copy_(part)


def materialize(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Allocates the weights of a model built on the meta device, without values, and its buffers as zeros.

    Like ``to_empty``, but keeps parameters shared between modules shared, and their attributes (expert_ids).

    Args:
        model: this rank's part; changed in place.
        device: where the weights are to be.
        dtype: of the parameters; buffers keep theirs.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                empty = nn.Parameter(torch.empty(parameter.shape, device=device, dtype=dtype))
                empty.__dict__.update(parameter.__dict__)
                made[id(parameter)] = empty
            setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros(buffer.shape, device=device, dtype=buffer.dtype))


def _draws(name: str, parameter: nn.Parameter, std: float) -> list[_Draw]:
    shape = whole_shape(parameter)
    if parameter.dim() < 3:
        return [_Draw(parameter, parameter, (name,), shape, std)]
    expert_ids = getattr(parameter, "expert_ids", range(parameter.shape[0]))
    return [
        _Draw(parameter[row], parameter, (name, str(expert)), shape[1:], std) for row, expert in enumerate(expert_ids)
    ]
