"""Public operations of the models. Each checks its arguments and runs on the backend chosen for its device and dtype.

| operation | what it computes |
|---|---|
| ``moe_mlp`` | all SwiGLU experts of a layer on all their tokens |
| ``route`` | a linear router: logits, scores and the K experts of each token |
| ``expert_counts`` | the number of slots of each expert |
| ``router_statistics`` | what losses and metrics need of a router: counts, mean shares, z-loss, entropy |
| ``copy_rows``, ``sum_copies`` | rows copied to several positions, and the sum of a row's copies |
| ``rms_norm``, ``add_rms_norm`` | RMSNorm; x + y and its norm |
| ``norm_rotate`` | RMSNorm of queries and keys, with the rotary embedding |
| ``linears`` | products of one input with several weights |
| ``largest_logits`` | the largest attention logit of each head |
| ``rotate``, ``silu_mul`` | rotary embedding; SwiGLU of a dense MLP |
| ``log_sum_exp``, ``cross_entropy_gradient_`` | the two passes of cross-entropy over the logits |

``set_backend`` chooses the implementation (backend.py); by default the fastest one present. reference.py specifies each
operation in plain PyTorch, and its legend says what the letters in shapes mean. main_grads.py says how a backward adds
weight gradients to the optimizer's buffers.
"""

from megatron.optimus.ops.attention_logits import largest_logits
from megatron.optimus.ops.backend import Backend, BackendUnavailableError, get_backend, resolve, set_backend
from megatron.optimus.ops.elementwise import (
    cross_entropy_gradient_,
    keeps_16_bits,
    log_sum_exp,
    rotate,
    silu_mul,
)
from megatron.optimus.ops.fused_moe import InputGradients, moe_mlp, prefers_main_grads
from megatron.optimus.ops.linear import linears
from megatron.optimus.ops.main_grads import MainGrad, main_grad_of
from megatron.optimus.ops.norm import add_rms_norm, norm_rotate, rms_norm
from megatron.optimus.ops.reference import RouterStatistics, Routing
from megatron.optimus.ops.router import expert_counts, route
from megatron.optimus.ops.router_statistics import router_statistics
from megatron.optimus.ops.row_copies import copy_rows, sum_copies

__all__ = [
    "Backend",
    "BackendUnavailableError",
    "InputGradients",
    "MainGrad",
    "RouterStatistics",
    "Routing",
    "add_rms_norm",
    "copy_rows",
    "cross_entropy_gradient_",
    "expert_counts",
    "get_backend",
    "keeps_16_bits",
    "largest_logits",
    "linears",
    "log_sum_exp",
    "main_grad_of",
    "moe_mlp",
    "norm_rotate",
    "prefers_main_grads",
    "resolve",
    "rms_norm",
    "rotate",
    "route",
    "router_statistics",
    "set_backend",
    "silu_mul",
    "sum_copies",
]
