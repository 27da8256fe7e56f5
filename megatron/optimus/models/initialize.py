"""Draws initial weights that depend on the seed and the parameter's name only, never on the layout of ranks.

Each weight draws from a generator of its own on the CPU; each expert of a 3-D expert weight from one keyed by the
expert's global number. A rank that holds a part draws the whole and keeps its part, one weight at a time. So any device
and any tensor- or expert-parallel size starts from the same model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.partition import local_shard_of, whole_shape
from megatron.optimus.platform.seeding import generator_for


@torch.no_grad()
def initialize_weights(model: Decoder, *, seed: int, device: torch.device, dtype: torch.dtype) -> None:
    """Materialises a model built on the meta device: matrices N(0, init_method_std^2), norm scales 1, biases 0,
    buffers 0.

    Parameters get ``dtype`` (drawn in fp32, then rounded); buffers keep theirs. On the meta device nothing is drawn.
    """
    _materialize(model, device, dtype)
    if device.type == "meta":
        return
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        shape = whole_shape(parameter)[1 if parameter.dim() == 3 else 0 :]
        for weight, key in _weights_and_keys(name, parameter):
            draw = torch.empty(shape, dtype=torch.float32)
            draw.normal_(0.0, model.config.init_method_std, generator=generator_for(seed, *key))
            weight.copy_(local_shard_of(draw, parameter, dropped_dims=parameter.dim() - draw.dim()))


def _materialize(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Like ``to_empty``, but keeps parameters shared between modules shared, and their attributes (expert_ids)."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                empty = nn.Parameter(torch.empty_like(parameter, device=device, dtype=dtype))
                empty.__dict__.update(parameter.__dict__)
                made[id(parameter)] = empty
            setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros_like(buffer, device=device))


def _weights_and_keys(name: str, parameter: nn.Parameter) -> list[tuple[Tensor, tuple[str, ...]]]:
    if parameter.dim() < 3:
        return [(parameter, (name,))]
    expert_ids = getattr(parameter, "expert_ids", range(parameter.shape[0]))
    return [(parameter[row], (name, str(expert))) for row, expert in enumerate(expert_ids)]
