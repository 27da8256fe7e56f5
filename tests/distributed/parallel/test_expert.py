"""A MoE layer over several ranks equals the same layer on one process: outputs and every gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron.optimus import ops
from megatron.optimus.config.schema import (
    ExpertPlacement,
    LoadBalancing,
    ModelConfig,
    ParallelConfig,
    TokenDispatcherType,
)
from megatron.optimus.moe.dispatch.all_gather import AllGatherDispatcher
from megatron.optimus.moe.layer import MoE
from megatron.optimus.parallel.expert import apply_expert_parallelism
from megatron.optimus.parallel.recompute import recompute_forward
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.metrics import Recorder
from megatron.optimus.platform.ranks import Ranks
from tests.helpers import run_distributed

WIDTH, EXPERTS, TOPK = 16, 12, 3


def model_config(**changes: Any) -> ModelConfig:
    return ModelConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        vocab_size=32,
        num_experts=EXPERTS,
        moe_ffn_hidden_size=10,
        moe_router_topk=TOPK,
        moe_router_load_balancing_type=LoadBalancing.GLOBAL_AUX_LOSS,
        **changes,
    )


SHARED = dict(moe_shared_expert_intermediate_size=14, moe_shared_expert_gate=True)


def serial_layer(skew: float, *, shared: bool = False) -> MoE:
    """Same weights on every caller. A large skew sends every token to expert 5 first and leaves others empty."""
    torch.manual_seed(3)
    layer = MoE(model_config(**SHARED if shared else {}))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    layer.router.weight.data[5] += skew
    return layer


def tokens_of(rank: int, counts: Sequence[int]) -> torch.Tensor:
    torch.manual_seed(100 + rank)
    return torch.rand(1, counts[rank], WIDTH)  # positive, so that a positive skew makes the logit of expert 5 large


def backward(layer: MoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and slots routed here less those that experts of this rank processed."""
    recorder = Recorder(Ranks.alone())
    with recorder.recording():
        y, _ = layer(x)
    target = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)
    (y * target).sum().backward()
    return y.detach(), recorder.values["dropped_tokens"]


class Case(NamedTuple):
    kind: TokenDispatcherType
    placement: ExpertPlacement
    ep: int
    counts: tuple[int, ...]  # tokens of each rank
    skew: float = 0.0
    node: int | None = None  # ranks of a node
    chunks: int = 1
    halves: bool = False  # experts whose backward has two halves, so that gradients are combined beside the second
    main_grads: bool = False
    shared: bool = False  # experts that every token passes, with a gate
    recompute: bool = False


def one_rank(rank: int, world: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [run_case(rank, world, case) for case in cases]


def run_case(rank: int, world: int, case: Case) -> dict[str, Any]:
    config = ParallelConfig(
        expert_model_parallel_size=case.ep,
        moe_token_dispatcher_type=case.kind,
        moe_expert_placement=case.placement,
        moe_hierarchical_node_size=case.node,
        moe_dispatch_chunks=case.chunks,
    )
    mesh = Mesh(config, rank=rank, world_size=world)
    layer = serial_layer(case.skew, shared=case.shared)
    apply_expert_parallelism(layer, config, mesh)
    if isinstance(layer.dispatcher, AllGatherDispatcher):
        layer.dispatcher.equal_tokens = len(set(case.counts)) == 1
    if case.recompute:
        layer.experts.forward = recompute_forward(layer.experts.forward)  # type: ignore[method-assign]
    for weight in layer.experts.parameters() if case.main_grads else ():
        weight.main_grad, weight.main_grad_ready = torch.zeros_like(weight), lambda: None  # type: ignore[attr-defined]
    x = tokens_of(rank, case.counts).requires_grad_()
    ops.set_backend("reference" if case.halves else "auto")
    y, dropped = backward(layer, x)
    dense_grads = {name: p.grad.clone() for name, p in layer.named_parameters() if not name.startswith("experts.")}
    for grad in dense_grads.values():
        dist.all_reduce(grad)
    expert_grads = {}
    for name, weight in layer.experts.named_parameters():
        assert (weight.grad is None) is case.main_grads
        grad = (weight.main_grad if case.main_grads else weight.grad).clone()
        if mesh.group("edp") is not None:
            dist.all_reduce(grad, group=mesh.group("edp"))
        expert_grads[name] = dict(zip(weight.expert_ids, grad, strict=True))
    dist.all_reduce(dropped)
    return dict(y=y, x_grad=x.grad, dense=dense_grads, experts=expert_grads, dropped=int(dropped))


COUNTS = {
    "even": ((6, 6, 6, 6), 0.0),
    "one expert takes all tokens": ((6, 6, 6, 6), 30.0),
    "uneven, one rank without tokens": ((5, 0, 9, 1), 0.0),
    "uneven and skewed": ((0, 7, 0, 2), 30.0),
}
PLAIN = (TokenDispatcherType.ALLGATHER, TokenDispatcherType.ALLTOALL)
HIERARCHICAL = TokenDispatcherType.HIERARCHICAL
HOW = {
    "halves": dict(halves=True),
    "main gradients": dict(main_grads=True),
    "halves, main gradients, recomputed": dict(halves=True, main_grads=True, recompute=True),
    "halves, recomputed": dict(halves=True, recompute=True),
}
CASES = {
    4: {
        f"{kind.value}, {placement.value}, ep {ep}, {what}": Case(
            kind, placement, ep, counts, skew, node, shared=placement is ExpertPlacement.INTERLEAVED
        )
        for what, (counts, skew) in COUNTS.items()
        for placement in ExpertPlacement
        for kind, ep, node in [*((plain, ep, None) for plain in PLAIN for ep in (2, 4)), (HIERARCHICAL, 4, 2)]
    }
    | {
        f"{kind.value}, {chunks} chunks, {what}, {how}": Case(
            kind, ExpertPlacement.INTERLEAVED, 4, *COUNTS[what], node=node, chunks=chunks, **changes
        )
        for how, changes in HOW.items()
        for what in ("even", "uneven and skewed")
        for kind, node, chunks in [
            *((plain, None, 1) for plain in PLAIN),
            (PLAIN[1], None, 2),
            (HIERARCHICAL, 2, 1),
        ]
    },
    3: {
        f"all-to-all in {chunks} chunks, {what}": Case(
            TokenDispatcherType.ALLTOALL,
            ExpertPlacement.INTERLEAVED,
            3,
            counts,
            skew,
            chunks=chunks,
            shared=chunks == 2,
        )
        for what, counts, skew in [("uneven", (5, 0, 3), 0.0), ("skewed", (2, 7, 1), 30.0)]
        for chunks in (2, 3)
    },
    6: {
        f"hierarchical, {placement.value}, nodes of {node}, {what}": Case(
            HIERARCHICAL, placement, 6, counts, skew, node
        )
        for what, counts, skew in [("uneven", (3, 0, 5, 2, 0, 1), 0.0), ("skewed", (0, 4, 4, 0, 0, 2), 30.0)]
        for placement in ExpertPlacement
        for node in (2, 3)
    },
}


@pytest.fixture(scope="module", params=CASES)
def results(request: pytest.FixtureRequest) -> tuple[dict[str, Case], list[list[dict[str, Any]]]]:
    """All cases of so many ranks, in one start of them."""
    cases = CASES[request.param]
    return cases, run_distributed(one_rank, request.param, list(cases.values()))


def test_equals_one_process(results: tuple[dict[str, Case], list[list[dict[str, Any]]]]) -> None:
    cases, of_ranks = results
    for number, (what, case) in enumerate(cases.items()):
        layer = serial_layer(case.skew, shared=case.shared)
        seen = set()
        inputs = [tokens_of(rank, case.counts).requires_grad_() for rank in range(len(case.counts))]
        outputs = [backward(layer, x)[0] for x in inputs]
        for rank, result in enumerate(own[number] for own in of_ranks):

            def equal(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5, label: str = what) -> None:
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=atol, msg=lambda text: f"{label}: {text}")

            equal(result["y"], outputs[rank])
            equal(result["x_grad"], inputs[rank].grad)
            assert len(result["dense"]) == (5 if case.shared else 1)
            for name, grad in result["dense"].items():
                equal(grad, layer.get_parameter(name).grad, 1e-4)
            assert result["dropped"] == 0, what
            for name, grads in result["experts"].items():
                whole = getattr(layer.experts, name).grad
                for expert, grad in grads.items():
                    equal(grad, whole[expert], 1e-4)
                    seen.add(expert)
        assert seen == set(range(EXPERTS)), what


def auxiliary_rank(rank: int, world: int) -> torch.Tensor:
    config = ParallelConfig(expert_model_parallel_size=2)
    layer = serial_layer(0.0)
    apply_expert_parallelism(layer, config, Mesh(config, rank=rank, world_size=world))
    losses = layer(tokens_of(rank, [6] * world))[1]
    (losses.aux_loss + losses.z_loss).backward()
    grad = layer.router.weight.grad
    dist.all_reduce(grad)
    return torch.cat([losses.aux_loss.detach().view(1), (grad / world).flatten()])


def test_global_balancing_loss_is_that_of_the_whole_batch() -> None:
    """Mean over ranks of the losses, and their gradient, equal one process that sees all tokens."""
    layer = serial_layer(0.0)
    losses = layer(torch.cat([tokens_of(rank, [6] * 4) for rank in range(4)]))[1]
    (losses.aux_loss + losses.z_loss).backward()
    results = run_distributed(auxiliary_rank, 4)
    torch.testing.assert_close(results[0][1:], layer.router.weight.grad.flatten(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.stack(results)[:, 0].mean(), losses.aux_loss.detach())
