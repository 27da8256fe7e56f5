"""Runs a tiny model at a layout of ranks and in one process, and compares losses, logits and every gradient.

A case is (model options, parallel options). All cases of a file run in one group of ranks, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.optimus.config.schema import ConfigError, LoadBalancing, ModelConfig, ParallelConfig, PipelineSchedule
from megatron.optimus.layers import NO_LABEL
from megatron.optimus.layers.documents import Documents
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights
from megatron.optimus.models.partition import block_of, local_shard_of, whole_shape
from megatron.optimus.parallel import recompute
from megatron.optimus.parallel.apply import parallelize
from megatron.optimus.parallel.context import own_positions
from megatron.optimus.parallel.pipeline import check_torch_version
from megatron.optimus.parallel.tensor import register_gradient_sums
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.seeding import generator_for
from tests.helpers import run_distributed

BATCH, LENGTH, VOCAB = 2, 16, 48
AUX, Z = 0.7, 0.05  # large, so that an error in them is no rounding


class Case(NamedTuple):
    model: dict[str, Any]
    parallel: dict[str, Any]
    documents: bool = False  # several to a sequence, positions counted in each, some labels masked


class Result(NamedTuple):
    losses: Tensor  # cross-entropy per token, auxiliary loss, z-loss: of the global batch
    logits: Tensor | None
    grads: dict[str, Tensor]


def model_config(options: Mapping[str, Any]) -> ModelConfig:
    sizes: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=4,
        ffn_hidden_size=24,
        vocab_size=VOCAB,
        init_method_std=0.2,
        output_z_loss_coeff=0.02,  # enters gradients only
        moe_ffn_hidden_size=12,
        moe_router_topk=2,
    )
    return ModelConfig(**(sizes | dict(options)))


def build(options: Mapping[str, Any], mesh: Mesh | None, parallel: ParallelConfig) -> Decoder:
    with torch.device("meta"):
        model = Decoder(model_config(options))
    if mesh is not None:
        parallelize(model, mesh, parallel, LENGTH)
    initialize_weights(model, seed=3, device=torch.device("cpu"), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # ones would hide a norm that uses another's scale
            middle = 0.0 if name.endswith("bias") else 1.0
            whole = middle + 0.3 * torch.randn(whole_shape(parameter), generator=generator_for(7, name))
            parameter.data.copy_(local_shard_of(whole, parameter))
    if mesh is not None:
        register_gradient_sums(model, mesh)
    return model


def batch_of(dp: int) -> tuple[Tensor, Tensor]:
    window = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(50 + dp))
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def documents_of(dp: int) -> tuple[Documents, Tensor]:
    """Two sequences with documents that end at and beside the borders of the ranks' pieces; positions in documents."""
    starts = [[1, 4, 5, 11], [8]] if dp % 2 == 0 else [[], [2, 12, 15]]
    positions = torch.stack(
        [torch.tensor([s - max([0, *[x for x in own if x <= s]]) for s in range(LENGTH)]) for own in starts]
    )
    return Documents.from_starts(starts, LENGTH), positions


def inputs_of(dp: int, case: Case) -> tuple[Tensor, Tensor, Documents | None, Tensor | None]:
    tokens, labels = batch_of(dp)
    if not case.documents:
        return tokens, labels, None, None
    labels[0, 3] = labels[1, 7] = NO_LABEL
    return tokens, labels, *documents_of(dp)


def objective(output: Any, num_tokens: int) -> Tensor:
    return output.loss_sum / num_tokens + AUX * output.aux_loss + Z * output.z_loss


def serial(case: Case, dp: int) -> Result:
    """One process with the batches of all data-parallel ranks: together, or one by one if balancing is per batch."""
    model = build(case.model, None, ParallelConfig())
    batches = [inputs_of(index, case) for index in range(dp)]
    with torch.no_grad():
        logits = torch.cat([model(tokens, None, *others).logits_BSV for tokens, _, *others in batches])
    if model.config.moe_router_load_balancing_type is LoadBalancing.GLOBAL_AUX_LOSS:
        batches = [(torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches]), None, None)]
    losses = torch.zeros(3)
    for tokens, labels, *others in batches:
        output = model(tokens, labels, *others)
        (objective(output, labels.numel()) / len(batches)).backward()
        values = torch.stack((output.loss_sum.detach() / labels.numel(), output.aux_loss.detach(), output.z_loss))
        losses += values.detach() / len(batches)
    return Result(losses, logits, {name: p.grad for name, p in model.named_parameters()})


def one_rank(rank: int, world: int, cases: dict[str, Case]) -> dict[str, dict[str, float]]:
    return {name: run_case(rank, world, case) for name, case in cases.items()}


def run_case(rank: int, world: int, case: Case) -> dict[str, float]:
    """Deviation of each tensor on this rank from one process."""
    recompute.MIN_OFFLOADED_BYTES = 1
    config = ParallelConfig(**case.parallel)
    mesh = Mesh(config, rank=rank, world_size=world)
    model = build(case.model, mesh, config)
    tokens, labels, documents, places = inputs_of(mesh.index("dp"), case)
    positions = own_positions(LENGTH, config, mesh)
    if positions is None:
        positions = torch.arange(LENGTH)
    elif places is None:
        places = torch.arange(LENGTH).expand_as(tokens)
    tokens, labels = tokens[:, positions], labels[:, positions]
    places = None if places is None else places[:, positions]
    with torch.no_grad():
        logits = model(tokens, None, documents, places).logits_BSV
    output = model(tokens, labels, documents, places)
    objective(output, labels.numel()).backward()
    losses = torch.stack((output.loss_sum.detach() / labels.numel(), output.aux_loss.detach(), output.z_loss.detach()))
    _average(losses, mesh, "stage", mesh.size("stage"))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        _average(parameter.grad, mesh, "edp" if hasattr(parameter, "expert_ids") else "dense", mesh.size("dense"))
    expected = serial(case, mesh.size("dp"))
    wanted = {name: part_of(expected.grads[name], p) for name, p in model.named_parameters()}
    rows = slice(mesh.index("dp") * BATCH, (mesh.index("dp") + 1) * BATCH)
    deviations = {name: deviation(p.grad, wanted[name]) for name, p in model.named_parameters()}
    deviations["logits"] = deviation(logits, expected.logits[rows][:, positions])
    deviations["losses"] = deviation(losses, expected.losses, each=True)
    return deviations


def refusal(schedule: PipelineSchedule, num_micro_batches: int = 8, num_stages: int = 1) -> str | None:
    """Why this version of torch cannot run a schedule, as the program says it; None if it can."""
    try:
        check_torch_version(schedule, num_micro_batches, num_stages)
    except ConfigError as error:
        return str(error)
    return None


def part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """The part of a whole gradient that belongs to this rank's parameter."""
    if hasattr(parameter, "expert_ids"):
        whole = whole[list(parameter.expert_ids)]
    if not hasattr(parameter, "partition_dim"):
        return whole
    index, count = parameter.partition_index, parameter.partition_count
    return block_of(whole, parameter.partition_dim, index, count, parameter.partition_stride)


def deviation(actual: Tensor, expected: Tensor, each: bool = False) -> float:
    """Largest difference relative to the largest expected value (or to each value)."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    scale = expected.abs() if each else expected.abs().max()
    difference = (actual - expected).abs() / scale.clamp(min=1e-30)
    return 0.0 if not expected.any() and not actual.any() else difference.max().item()


def _average(tensor: Tensor, mesh: Mesh, axis: str, divisor: int) -> None:
    if mesh.group(axis) is not None:
        dist.all_reduce(tensor, group=mesh.group(axis))
    tensor /= divisor


def deviations(world: int, cases: dict[str, Case]) -> dict[str, dict[str, float]]:
    """Case -> tensor -> largest deviation over the ranks."""
    results = run_distributed(one_rank, world, cases)
    return {
        case: {name: max(result[case].get(name, 0.0) for result in results) for name in results[0][case]}
        for case in cases
    }
