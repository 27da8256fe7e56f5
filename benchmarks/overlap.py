"""How much of the optimizer's communication is exposed: real training steps, traced; and the optimizer phase alone.

    python benchmarks/overlap.py --ranks 8 --preset mula-7b-a1b --micro-batch-size 8 --seq-length 4096
    python benchmarks/overlap.py --ranks 8 --preset mula-20b-a2b --expert-parallel 8 --systems ours so deepspeed1
    python benchmarks/overlap.py --device cpu --ranks 2 --preset mula-tiny --seq-length 64      (a smoke test)

Systems, one after the other on the same model and batches: ``ours`` (overlapping, gradients travel in fp32),
``ours16`` (they travel in bf16, as stock ZeRO's do), ``plain`` (ours without overlap),
``stage2``, ``so`` (the paper's sharded optimizer: all states over the expert replicas only, dense gradients summed
over expert-parallel peers, here per bucket where the paper does it per parameter), ``deepspeed1`` and ``deepspeed2``
(stock ZeRO). Times are wall-clock means over consecutive steps between two waits for the device. "exposed" is the time
in which a communication kernel runs and no other kernel does, on rank 0: what four steps in a row have more than one
alone, divided by three, because a step's gather is meant to hide in the next step. The optimizer phase starts with
gradients in ``param.grad`` and ends when new parameters are everywhere, with nothing else to hide behind.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

SYSTEMS = ("ours", "ours16", "plain", "stage2", "so", "deepspeed1", "deepspeed2")
LR = 1e-4
TRACED = 4  # steps in the picture


@dataclass(frozen=True)
class Event:
    """A kernel (CPU: an operation): microseconds from the start of the trace."""

    start: float
    stop: float
    is_communication: bool


# ---- the model and the systems


def run_config(args: argparse.Namespace) -> Any:
    from megatron.optimus.config.load import load

    words = [
        *("--preset", args.preset, "--data-path", "RANDOM_TOKENS", "--train-iters", "100", "--lr-warmup-iters", "0"),
        *("--seq-length", str(args.seq_length), "--micro-batch-size", str(args.micro_batch_size)),
        *("--global-batch-size", str(args.micro_batch_size * args.ranks), "--pipeline-model-parallel-size", "1"),
        *("--expert-model-parallel-size", str(args.expert_parallel), "--params-dtype", args.dtype),
        *("--lr", str(LR), "--min-lr", str(LR), "--eval-interval", "0", "--device", args.device),
    ]
    if args.num_layers:
        words += ["--num-layers", str(args.num_layers)]
    if args.bucket_size:
        words += ["--ddp-bucket-size", str(args.bucket_size)]
    if args.reduce_in_bf16:
        words += ["--grad-reduce-in-bf16"]
    return load(words).config


def build(system: str, config: Any, mesh: Any, device: torch.device) -> Any:
    """The engine of a system around a fresh model."""
    from megatron.optimus.trainer.engine import build_engine

    model = build_model(config, mesh, device)
    if system.startswith("deepspeed"):
        return build_stock(int(system[-1]), model, config, mesh)
    if system == "so":
        return build_so(model, config, mesh)
    overlap = system != "plain"
    stage = 2 if system == "stage2" else 1
    if system == "ours16":
        config = replace(config, optimizer=replace(config.optimizer, grad_reduce_in_bf16=True))
    options = replace(config.optimizer, zero_stage=stage, overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    return build_engine(model, replace(config, optimizer=options), mesh, 1)


def build_model(config: Any, mesh: Any, device: torch.device) -> Any:
    """The training program's model with weights drawn on the device: its own, drawn on the host, take minutes."""
    from megatron.optimus.models.decoder import Decoder
    from megatron.optimus.models.initialize import _materialize
    from megatron.optimus.parallel.apply import parallelize
    from megatron.optimus.trainer.build import DTYPES, connect

    with torch.device("meta"):
        model = Decoder(config.model)
    parallelize(model, mesh, config.parallel)
    _materialize(model, device, DTYPES[config.training.params_dtype])
    generator = torch.Generator(device=device).manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0) if param.dim() == 1 else param.normal_(0.0, 0.02, generator=generator)
    connect(model, mesh)
    return model


def build_so(model: torch.nn.Module, config: Any, mesh: Any) -> Any:
    """States of all parameters sharded over the expert-data-parallel ranks; dense gradients summed over their peers."""
    from deepspeed.runtime.config import DeepSpeedConfig

    import deepspeed_ext
    from megatron.optimus.optim.groups import param_groups
    from megatron.optimus.trainer.engine import deepspeed_config

    peers = mesh.group("ep")

    class Optimizer(deepspeed_ext.EPZeroOptimizer):
        def finish_reduction(self) -> None:
            super().finish_reduction()
            dense = [family for family in self.families if family.key.expert_group is None]
            for family in dense:
                family.in_norm = mesh.index("ep") == 0
            buckets = [bucket for family in dense for bucket in family.buckets]
            for work in [dist.all_reduce(b.shard.grad, group=peers, async_op=True) for b in buckets]:
                work.wait()

    class Engine(deepspeed_ext.EPEngine):
        def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
            options = replace(self.zero_options, average=False)
            built = Optimizer(optimizer, self.param_names, groups=groups, options=options, module=self.module)
            built._state._divisor = dist.get_world_size()
            return built

    replicas = mesh.group("edp")
    names = {str(p.group_name) for p in model.parameters() if hasattr(p, "group_name")}
    # Without replicas there is one rank to shard over; None is that rank, and for the norm all ranks.
    groups = deepspeed_ext.ZeroGroups(dense=replicas, expert=dict.fromkeys(names, replicas))
    ds_config = deepspeed_config(config, 1)
    ds_config["deepspeed_ext"] = {}
    return Engine(
        args=None,
        model=model,
        optimizer=torch.optim.AdamW(param_groups(model, config.optimizer)),
        config=ds_config,
        config_class=DeepSpeedConfig(ds_config),
        zero_groups=groups,
        zero_options=deepspeed_ext.ds_config.zero_options(ds_config),
    )


def build_stock(stage: int, model: torch.nn.Module, config: Any, mesh: Any) -> Any:
    """DeepSpeed's own ZeRO, overlap on, experts marked its way where they are spread over ranks."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import groups

    experts = [p for p in model.parameters() if hasattr(p, "group_name")]
    spread = mesh.size("ep") > 1

    class Engine(DeepSpeedEngine):
        def _configure_distributed_model(self, *args: Any) -> None:
            super()._configure_distributed_model(*args)
            if spread:  # it looks for its own MoE class only
                self.has_moe_layers = True
                self.num_experts = [config.model.num_experts]
                self.expert_parallel_group = groups._get_expert_parallel_group_dict()
                self.expert_data_parallel_group = groups._get_expert_data_parallel_group_dict()

    if spread:
        groups._create_expert_and_data_parallel(mesh.size("ep"))
    else:
        for param in experts:
            del param.allreduce, param.group_name
    ids = {id(p) for p in experts} if spread else set()
    param_groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if id(p) not in ids], "name": "dense"}
    ]
    if spread:
        param_groups.append({"params": experts, "moe": True, "name": f"ep_size_{mesh.size('ep')}"})
    chosen = config.optimizer
    betas = (chosen.adam_beta1, chosen.adam_beta2)
    optimizer = torch.optim.AdamW(
        param_groups, lr=LR, betas=betas, eps=chosen.adam_eps, weight_decay=chosen.weight_decay, fused=True
    )
    ds_config = {
        "train_micro_batch_size_per_gpu": config.training.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.clip_grad,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_scatter": True},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": config.training.params_dtype.value == "bf16"},
        "timers": {"throughput": {"enabled": False}},
        "steps_per_print": 1_000_000_000,
    }
    if next(model.parameters()).device.type == "cpu":
        ds_config["zero_optimization"]["reduce_bucket_size"] = 1_000_000
    return Engine(
        args=None, model=model, optimizer=optimizer, config=ds_config, config_class=DeepSpeedConfig(ds_config)
    )


# ---- measuring


def train_step(engine: Any, tokens_BS: torch.Tensor, labels_BS: torch.Tensor, config: Any) -> None:
    output = engine(tokens_BS, labels_BS)
    loss = output.loss_sum / labels_BS.numel() + config.model.moe_aux_loss_coeff * output.aux_loss
    engine.backward(loss)
    engine.step()


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
    from megatron.optimus.runtime.device import synchronize

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


def trace(action: Callable[[], None], calls: int, finish: Callable[[], None], device: torch.device) -> list[Event]:
    """The kernels of consecutive calls, which start and end with an idle device.

    ``finish`` waits for gathers: gloo crashes on work that starts inside a profiler's session and ends outside.
    """
    from megatron.optimus.runtime.device import synchronize

    on_cpu = device.type == "cpu"
    activity = torch.profiler.ProfilerActivity.CPU if on_cpu else torch.profiler.ProfilerActivity.CUDA
    finish()
    synchronize(device)
    dist.barrier()
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(calls):
            action()
        finish()
        synchronize(device)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        recorded = json.loads(Path(file.name).read_text())["traceEvents"]
    kinds = ("cpu_op",) if on_cpu else ("kernel", "gpu_memcpy", "gpu_memset")
    events = []
    for entry in recorded:
        if entry.get("cat") in kinds and "dur" in entry:
            name = entry["name"].lower()
            events.append(Event(entry["ts"], entry["ts"] + entry["dur"], "nccl" in name or name.startswith("gloo:")))
    first = min(event.start for event in events)
    return [Event(e.start - first, e.stop - first, e.is_communication) for e in events]


def merged(events: list[Event]) -> list[tuple[float, float]]:
    """The union of the events' intervals."""
    union: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event.start):
        if union and event.start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], event.stop))
        else:
            union.append((event.start, event.stop))
    return union


def covered(intervals: list[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in intervals)


def exposure(events: list[Event]) -> dict[str, float]:
    """Milliseconds of a traced step: all of it, computing, communicating, communicating while nothing computes."""
    compute = merged([event for event in events if not event.is_communication])
    communication = merged([event for event in events if event.is_communication])
    both = covered(merged(events))
    total = max(event.stop for event in events)
    exposed = both - covered(compute)
    return {
        "step_ms": total / 1e3,
        "compute_ms": covered(compute) / 1e3,
        "communication_ms": covered(communication) / 1e3,
        "exposed_ms": exposed / 1e3,
        "idle_ms": (total - both) / 1e3,
    }


def steady(one: dict[str, float], several: dict[str, float], calls: int) -> dict[str, float]:
    """Figures of a step among others."""
    figures = {key: (several[key] - one[key]) / (calls - 1) for key in one}
    return {**figures, "exposed_percent": 100 * figures["exposed_ms"] / figures["step_ms"]}


def measure(system: str, args: argparse.Namespace, config: Any, mesh: Any, device: torch.device) -> tuple[Any, Any]:
    """One system's figures and the traced events."""
    from megatron.optimus.runtime import device as devices

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

        for _ in range(args.warm_up):
            step()
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


def host_cost(count: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of host time a step that hooks and step() take, without waiting for the device, for ``count``
    parameters in bf16 and default buckets; one rank, so no collectives. Parameters have 4,096 elements, on a CPU 16:
    its arithmetic is host time too. Medians of the thread's processor time, which other work on the machine does not
    enter.
    """
    import deepspeed_ext
    from megatron.optimus.runtime.device import synchronize

    numel = 16 if device.type == "cpu" else 4096
    params = [torch.nn.Parameter(torch.randn(numel, device=device, dtype=torch.bfloat16)) for _ in range(count)]
    groups = deepspeed_ext.ZeroGroups(
        dense=dist.new_group([dist.get_rank()], use_local_synchronization=True), expert={}
    )
    optimizer = deepspeed_ext.EPZeroOptimizer(
        torch.optim.AdamW(params, lr=LR), {p: str(i) for i, p in enumerate(params)}, groups=groups
    )
    gradient = torch.ones_like(params[0])
    hook_ms, step_ms = [], []
    for _ in range(50):
        for param in params:
            param.grad = gradient
        hooks = [hook for p in reversed(params) for hook in p._post_accumulate_grad_hooks.values()]  # they may change
        synchronize(device)
        optimizer.set_gradient_accumulation_boundary(True)
        began = time.thread_time()
        for param, hook in zip(reversed(params), hooks, strict=True):
            hook(param)
        optimizer.reduce_gradients()
        between = time.thread_time()
        optimizer.step()
        hook_ms.append((between - began) * 1e3)
        step_ms.append((time.thread_time() - between) * 1e3)
    optimizer.destroy()
    return {
        "parameters": count,
        "hooks_ms": statistics.median(hook_ms[5:]),
        "step_ms": statistics.median(step_ms[5:]),
    }


def worker(rank: int, args: argparse.Namespace, store: str) -> None:
    from megatron.optimus.runtime import device as devices
    from megatron.optimus.runtime import launch_env

    for name, value in launch_env.of_rank(rank, args.ranks, 29577).items():
        launch_env.set_default(name, value)
    config = run_config(args)
    device = devices.pick(config.parallel.device, rank)
    devices.set_device(device)
    torch.set_num_threads(1)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    import deepspeed_ext
    from megatron.optimus.parallel.mesh import Mesh

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
        costs += [host_cost(count, device) for count in args.host_parameters]
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
            sys.stdout.flush()
            write()
        free(device)
    deepspeed_ext.shutdown()


def free(device: torch.device) -> None:
    import gc

    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def draw(traces: dict[str, list[Event]], results: dict[str, Any], args: argparse.Namespace) -> None:
    """Two lanes a system: computing and communicating."""
    if not traces:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(traces), 1, figsize=(14, 1.3 + 1.5 * len(traces)), squeeze=False, sharex=True)
    for axis, (system, events) in zip(axes[:, 0], traces.items(), strict=True):
        for lane, (is_communication, colour) in enumerate(((True, "tab:orange"), (False, "tab:blue"))):
            spans = merged([event for event in events if event.is_communication is is_communication])
            axis.broken_barh([(a / 1e3, (b - a) / 1e3) for a, b in spans], (lane - 0.4, 0.8), color=colour, linewidth=0)
        figures = results[system]["trace"]
        axis.set_yticks([0, 1], ["communication", "compute"])
        axis.set_title(
            f"{system}: {figures['step_ms']:.1f} ms a step, communication {figures['communication_ms']:.1f} ms, "
            f"exposed {figures['exposed_ms']:.1f} ms ({figures['exposed_percent']:.1f}%)",
            fontsize=10,
            loc="left",
        )
    axes[-1, 0].set_xlabel("ms")
    figure.suptitle(f"{args.preset}, {args.ranks} ranks, EP={args.expert_parallel}, consecutive steps of rank 0")
    figure.tight_layout()
    figure.savefig(f"{args.out}.png", dpi=110)
    plt.close(figure)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "xpu", "cpu"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--preset", default="mula-7b-a1b")
    parser.add_argument("--num-layers", type=int, help="fewer layers than the preset")
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--bucket-size", type=int, help="elements; default: the optimizer's")
    parser.add_argument("--reduce-in-bf16", action="store_true", help="sum gradients over ranks in bf16")
    parser.add_argument("--systems", nargs="*", default=["ours", "plain"], choices=SYSTEMS)
    parser.add_argument("--only-phase", action="store_true", help="no training steps, the optimizer phase only")
    parser.add_argument("--host-parameters", type=int, nargs="*", default=[], help="host time of these many parameters")
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="steps between two waits for the device")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", default="overlap", help="OUT.json and OUT.png")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(args, f"{folder}/store"), nprocs=args.ranks)


if __name__ == "__main__":
    main()
