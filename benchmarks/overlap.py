"""How much of the optimizer's communication is exposed: real training steps, traced; and the optimizer phase alone.

    python benchmarks/overlap.py --ranks 8 --preset mula-7b-a1b --micro-batch-size 8 --seq-length 4096
    python benchmarks/overlap.py --ranks 8 --preset mula-20b-a2b --expert-parallel 8 --systems ours so deepspeed1
    python benchmarks/overlap.py --device cpu --ranks 2 --preset mula-tiny --seq-length 64      (a smoke test)

Systems, one after the other on the same model and batches: ``ours`` (overlapping, gradients travel in fp32),
``ours16`` (they travel in bf16, as stock ZeRO's do), ``plain`` (ours without overlap),
``stage2``, ``nudged`` (ours, one weight of one rank changed by a rounding of bf16: how far results part by themselves),
``so`` (the paper's sharded optimizer: all states over the expert replicas only, dense gradients summed
over expert-parallel peers, here per bucket where the paper does it per parameter), ``deepspeed1`` and ``deepspeed2``
(stock ZeRO). Times are wall-clock means over consecutive steps between two waits for the device. "exposed" is the time
in which a communication kernel runs and no other kernel does, on rank 0: what four steps in a row have more than one
alone, divided by three, because a step's gather is meant to hide in the next step. The optimizer phase starts with
gradients in ``param.grad`` and ends when new parameters are everywhere, with nothing else to hide behind.
All systems start from the same weights and batches, so loss and norm of the first step are the same but for rounding:
a line says if not. ``losses`` and ``grad_norms`` are those of the warm-up steps; later ones part, see ``nudged``.
Writes OUT.json and a picture of the traced steps, OUT.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from device_check import require_device
from overlap_systems import LR, build, first_step_differs, run_config
from overlap_timeline import Event, draw, exposure, steady, trace

SYSTEMS = ("ours", "ours16", "plain", "stage2", "nudged", "so", "deepspeed1", "deepspeed2")
TRACED = 4  # steps in the picture


def train_step(engine: Any, tokens_BS: torch.Tensor, labels_BS: torch.Tensor, config: Any) -> torch.Tensor:
    """One step; this rank's loss."""
    output = engine(tokens_BS, labels_BS)
    loss = output.loss_sum / labels_BS.numel() + config.model.moe_aux_loss_coeff * output.aux_loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


def watched_step(engine: Any, tokens_BS: torch.Tensor, labels_BS: torch.Tensor, config: Any) -> tuple[float, float]:
    """One step; mean loss of all ranks and gradient norm, for which it waits."""
    loss = train_step(engine, tokens_BS, labels_BS, config).float()
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size(), float(engine.get_global_grad_norm())


def optimizer_phase(engine: Any, gradients: dict[torch.nn.Parameter, torch.Tensor]) -> None:
    for param, gradient in gradients.items():
        param.grad = gradient
    engine.optimizer.set_gradient_accumulation_boundary(True)
    if hasattr(engine.optimizer, "wait_for_params"):
        engine.allreduce_gradients()
        engine.optimizer.step()
        engine.optimizer.wait_for_params()
    else:
        engine._flush_coalesced_reduction_zero12(engine.optimizer)  # what stock ZeRO does with gradients at hand
        engine.optimizer.step()
    engine.optimizer.zero_grad()


def mean_ms(action: Callable[[], None], times: int, repetitions: int, device: torch.device) -> list[float]:
    """Mean of ``times`` consecutive calls, ``repetitions`` times."""
    from megatron.optimus.platform.device import synchronize

    means = []
    for _ in range(repetitions):
        synchronize(device)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(times):
            action()
        synchronize(device)
        means.append((time.perf_counter() - began) / times * 1e3)
    return means


def measure(system: str, args: argparse.Namespace, config: Any, mesh: Any, device: torch.device) -> tuple[Any, Any]:
    """One system's figures and the traced events."""
    from megatron.optimus.platform import device as devices

    engine = build(system, config, mesh, device)
    result: dict[str, Any] = {"system": system, "built_bytes": devices.memory_allocated(device)}
    if hasattr(engine.optimizer, "memory_bytes"):
        result["memory_bytes"] = engine.optimizer.memory_bytes()
    events: list[Event] = []
    generator = torch.Generator(device=device).manual_seed(dist.get_rank())
    shape = (args.micro_batch_size, args.seq_length + 1)
    tokens = torch.randint(0, config.model.vocab_size, shape, device=device, generator=generator)
    if not args.only_phase:

        def step() -> None:
            train_step(engine, tokens[:, :-1], tokens[:, 1:], config)

        seen = [watched_step(engine, tokens[:, :-1], tokens[:, 1:], config) for _ in range(max(1, args.warm_up))]
        result["losses"], result["grad_norms"] = (list(values) for values in zip(*seen, strict=True))
        result["first_loss"], result["first_grad_norm"] = seen[0]
        devices.reset_peak_memory(device)
        times = mean_ms(step, args.steps, args.repetitions, device)
        result["step_ms"], result["step_ms_each"] = statistics.median(times), times
        result["tokens_per_second_per_device"] = args.micro_batch_size * args.seq_length / result["step_ms"] * 1e3
        result["peak_bytes"] = devices.peak_memory(device)
        finish = getattr(engine.optimizer, "wait_for_params", lambda: None)
        alone = exposure(trace(step, 1, finish, device))
        events = trace(step, TRACED, finish, device)
        result["trace"], result["trace_of_one_step_alone"] = steady(alone, exposure(events), TRACED), alone
        result["grad_norm"] = float(engine.get_global_grad_norm())
    params = [p for p in engine.module.parameters() if p.requires_grad]
    gradients = {p: torch.randn(p.shape, dtype=p.dtype, device=device, generator=generator) * 1e-3 for p in params}
    optimizer_phase(engine, gradients)
    times = mean_ms(lambda: optimizer_phase(engine, gradients), 1, max(3, args.repetitions), device)
    result["optimizer_phase_ms"], result["optimizer_phase_ms_each"] = statistics.median(times), times
    engine.destroy()
    return result, events


class _Fan(torch.autograd.Function):
    """A gradient of ones for every parameter with next to no work: what is left is autograd's own and the hooks'."""

    @staticmethod
    def forward(ctx: Any, *params: torch.Tensor) -> torch.Tensor:
        ctx.gradients = torch.ones_like(params[0]).expand(len(params), -1)
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ctx.gradients.clone().unbind()


def backward_cost(params: list[torch.nn.Parameter], optimizer: Any, device: torch.device) -> float:
    """Median milliseconds of the process in a backward and what comes after it; ``optimizer`` may be None."""
    from megatron.optimus.platform.device import synchronize

    times = []
    for _ in range(50):
        loss = _Fan.apply(*params)
        if optimizer is not None:
            optimizer.set_gradient_accumulation_boundary(True)
        synchronize(device)
        began = time.process_time()
        loss.backward()
        if optimizer is not None:
            optimizer.reduce_gradients()
        times.append((time.process_time() - began) * 1e3)
        if optimizer is not None:
            optimizer.step()
        for param in params:
            param.grad = None
    return statistics.median(times[5:])


class _Holder(torch.nn.Module):
    """A module with a parameter and nothing to compute."""

    def __init__(self, param: torch.nn.Parameter) -> None:
        super().__init__()
        self.param = param

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Arrived:
    """Stands in for a gather of several ranks that is over when somebody waits for it."""

    def wait(self) -> None:
        """Nothing to wait for."""


def thread_ms(action: Callable[[], Any]) -> float:
    """Processor time of this thread."""
    began = time.thread_time()
    action()
    return (time.thread_time() - began) * 1e3


def _alone(params: list[torch.nn.Parameter], model: torch.nn.Module, per_bucket: int) -> Any:
    """The optimizer of one rank, whose buckets are waited for as if a collective ran."""
    import deepspeed_ext
    from deepspeed_ext.zero.partition import ALIGNMENT

    bucket_numel = per_bucket * max(params[0].numel(), ALIGNMENT)
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    optimizer = deepspeed_ext.EPZeroOptimizer(
        torch.optim.AdamW(params, lr=LR),
        {p: str(i) for i, p in enumerate(params)},
        groups=deepspeed_ext.ZeroGroups(dense=group, expert={}),
        options=deepspeed_ext.ZeroOptions(overlap_param_gather=True, bucket_numel=bucket_numel),
        module=model,
    )
    for bucket in optimizer._param_gather.buckets:
        bucket.start_gather = partial(setattr, bucket, "_gathering", _Arrived())  # type: ignore[method-assign]
    return optimizer


def host_cost(count: int, device: torch.device, per_bucket: int) -> dict[str, float]:
    """Milliseconds of host time a step that hooks, step() and waiting forwards take, without waiting for the device,
    for ``count`` parameters in bf16, each in a module of its own, ``per_bucket`` of them in a bucket. One rank: no
    collectives run, but every bucket is waited for as if one did. Parameters have 4,096 elements, on a CPU 16: its
    arithmetic is host time too. Medians of the thread's processor time, which other work on the machine does not enter.
    ``backward_ms``: what a real backward and the reduction after it take more than a backward of parameters that no
    optimizer has; of the process, as autograd may run in a thread of its own. ``forward_ms``: what forward takes more
    for waiting module by module; what step() does for it is in ``step_ms``.
    """
    from megatron.optimus.platform.device import synchronize

    numel = 16 if device.type == "cpu" else 4096
    params = [torch.nn.Parameter(torch.randn(numel, device=device, dtype=torch.bfloat16)) for _ in range(count)]
    model, x = torch.nn.Sequential(*map(_Holder, params)), torch.zeros(1)
    bare_ms = backward_cost(params, None, device)
    bare_forward_ms = statistics.median(thread_ms(lambda: model(x)) for _ in range(50))
    optimizer = _alone(params, model, per_bucket)
    gradient = torch.ones_like(params[0])

    def arrive() -> None:
        for param, hook in zip(reversed(params), hooks, strict=True):
            hook(param)
        optimizer.reduce_gradients()

    forward_ms, hook_ms, step_ms = [], [], []
    for _ in range(50):
        forward_ms.append(thread_ms(lambda: model(x)))
        for param in params:
            param.grad = gradient
        hooks = [hook for p in reversed(params) for hook in p._post_accumulate_grad_hooks.values()]  # they may change
        synchronize(device)
        optimizer.set_gradient_accumulation_boundary(True)
        hook_ms.append(thread_ms(arrive))
        step_ms.append(thread_ms(optimizer.step))
    backward_ms = backward_cost(params, optimizer, device)
    optimizer.destroy()
    return {
        "parameters": count,
        "buckets": len(optimizer._param_gather.buckets),
        "forward_ms": statistics.median(forward_ms[5:]) - bare_forward_ms,
        "hooks_ms": statistics.median(hook_ms[5:]),
        "step_ms": statistics.median(step_ms[5:]),
        "backward_ms": backward_ms - bare_ms,
        "bare_backward_ms": bare_ms,
    }


def worker(rank: int, args: argparse.Namespace, store: str) -> None:
    from megatron.optimus.platform import device as devices
    from megatron.optimus.platform import environment
    from megatron.optimus.platform.process_exit import exit_process

    for name, value in environment.for_local_rank(rank, args.ranks, 29577).items():
        environment.set_default(name, value)
    config = run_config(args)
    device = devices.device_for_rank(config.parallel.device, rank)
    devices.set_device(device)
    torch.set_num_threads(1)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    import deepspeed_ext
    from megatron.optimus.platform.mesh import Mesh

    deepspeed_ext.init_distributed()
    mesh = Mesh(config.parallel, rank=rank, world_size=args.ranks)
    results, traces, costs = [], {}, []
    about = {
        "device": devices.device_name(device),
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
        **vars(args),
    }

    def write() -> None:  # after every system: a run may be cut short
        file = Path(f"{args.out}.json")
        file.write_text(json.dumps({"about": about, "results": results, "host": costs}, indent=1) + "\n")
        by_system = {result["system"]: result for result in results}
        draw({name: events for name, events in traces.items() if events}, by_system, args)

    if rank == 0:
        costs += [host_cost(count, device, args.host_parameters_per_bucket) for count in args.host_parameters]
        sys.stdout.write(json.dumps(costs) + "\n")
        write()
    for system in args.systems:
        try:
            result, traces[system] = measure(system, args, config, mesh, device)
        except torch.OutOfMemoryError as error:
            result = {"system": system, "error": str(error)}
        if rank == 0:
            results.append(result)
            shown = {key: value for key, value in result.items() if not key.endswith("_each")}
            sys.stdout.write(json.dumps(shown) + "\n")
            for line in first_step_differs(results, args.dtype):
                sys.stdout.write(f"warning: {line}\n")
            sys.stdout.flush()
            write()
        free(device)
    deepspeed_ext.shutdown()
    exit_process(0)


def free(device: torch.device) -> None:
    import gc

    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "xpu", "cpu"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--preset", default="mula-7b-a1b")
    parser.add_argument("--num-layers", type=int, help="fewer layers than the preset")
    parser.add_argument("--num-experts", type=int, help="fewer experts than the preset, as fewer ranks hold")
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--bucket-size", type=int, help="elements; default: the optimizer's")
    parser.add_argument("--reduce-in-bf16", action="store_true", help="sum gradients over ranks in bf16")
    parser.add_argument("--systems", nargs="*", default=["ours", "plain"], choices=SYSTEMS)
    parser.add_argument("--only-phase", action="store_true", help="no training steps, the optimizer phase only")
    parser.add_argument("--host-parameters", type=int, nargs="*", default=[], help="host time of these many parameters")
    parser.add_argument("--host-parameters-per-bucket", type=int, default=1 << 16, help="default: one bucket")
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="steps between two waits for the device")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", default="overlap", help="OUT.json and OUT.png")
    args = parser.parse_args(argv)
    require_device(parser, args.device, args.ranks)
    return args


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(args, f"{folder}/store"), nprocs=args.ranks)


if __name__ == "__main__":
    main()
