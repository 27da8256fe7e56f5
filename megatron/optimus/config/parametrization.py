"""muP and CompleteP: how a tensor's initial values, learning rate, weight decay and epsilon grow with width and depth.

A rate that is best for a small base model is then best for the large one too. Sources: Tensor Programs V (arXiv
2203.03466) for the width, CompleteP (arXiv 2505.01618, alpha = 1) for the depth and AdamW's epsilon, arXiv 2508.09752
for routers and experts, arXiv 2310.17813 for Muon's rate.

The papers multiply some outputs in the forward: logits by 1/width, a layer's attention and MLP by 1/depth. Here these
multipliers are part of the weights. A tensor that is multiplied by a, with an optimizer whose update does not depend on
the gradient's scale, trains exactly as one with a times the initial values, a times the rate and epsilon / a. So the
forward, checkpoints, exported models and kernels know nothing of a parametrization.

Factors, with width m = hidden_size / base_hidden_size, depth d = num_layers / base_num_layers (muP: 1), and for each
matrix the growth of its columns (in) and rows (out), which are m, or for an inner width that of ffn_hidden_size or
moe_ffn_hidden_size:

    tensor                            initial values     rate           epsilon
    embedding                         1                  1              1 / m
    hidden matrix                     1 / sqrt(in)       1 / in         1 / (out d)
    last matrix of attention or MLP   1 / (sqrt(in) d)   1 / (in d)     1 / out
    router, gate of shared experts    1 / m              1 / m          1 / d
    norms and biases of layers        1                  1              1 / (m d)
    final norm                        1                  1              1 / m
    head                              1 / m              1 / m          1

A router is treated as the head is: the number of its outputs does not grow with the width. A tied head cannot have
factors of its own; its multiplier 1 / m is part of the final norm's scale. Weight decay is divided by the rate's
factor, so that rate times decay is the same for every tensor. Written without torch, for the planner.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

from megatron.optimus.config.choices import MuonLRAdjustment, OptimizerName, Parametrization
from megatron.optimus.config.schema import ModelConfig, OptimizerConfig

_BRANCH_OUTPUTS = ("o_proj.weight", "down_proj.weight", "experts.down_weight")
# Their update of an element is as large whatever the gradient's scale, as the rates above assume.
ADAM_LIKE = (
    OptimizerName.ADAM,
    OptimizerName.CAUTIOUS_ADAMW,
    OptimizerName.ADEMAMIX,
    OptimizerName.ADOPT,
    OptimizerName.MARS,
    OptimizerName.LION,
)
MUON_LIKE = (OptimizerName.MUON, OptimizerName.NORMUON)


class _Role(Enum):
    EMBEDDING = "embedding"
    HIDDEN = "hidden matrix"
    BRANCH_OUTPUT = "last matrix of attention or MLP"
    READOUT = "router or gate"
    VECTOR = "norm or bias of a layer"
    FINAL_NORM = "final norm"
    HEAD = "head"


class UpdateScaling(NamedTuple):
    """Factors on the options of a tensor's parameter group."""

    lr: float = 1.0
    eps: float = 1.0

    @property
    def weight_decay(self) -> float:
        """Factor on the weight decay; it keeps lr x weight_decay the same for every tensor."""
        return 1 / self.lr


UNSCALED = UpdateScaling()


def initial_scale(model: ModelConfig, name: str, num_dims: int) -> float:
    """Computes the factor on a tensor's initial values: on the standard deviation of a matrix, on a norm's scale of 1.

    Args:
        model: shape and parametrization.
        name: the parameter's in the model, or in a layer.
        num_dims: 1 for a vector.
    """
    if model.parametrization is Parametrization.STANDARD:
        return 1.0
    role, growth_in, _ = _role_and_growth(model, name, num_dims)
    width, depth = _width_and_depth(model)
    return {
        _Role.HIDDEN: 1 / math.sqrt(growth_in),
        _Role.BRANCH_OUTPUT: 1 / math.sqrt(growth_in) / depth,
        _Role.READOUT: 1 / width,
        _Role.HEAD: 1 / width,
        _Role.FINAL_NORM: 1.0 if model.untie_embeddings_and_output_weights else 1 / width,
    }.get(role, 1.0)


def update_scaling(model: ModelConfig, optimizer: OptimizerConfig, name: str, shape: tuple[int, ...]) -> UpdateScaling:
    """Computes the factors on a tensor's learning rate, weight decay and epsilon.

    Args:
        model: shape and parametrization.
        optimizer: which rule holds: Adam's, or Muon's for hidden matrices.
        name: the parameter's in the model, or in a layer.
        shape: of the whole parameter.
    """
    if model.parametrization is Parametrization.STANDARD:
        return UNSCALED
    role, growth_in, growth_out = _role_and_growth(model, name, len(shape))
    width, depth = _width_and_depth(model)
    if optimizer.optimizer in MUON_LIKE and len(shape) > 1 and role not in (_Role.EMBEDDING, _Role.HEAD):
        rows = shape[-2] // (2 if name.endswith("gate_up_weight") else 1)  # two matrices in one tensor
        rate = _muon_rate(optimizer.muon_adjust_lr_fn, (rows, shape[-1]), growth_out, growth_in)
        return UpdateScaling(rate / depth if role is _Role.BRANCH_OUTPUT else rate)
    is_tied = not model.untie_embeddings_and_output_weights
    rate, eps = {
        _Role.EMBEDDING: (1.0, 1 / width),
        _Role.HIDDEN: (1 / growth_in, 1 / (growth_out * depth)),
        _Role.BRANCH_OUTPUT: (1 / (growth_in * depth), 1 / growth_out),
        _Role.READOUT: (1 / width, 1 / depth),
        _Role.VECTOR: (1.0, 1 / (width * depth)),
        _Role.FINAL_NORM: (1 / width, 1.0) if is_tied else (1.0, 1 / width),
        _Role.HEAD: (1 / width, 1.0),
    }[role]
    return UpdateScaling(rate, 1.0 if optimizer.optimizer is OptimizerName.LION else eps)  # Lion has no epsilon


def _muon_rate(adjustment: MuonLRAdjustment, shape: tuple[int, int], growth_out: float, growth_in: float) -> float:
    """The factor on Muon's rate with which an update's spectral norm grows as sqrt(rows / columns), over Muon's own."""

    def own(rows: float, columns: float) -> float:
        if adjustment is MuonLRAdjustment.ORIGINAL:
            return math.sqrt(max(1.0, rows / columns))
        return math.sqrt(max(rows, columns))

    rows, columns = shape
    return math.sqrt(growth_out / growth_in) * own(rows / growth_out, columns / growth_in) / own(rows, columns)


def _width_and_depth(model: ModelConfig) -> tuple[float, float]:
    """Growth of the hidden size, and of the number of layers as far as the parametrization reads it."""
    assert model.base_hidden_size is not None
    return model.hidden_size / model.base_hidden_size, model.num_layers / (model.base_num_layers or model.num_layers)


def _role_and_growth(model: ModelConfig, name: str, num_dims: int) -> tuple[_Role, float, float]:
    """What a parameter is, and by how much its columns and rows have grown since the base model."""
    width, _ = _width_and_depth(model)
    is_inner = "mlp." in name or "experts." in name
    inner = _inner_growth(model, is_expert="experts." in name) if is_inner else width
    found = (_Role.HIDDEN, width, inner)
    if name.endswith("lm_head.weight"):
        found = (_Role.HEAD, width, 1.0)
    elif name.endswith("embedding.weight"):
        found = (_Role.EMBEDDING, width, 1.0)
    elif name.startswith("final_norm."):
        found = (_Role.FINAL_NORM, width, width)
    elif num_dims == 1:
        found = (_Role.VECTOR, width, width)
    elif "router." in name or name.endswith("shared_experts.gate.weight"):
        found = (_Role.READOUT, width, 1.0)
    elif name.endswith(_BRANCH_OUTPUTS):
        found = (_Role.BRANCH_OUTPUT, inner, width)
    return found


def _inner_growth(model: ModelConfig, *, is_expert: bool) -> float:
    """Growth of the inner width of dense MLPs, or of experts; without a base width it is the hidden size's."""
    now, base = model.ffn_hidden_size, model.base_ffn_hidden_size
    if is_expert:
        now, base = model.moe_ffn_hidden_size, model.base_moe_ffn_hidden_size
    return now / base if base else _width_and_depth(model)[0]
