"""What is under way while what is computed: the order in which a MoE layer's exchanges and products are queued."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.optimus import ops
from megatron.optimus.config.schema import ParallelConfig, TokenDispatcherType
from megatron.optimus.moe.dispatch.overlap import AsyncDispatch
from megatron.optimus.moe.experts import SharedExperts
from megatron.optimus.moe.layer import MoE
from megatron.optimus.moe.router import Router
from megatron.optimus.ops import reference
from megatron.optimus.parallel.expert import apply_expert_parallelism
from megatron.optimus.parallel.recompute import recompute_forward
from megatron.optimus.platform import collectives
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.mesh import Mesh
from tests.distributed.parallel.test_expert import SHARED, WIDTH, model_config, tokens_of
from tests.helpers import run_distributed

WORLD = 4
DISPATCHERS = {
    "all-gather": dict(moe_token_dispatcher_type=TokenDispatcherType.ALLGATHER),
    "all-to-all": dict(moe_token_dispatcher_type=TokenDispatcherType.ALLTOALL),
    "in 2 chunks": dict(moe_token_dispatcher_type=TokenDispatcherType.ALLTOALL, moe_dispatch_chunks=2),
    "hierarchical": dict(moe_token_dispatcher_type=TokenDispatcherType.HIERARCHICAL, moe_hierarchical_node_size=2),
}


class Events(list[str]):
    """Names of calls in their order; exchanges of rows as wide as tokens alone."""

    def watch(self, owner: Any, name: str, event: str, rows: int | None = None) -> None:
        """``rows``: which argument has the rows that travel."""
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if rows is not None:  # the library's threads let go of what was sent some time after the wait for it
                assert args[rows].grad_fn is None, f"{name} keeps the graph of what it sends"
            if rows is None or args[rows].shape[1:] == (WIDTH,):
                self.append(event)
            return original(*args, **kwargs)

        setattr(owner, name, watched)


def layer_of(mesh: Mesh, config: ParallelConfig, **changes: Any) -> MoE:
    torch.manual_seed(0)
    layer = MoE(model_config(**changes))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    apply_expert_parallelism(layer, config, mesh)
    return layer


def watched_events() -> Events:
    """Of exchanges and products from now on."""
    events = Events()
    events.watch(collectives, "all_gather_single", "gather", rows=1)
    events.watch(collectives, "reduce_scatter_single", "scatter", rows=1)
    events.watch(collectives.dist, "all_to_all_single", "exchange", rows=1)
    events.watch(Router, "forward", "router")
    events.watch(SharedExperts, "forward", "shared")
    events.watch(reference, "moe_mlp_forward", "forward")
    halves = reference.moe_mlp_backward_inputs, reference.moe_mlp_backward_up_weights

    def whole(dy: torch.Tensor, arguments: Any, saved: Any, buffers: Any, add: Any) -> tuple[torch.Tensor, ...]:
        """As backends of GPUs have one beside the halves."""
        dx, ddown, dweights, pending = halves[0](dy, arguments, saved, buffers[1], add[1])
        return dx, halves[1](arguments, saved, pending, buffers[0], add[0]), ddown, dweights

    reference.moe_mlp_backward = whole  # type: ignore[attr-defined]
    events.watch(reference, "moe_mlp_backward", "whole")
    events.watch(reference, "moe_mlp_backward_inputs", "inputs")
    events.watch(reference, "moe_mlp_backward_up_weights", "last product")
    wait = collectives.AsyncCollective.wait

    def waited(self: collectives.AsyncCollective) -> torch.Tensor:
        if self.result.shape[1:] == (WIDTH,):
            events.append("wait")
        return wait(self)

    collectives.AsyncCollective.wait = waited  # type: ignore[method-assign]
    return events


def order_rank(rank: int, world: int) -> dict[str, Any]:
    ops.set_backend("reference")
    ops.prefers_main_grads = lambda x: True  # as where kernels are: the same way with and without overlap
    events, found = watched_events(), {}
    for name, options in DISPATCHERS.items():
        config = ParallelConfig(expert_model_parallel_size=world, **options)  # type: ignore[arg-type]
        mesh = Mesh(config, rank=rank, world_size=world)
        found |= {f"{name}, shared{how}": order for how, order in orders_with_shared(mesh, config, events).items()}
        layer = layer_of(mesh, config)
        for recompute in (False, True):
            if recompute:
                layer.experts.forward = recompute_forward(layer.experts.forward)  # type: ignore[method-assign]
            events.clear()
            y = layer(tokens_of(rank, [6] * world).requires_grad_())[0]
            events.append("backward")
            y.sum().backward()
            del y
            found[name + recompute * ", recomputed"] = list(events)
            found[f"{name}, left alive"] = [*found.get(f"{name}, left alive", []), left_alive(layer, rank)]
        if name == "all-gather":
            # As a zero-bubble pipeline asks for them: nothing is combined with the weights' gradients.
            events.clear()
            y = layer(tokens_of(rank, [6] * world).requires_grad_())[0]
            events.append("backward")
            torch.autograd.grad(y.sum(), list(layer.experts.parameters()))
            found["weights alone"] = list(events)
            found["errors"] = errors(layer, tokens_of(rank, [6] * world))
        gradients = [gradients_of(layer, rank, events)]
        with patch.object(devices, "overlaps_collectives", lambda device: False):  # as on CUDA
            events.clear()
            gradients.append(gradients_of(layer, rank, events))
        found[f"{name}, nothing beside"] = list(events)
        found[f"{name}, equal"] = all(map(torch.equal, *gradients))
    return found


def orders_with_shared(mesh: Mesh, config: ParallelConfig, events: Events) -> dict[str, list[str]]:
    """Of a layer with shared experts: as on devices where collectives hide something, and "alone" where they do not."""
    layer = layer_of(mesh, config, **SHARED)
    assert layer.shared_experts is not None
    layer.shared_experts.mlp.down_proj.weight.register_hook(lambda grad: events.append("shared's backward"))
    found = {}
    for how, hides in (("", True), (" alone", False)):
        with patch.object(devices, "overlaps_collectives", lambda device, answer=hides: answer):
            events.clear()
            y = layer(tokens_of(mesh.index("ep"), [6] * WORLD).requires_grad_())[0]
            events.append("backward")
            y.sum().backward()
            found[how] = list(events)
    return found


def gradients_of(layer: MoE, rank: int, events: Events) -> list[torch.Tensor]:
    """Of x, the router, and the experts in the optimizer's buffers."""
    layer.zero_grad()
    for weight in layer.experts.parameters():
        weight.main_grad, weight.main_grad_ready = torch.zeros_like(weight), lambda: None  # type: ignore[attr-defined]
    x = tokens_of(rank, [6] * WORLD).requires_grad_()
    y = layer(x)[0]
    events.append("backward")
    (y * torch.arange(WIDTH)).sum().backward()
    assert x.grad is not None and layer.router.weight.grad is not None
    return [x.grad, layer.router.weight.grad, *(weight.main_grad for weight in layer.experts.parameters())]


def left_alive(layer: MoE, rank: int) -> int:
    """Dispatches, and with them the rows that came, after a backward and after a forward without one."""
    layer(tokens_of(rank, [6] * WORLD).requires_grad_())[0].sum().backward()
    layer(tokens_of(rank, [6] * WORLD).requires_grad_())
    gc.collect()
    return sum(issubclass(type(thing), AsyncDispatch) for thing in gc.get_objects())


def errors(layer: MoE, x: torch.Tensor) -> list[str]:
    """Of rows whose gradient has left before it was whole."""
    found = []
    x_TD = x.flatten(0, 1).requires_grad_()
    in_flight = layer.dispatcher.start(x_TD)
    rows = layer.dispatcher.dispatch(x_TD, layer.router(x_TD)[0], in_flight)
    y_RD = layer.experts(rows.x_RD, rows.weights_RK, rows.indices_RK, rows.on_input_gradients)
    try:
        (y_RD + rows.x_RD).sum().backward()
    except RuntimeError as error:
        found.append(str(error))
    dist.barrier()
    return found


def check_shared(found: dict[str, Any]) -> None:
    """Shared experts run when all that can leave has left, and in the backward when gradients are being combined."""
    with_shared = {
        "all-gather": ["gather", "router", "shared", "wait"],
        "all-to-all": ["router", "exchange", "shared", "wait"],
        "hierarchical": ["router", "exchange", "shared", "wait", "exchange", "wait"],
        "in 2 chunks": ["router", "exchange", "exchange", "shared", "wait"],
    }
    for name in DISPATCHERS:
        order, alone = found[f"{name}, shared"], found[f"{name}, shared alone"]
        assert order[: len(with_shared[name])] == with_shared[name]
        first = ["gather", "wait", "router", "shared", "wait"] if name == "all-gather" else with_shared[name]
        assert alone[: len(first)] == first
        for events in (order, alone):
            rest = events[events.index("backward") :]
            before, after = rest[: rest.index("shared's backward")], rest[rest.index("shared's backward") + 1 :]
            send = "scatter" if name == "all-gather" else "exchange"
            assert rest.count(send) == before.count(send) > 0
            # hierarchical: on cpu nothing is beside, all is done at once
            assert after == ["wait"] * {"hierarchical": 0, "in 2 chunks": 2}.get(name, 1)


def test_exchanges_are_under_way_beside_the_router_and_the_last_product() -> None:
    """The gradient of x leaves before the last product and is waited for after it; with all-gather tokens leave before
    the router. Recomputation repeats no exchange."""
    there = {
        "all-gather": ["gather", "router", "wait"],
        "all-to-all": ["router", "exchange", "wait"],
        "hierarchical": ["router", *["exchange", "wait"] * 2],
    }
    last_half = {
        "all-gather": ["scatter", "last product", "wait"],
        "all-to-all": ["exchange", "last product", "wait"],
        "hierarchical": ["exchange", "exchange", "last product"],  # on cpu nothing is beside: all is done at once
    }
    back = {"all-gather": (["scatter"], ["gather"]), "all-to-all": (["exchange"], ["exchange"])}
    back["hierarchical"] = (["exchange"] * 2, ["exchange"] * 2)
    for found in run_distributed(order_rank, WORLD):
        check_shared(found)
        for name, (outputs, gradients) in back.items():
            forward = [*there[name], "forward", *outputs, "backward", *gradients]
            assert found[name] == [*forward, "inputs", *last_half[name]]
            assert found[f"{name}, recomputed"] == [*forward, "forward", "inputs", *last_half[name]]
        assert all(found[f"{name}, left alive"] == [0, 0] for name in DISPATCHERS)
        parts = found["in 2 chunks"]
        backward = parts[parts.index("backward") + 1 :]
        half = ["inputs", "exchange", "last product"]
        assert backward == ["exchange", "exchange", "wait", *half, "wait", *half, "wait", "wait"]
        assert found["weights alone"][-3:] == ["gather", "forward", "whole"]
        assert len(found["errors"]) == 1 and "had left already" in found["errors"][0]
        # Where collectives hide nothing: experts' whole backward at once, then everything is combined; recomputed, as
        # the layer is by now.
        combined = {"all-gather": ["scatter", "wait"], "all-to-all": ["exchange", "wait"]}
        combined["hierarchical"] = ["exchange"] * 2
        for name, (outputs, gradients) in back.items():
            first = ["gather", "wait", "router", "wait"] if name == "all-gather" else there[name]
            forward = [*first, "forward", *outputs, "backward", *gradients]
            assert found[f"{name}, nothing beside"] == [*forward, "forward", "whole", *combined[name]]
        parts = found["in 2 chunks, nothing beside"]
        rest = ["exchange", "exchange", "wait", "forward", "whole", "exchange", "wait", "forward", "whole", "exchange"]
        assert parts[parts.index("backward") + 1 :] == [*rest, "wait", "wait"]
        assert all(found[f"{name}, equal"] for name in DISPATCHERS)


@pytest.mark.parametrize(("kind", "hides"), [("cpu", True), ("xpu", True), ("cuda", False)])
def test_on_cuda_collectives_hide_nothing(kind: str, hides: bool) -> None:
    """What copy engines carry does, as ops/test_peers.py shows."""
    assert devices.overlaps_collectives(torch.device(kind)) == hides
