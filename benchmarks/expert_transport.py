"""How long tokens take to their experts and back: every transport, alone and inside a MoE layer, by message size.

On GPUs:  python benchmarks/expert_transport.py --ranks 4 --out benchmarks/results/expert_transport_h200x4.json
On a CPU: python benchmarks/expert_transport.py --ranks 4 --node-size 2 --device cpu --tokens 64 256 --width 256 \
              --experts 16 --topk 4 --inner 128 --out benchmarks/results/expert_transport_cpu.json

One process a rank on this machine; experts are spread over all ranks. Two tables. "transport": what
``--moe-token-dispatcher-type auto`` measures, the way there and back, forward and backward. "layer": a whole MoE layer,
router and experts included, forward and backward, with its excess over the same layer with all experts on the rank (as
many products, no exchange): what of the exchange is not hidden. Before a layer is timed, its output and the gradient of
its input are compared with those of the layer without exchange.
Medians on the slowest rank, variants taken in turn. After --time-limit seconds no further size is begun.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from device_check import require_device
from provenance import commit

from megatron.optimus.config.layout import Layout
from megatron.optimus.config.schema import LoadBalancing, ModelConfig, ParallelConfig, TokenDispatcherType
from megatron.optimus.moe.dispatch.base import MessageShape
from megatron.optimus.moe.dispatch.select import measure
from megatron.optimus.moe.layer import MoE
from megatron.optimus.parallel.expert import apply_expert_parallelism
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.process_exit import exit_process

WARM_UP, REPETITIONS = 3, 10
LOCAL = "no exchange"
TRANSPORTS = [
    TokenDispatcherType.ALLGATHER,
    TokenDispatcherType.ALLTOALL,
    TokenDispatcherType.HIERARCHICAL,
    TokenDispatcherType.SYMMETRIC,
]
IN_PARTS = (2, 4)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--node-size", type=int, help="ranks taken for a node; default: no hierarchical transport")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384], help="of a rank")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--time-limit", type=float, default=40.0, help="seconds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    require_device(parser, args.device, args.ranks)
    return args


def model_config(args: argparse.Namespace) -> ModelConfig:
    return ModelConfig(
        num_layers=1,
        hidden_size=args.width,
        num_attention_heads=1,
        kv_channels=64,
        num_experts=args.experts,
        moe_ffn_hidden_size=args.inner,
        moe_router_topk=args.topk,
        moe_router_load_balancing_type=LoadBalancing.NONE,
    )


def variants(args: argparse.Namespace) -> dict[str, ParallelConfig]:
    """What is timed inside a layer, by name."""
    found = {}
    for transport in TRANSPORTS:
        if transport is TokenDispatcherType.SYMMETRIC and args.device == "cpu":
            continue
        config = ParallelConfig(
            expert_model_parallel_size=args.ranks,
            moe_token_dispatcher_type=transport,
            moe_hierarchical_node_size=args.node_size,
        )
        layout = Layout.from_config(config, args.ranks)
        if transport is TokenDispatcherType.HIERARCHICAL and layout.hierarchy_problem(args.node_size or args.ranks):
            continue
        found[transport.value] = config
        if transport is TokenDispatcherType.ALLTOALL:
            for parts in IN_PARTS:
                chunked = ParallelConfig(**{**vars(config), "moe_dispatch_chunks": parts})
                found[f"alltoall in {parts} parts"] = chunked
    return found


def build_layer(args: argparse.Namespace, config: ParallelConfig | None, mesh: Mesh, device: torch.device) -> MoE:
    """The same weights in every variant; None: all experts on the rank."""
    torch.manual_seed(0)
    with device:
        layer = MoE(model_config(args))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=args.width**-0.5)
    if config is not None:
        apply_expert_parallelism(layer, config, mesh)
    return layer.to(dtype_of(device))


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def forward_backward(layer: MoE, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y, _ = layer(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


def time_in_turn(runs: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Milliseconds: medians, of the slowest rank."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    token = torch.zeros(1, device=device)
    for repetition in range(WARM_UP + REPETITIONS):
        for name, run in runs.items():
            dist.all_reduce(token)
            devices.synchronize(device)
            started = time.perf_counter()
            run()
            devices.synchronize(device)
            if repetition >= WARM_UP:
                seconds[name].append(1e3 * (time.perf_counter() - started))
    medians = torch.tensor([statistics.median(times) for times in seconds.values()], device=device)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return dict(zip(runs, medians.tolist(), strict=True))


def deviation(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """Norm of the difference over the norm, the larger of output and input gradient, on the worst rank."""
    pairs = zip(actual, expected, strict=True)
    worst = torch.stack([(a.double() - b.double()).norm() / b.double().norm() for a, b in pairs]).max().float()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def one_size(
    args: argparse.Namespace, layers: dict[str, MoE], tokens: int, mesh: Mesh, device: torch.device
) -> dict[str, Any]:
    dtype = dtype_of(device)
    generator = torch.Generator().manual_seed(1 + mesh.rank)
    x, dy = (torch.randn(1, tokens, args.width, generator=generator).to(device, dtype) for _ in range(2))
    expected = forward_backward(layers[LOCAL], x, dy)
    deviations = {name: deviation(forward_backward(layer, x, dy), expected) for name, layer in layers.items()}
    limit = 1e-5 if dtype is torch.float32 else 1e-2
    assert max(deviations.values()) <= limit, deviations
    messages = MessageShape(tokens, args.width, args.experts, args.topk, dtype)
    alone = {
        TokenDispatcherType(name): layers[name].dispatcher for name in layers if name in {t.value for t in TRANSPORTS}
    }
    return {
        "tokens": tokens,
        "transport_ms": {name.value: value for name, value in measure(alone, messages, mesh, device).items()},
        "layer_ms": time_in_turn(
            {name: lambda layer=layer: forward_backward(layer, x, dy) for name, layer in layers.items()}, device
        ),
        "deviation": deviations,
    }


def one_rank(rank: int, args: argparse.Namespace, store: str) -> None:
    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", rank)
    devices.set_device(device)
    torch.set_num_threads(1 if args.device == "cpu" else 4)
    backend = "gloo" if args.device == "cpu" else "nccl"
    started = time.monotonic()
    limit = timedelta(seconds=120)  # kernels are compiled at first use
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=args.ranks, timeout=limit)
    first = next(iter(variants(args).values()))
    mesh = Mesh(first, rank=rank, world_size=args.ranks)
    layers = {LOCAL: build_layer(args, None, mesh, device)}
    layers |= {name: build_layer(args, config, mesh, device) for name, config in variants(args).items()}
    record = {
        "device": devices.device_name(device),
        "torch": torch.__version__,
        "commit": commit(),
        "dtype": str(dtype_of(device)).removeprefix("torch."),
        **{name: getattr(args, name) for name in ("ranks", "node_size", "width", "inner", "experts", "topk")},
        "sizes": [],
    }
    for tokens in args.tokens:
        elapsed = torch.tensor([time.monotonic() - started], device=device)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        if elapsed.item() > args.time_limit:
            record["left_out"] = [size for size in args.tokens if size >= tokens]
            break
        record["sizes"].append(one_size(args, layers, tokens, mesh, device))
        if rank == 0:
            show(record["sizes"][-1])
    if rank == 0:
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{record['device']} x {args.ranks}, {time.monotonic() - started:.0f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    exit_process(0)


def show(size: dict[str, Any]) -> None:
    print(f"\n{size['tokens']} tokens a rank", flush=True)
    local = size["layer_ms"][LOCAL]
    for name, layer in size["layer_ms"].items():
        alone = size["transport_ms"].get(name)
        print(
            f"  {name:20} transport {'-' if alone is None else f'{alone:.3f}':>9} ms   layer {layer:9.3f} ms"
            f"   excess {layer - local:8.3f} ms = {(layer - local) / layer:6.1%}"
            f"   deviation {size['deviation'][name]:.1e}",
            flush=True,
        )


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(one_rank, args=(args, str(Path(folder) / "store")), nprocs=args.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
