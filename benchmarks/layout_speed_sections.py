"""What layout_speed.py compares: command lines of the training program, peers, and what follows from their times."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import layout_speed_programs as programs
import torch
from layout_speed_programs import slowest
from torch.torch_version import TorchVersion

from megatron.optimus.platform import device as devices

TINY = "--hidden-size 64 --num-attention-heads 4 --vocab-size 512 --ddp-bucket-size 65536 --max-position-embeddings 512"
Build = Callable[[torch.device], programs.Program]
BuildSection = Callable[[argparse.Namespace, int], "Section"]
Times = dict[str, float]  # seconds of a step, by variant
Figures = dict[str, dict[str, Any]]  # further results, by variant


@dataclass
class Section:
    variants: dict[str, Build]
    # After the turns: further figures, from the programs and the median times, collective.
    further: Callable[[dict[str, programs.Program], Times, torch.device], Figures]
    needs_all: bool = True  # for the further figures
    turns: int = 4
    steps: int = 2  # of a turn
    warm_up: int = 4


# ---- the sections


@dataclass
class Ours:
    """Builds the training program of a command line."""

    words: str
    change: Callable[[Any], None] | None = None  # of the model

    def __call__(self, device: torch.device) -> programs.Program:
        options = {} if self.change is None else {"change": self.change}
        return programs.ours(self.words.split(), device, **options)


def tp_section(args: argparse.Namespace, ranks: int) -> Section:
    tp = args.tp or ranks
    base = f"{dense(args, args.layers)} --seq-length {args.seq_length}"
    batch = f"--global-batch-size {args.micro_batch_size * ranks}"
    split = f"{base} {batch} --micro-batch-size {args.micro_batch_size * tp} --tensor-model-parallel-size {tp}"
    variants = {
        "tp=1": Ours(f"{base} {batch} --micro-batch-size {args.micro_batch_size}"),
        f"tp={tp}": Ours(split),
        f"tp={tp}, overlap": Ours(f"{split} --tp-comm-overlap"),
    }

    def further(_: Any, times: Times, device: torch.device) -> Figures:
        return {name: percent("cost per token against tp=1", t / times["tp=1"] - 1) for name, t in times.items()}

    return Section(variants, further)


def pp_words(args: argparse.Namespace, ranks: int) -> tuple[str, int]:
    micro_batches = args.micro_batches or 4 * ranks
    base = f"{dense(args, args.layers)} --seq-length {args.seq_length} --micro-batch-size {args.pp_micro_batch_size}"
    return f"{base} --global-batch-size {args.pp_micro_batch_size * micro_batches}", micro_batches


def schedules(args: argparse.Namespace, ranks: int) -> dict[str, tuple[str, float]]:
    """Words of every schedule and its bubble, in forward and backward times of one micro-batch."""
    base = f"{pp_words(args, ranks)[0]} --pipeline-model-parallel-size {ranks}"
    two = f"{base} --virtual-pipeline-model-parallel-size 2 --pipeline-schedule"
    found = {
        "1f1b": (base, (ranks - 1) / ranks),
        "interleaved-1f1b, 2 chunks": (f"{two} interleaved-1f1b", (ranks - 1) / ranks / 2),
    }
    if TorchVersion(torch.__version__) >= "2.13":  # see parallel/pipeline.py
        found["interleaved-zero-bubble"] = (f"{two} interleaved-zero-bubble", 0.0)
        found["zbv"] = (f"{two} zbv", 0.0)
    return found


def pp_section(args: argparse.Namespace, ranks: int) -> Section:
    base, micro_batches = pp_words(args, ranks)
    found = schedules(args, ranks)
    whole = f"dp={ranks}, no pipeline"

    def further(built: Any, times: Times, device: torch.device) -> Figures:
        spent = slowest(programs.forward_backward_time(built[whole], device, 4))
        each = spent / (micro_batches // ranks)
        figures: Figures = {whole: {"micro_batch_forward_backward_ms": each * 1e3}}
        for name, (_, bubble) in found.items():
            ideal = times[whole] + bubble * each
            reached = percent("of the bubble-limited ideal", ideal / times[name])
            figures[name] = reached | {"ideal_ms": ideal * 1e3, "bubble_ms": bubble * each * 1e3}
        return figures

    variants = {whole: Ours(base), **{name: Ours(words) for name, (words, _) in found.items()}}
    return Section(variants, further, turns=3, warm_up=3)


def pp_deepspeed_section(args: argparse.Namespace, ranks: int) -> Section:
    base, _ = pp_words(args, ranks)
    variants = {name: Ours(words) for name, (words, _) in schedules(args, ranks).items() if "1f1b" in name}
    peers: dict[str, Build] = {
        f"DeepSpeed, gradients added in {dtype}": lambda device, dtype=dtype: peer("pipeline", base, device, dtype)
        for dtype in (("fp32", "bf16") if args.dtype == "bf16" else ("fp32",))
    }

    def further(_: Any, times: Times, device: torch.device) -> Figures:
        return over_fastest(times, list(variants))

    return Section(variants | peers, further, needs_all=False, turns=3, warm_up=3)


def cp_section(args: argparse.Namespace, ranks: int) -> Section:
    base = (
        f"{dense(args, args.cp_layers)} --seq-length {args.cp_seq_length} --max-position-embeddings "
        f"{args.cp_seq_length} --micro-batch-size 1 --global-batch-size 1 --context-parallel-size {ranks}"
    )
    rest = "rest: attention does nothing"
    variants = {
        "ulysses": Ours(f"{base} --cp-comm-type a2a"),
        "ring": Ours(f"{base} --cp-comm-type p2p"),
        rest: Ours(base, change=programs.without_attention),
    }

    def further(built: Any, times: Times, device: torch.device) -> Figures:
        alone, by_ring = (
            slowest(programs.attention_alone(base.split(), device, ranks, 3, is_ring)) for is_ring in (False, True)
        )
        ideal = times[rest] + alone * built["ulysses"].about["num_layers"]
        figures: Figures = {rest: {"attention_alone_ms_each_layer": alone * 1e3}}
        for name in ("ulysses", "ring"):
            figures[name] = percent("above the attention-bound ideal", times[name] / ideal - 1)
            figures[name]["ideal_ms"] = ideal * 1e3
        figures["ring"]["kernels_alone_ms_each_layer"] = by_ring * 1e3
        return figures

    return Section(variants, further, turns=3, steps=1, warm_up=2)


def moe_words(args: argparse.Namespace, ranks: int, micro_batch_size: int | None = None) -> dict[str, str]:
    size = micro_batch_size or args.micro_batch_size
    tiny = f"{TINY} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32" if args.device == "cpu" else ""
    base = (
        f"--preset {args.moe_preset} {tiny} --params-dtype {args.dtype} --num-layers {args.moe_layers} "
        f"--seq-length {args.seq_length} --micro-batch-size {size} --global-batch-size {size * ranks} "
        f"--expert-model-parallel-size {ranks} --moe-token-dispatcher-type"
    )
    words = {
        "allgather": f"{base} allgather",
        "alltoall": f"{base} alltoall",
        "alltoall, 2 chunks": f"{base} alltoall --moe-dispatch-chunks 2",
    }
    return words if args.device == "cpu" else words | {"symmetric": f"{base} symmetric"}


def moe_section(args: argparse.Namespace, ranks: int) -> Section:
    words = moe_words(args, ranks)
    rest = "rest: no exchange"
    variants = {name: Ours(line) for name, line in words.items()}
    # What is gained by what travels beside products: to be asked for by name.
    hiding = [name for name in words if name == "symmetric" or devices.overlaps_collectives(torch.device(args.device))]
    asked = {f"{name}, home last": Ours(words[name], change=programs.combine_grads_last) for name in hiding}
    if args.moe_variants:
        variants = {name: (variants | asked)[name] for name in args.moe_variants}
    names = list(variants)
    variants[rest] = Ours(words["allgather"], change=programs.without_exchange)

    def further(_: Any, times: Times, device: torch.device) -> Figures:
        return {name: percent("of the step is exposed exchange", 1 - times[rest] / times[name]) for name in names}

    return Section(variants, further)


def moe_peer_section(
    kind: str, name: str, micro_batch_size: int | None
) -> Callable[[argparse.Namespace, int], Section]:
    """Ours against one of DeepSpeed's layers; ``micro_batch_size``: None for the option's."""

    def build(args: argparse.Namespace, ranks: int) -> Section:
        words = moe_words(args, ranks, micro_batch_size)
        own = {transport: Ours(words[transport]) for transport in ("allgather", "alltoall")}
        theirs: Build = lambda device: peer("moe", words["alltoall"], device, kind)  # noqa: E731
        return Section(own | {name: theirs}, lambda _, times, __: over_fastest(times, list(own)), needs_all=False)

    return build


def over_fastest(times: Times, own: list[str]) -> Figures:
    fastest = min((times[name] for name in own if name in times), default=float("nan"))
    return {name: {"what": "time over our fastest", "ratio": t / fastest} for name, t in times.items()}


SECTIONS: dict[str, BuildSection] = {
    "tp": tp_section,
    "pp": pp_section,
    "pp-deepspeed": pp_deepspeed_section,
    "cp": cp_section,
    "moe": moe_section,
    "moe-autoep": moe_peer_section("autoep", "DeepSpeed AutoEP", None),
    "moe-deepspeed": moe_peer_section("native", "DeepSpeed MoE", 1),  # its masks take tokens x experts x capacity
}


def dense(args: argparse.Namespace, layers: int) -> str:
    tiny = f"{TINY} --ffn-hidden-size 128" if args.device == "cpu" else ""
    return f"--preset {args.preset} {tiny} --params-dtype {args.dtype} --num-layers {layers}"


def peer(what: str, words: str, device: torch.device, option: str) -> programs.Program:
    import layout_speed_peers as peers

    return getattr(peers, what)(words.split(), device, option)


def percent(what: str, value: float) -> dict[str, Any]:
    return {"what": what, "percent": 100 * value}
