"""Where the time of the expert layer goes, kernel by kernel, by Nsight Compute's counters, against two ceilings.

    python benchmarks/moe_layer_ncu.py --shape mula-7b --tokens 16384 --out benchmarks/results/moe_layer_ncu_h200
    python benchmarks/moe_layer_ncu.py --table benchmarks/results/moe_layer_ncu_h200.json

One forward and backward of moe_layer.py's layer, router included, under ``ncu``, which runs each kernel by itself,
several times: nothing overlaps, and work that products take along counts as theirs. Clocks and caches are left alone.
The ceilings are measured first, in this process without ncu: a bf16 product of 8192^3, and a copy of 2 GiB, bytes read
and written. "of the ceiling" is the larger of a kernel's two shares, FLOPs or bytes of DRAM, and says which it is.
Needs the cuda backend's kernels and ``ncu`` on the PATH. Writes OUT.json, and the table as OUT.txt.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from moe_layer import Layer, make_inputs, optimus
from moe_layer_shapes import shape_name, shape_of
from provenance import commit

METRICS = {
    "us": "gpu__time_duration.sum",
    "sm_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_percent": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "ghz": "sm__cycles_elapsed.avg.per_second",
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
}
UNITS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3, "second": 1e6, "s": 1e6}
UNITS |= {"cycle/second": 1e-9, "hz": 1e-9, "cycle/nsecond": 1.0, "ghz": 1.0, "mhz": 1e-3, "cycle/usecond": 1e-3}
UNITS |= {"byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "%": 1.0}


def run_once(shape: str, tokens: int) -> None:
    """What ncu looks at: one forward and backward after two others."""
    data = make_inputs(shape_of(shape), tokens, 0.0, "cuda", torch.bfloat16)
    layer = Layer(data, optimus("cuda")(data))
    for _ in range(2):
        layer.both()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    layer.both()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def ceilings() -> dict[str, float]:
    """Medians of ten: TFLOP/s of a product of 8192^3 in bf16, TB/s of a copy of 2 GiB."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source, target = (torch.empty(2**31, dtype=torch.uint8, device="cuda") for _ in range(2))
    product, copy = _milliseconds(lambda: a @ b), _milliseconds(lambda: target.copy_(source))
    return {"tflops": 2 * 8192**3 / product / 1e9, "tb_s": 2 * 2**31 / copy / 1e9}


def _milliseconds(call: Any) -> float:
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def counters(shape: str, tokens: int) -> list[dict[str, Any]]:
    """Every kernel in order: its name, microseconds, clock, shares of peaks and bytes of DRAM."""
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off", "--csv"]
    command += ["--page", "raw", "--metrics", ",".join(METRICS.values()), sys.executable, __file__]
    command += ["--child", "--shape", shape, "--tokens", str(tokens)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if done.returncode or first is None:
        sys.exit(f"ncu failed with code {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    units, *rows = csv.DictReader(io.StringIO("\n".join(lines[first:])))
    return [{"kernel": row["Kernel Name"], **{key: _value(row, units, key) for key in METRICS}} for row in rows]


def _value(row: dict[str, str], units: dict[str, str], key: str) -> float:
    name = METRICS[key]
    return float(row[name].replace(",", "")) * UNITS[units[name].lower()]


def label(kernels: list[dict[str, Any]], shape: str, tokens: int) -> None:
    """Gives the six products their names and FLOPs, by order of launch; several launches of one product share them."""
    width, inner, _, topk = shape_of(shape)
    one = 2 * tokens * topk * width * inner
    products = [kernel for kernel in kernels if "grouped_gemm_kernel<" in kernel["kernel"]]
    if len(products) < 6:
        sys.exit(f"{len(products)} products in {len(kernels)} kernels, where the cuda backend launches six or more")
    up, down, *activation, dx, ddown, dup = products
    for name, flops, launches in (
        ("up projection and SwiGLU", 2 * one, [up]),
        ("down projection", one, [down]),
        ("gradient of the activation", one, activation),
        ("gradient of x", 2 * one, [dx]),
        ("gradient of w_down", one, [ddown]),
        ("gradient of w_gate_up", 2 * one, [dup]),
    ):
        for launch in launches:
            launch |= {"product": name, "flops": flops}


def table(result: dict[str, Any]) -> str:
    """Products, each with all its launches, then every other kernel of 4 us or more, then the rest in one row."""
    tflops, tb_s = result["ceilings"]["tflops"], result["ceilings"]["tb_s"]
    head = f"# {result['command']}\n# {result['device']}, torch {result['torch']}, commit {result['commit']}; ceilings "
    head += f"{tflops:.0f} TFLOP/s and {tb_s:.2f} TB/s\n"
    head += "      us  TFLOP/s  DRAM GB  TB/s  of the ceiling  SM %  L2 %   GHz  what\n"
    groups: dict[str, list[dict[str, Any]]] = {}
    for index, kernel in enumerate(result["kernels"]):
        small = kernel["us"] < 4 and "product" not in kernel
        groups.setdefault(kernel.get("product") or ("others" if small else f"{index}"), []).append(kernel)
    lines = []
    for name, kernels in groups.items():
        us, dram = (sum(k[key] for k in kernels) for key in ("us", "dram_bytes"))
        flops = kernels[0].get("flops", 0)
        shares = {"FLOPs": flops / us / 1e6 / tflops, "bytes": dram / us / 1e6 / tb_s}
        bound = max(shares, key=lambda key: shares[key])
        sm, l2, ghz = (sum(k[key] * k["us"] for k in kernels) / us for key in ("sm_percent", "l2_percent", "ghz"))
        what = f"{name}, {len(kernels)} launches" if len(kernels) > 1 else name
        what = kernels[0]["kernel"][:70] if name.isdigit() else what
        rate = f"{flops / us / 1e6:7.0f}" if flops else 7 * " "
        lines.append(
            f"{us:8.1f}  {rate}  {dram / 1e9:7.2f}  {dram / us / 1e6:4.2f}  {shares[bound]:7.0%} {bound:6s}  {sm:4.0f}"
            f"  {l2:4.0f}  {ghz:4.2f}  {what}"
        )
    total, moved = (sum(k[key] for k in result["kernels"]) for key in ("us", "dram_bytes"))
    lines.append(f"{total:8.1f}           {moved / 1e9:7.2f}  {moved / total / 1e6:4.2f}  {45 * ' '}all, one by one")
    return head + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=shape_name, default="mula-7b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--table", type=Path, help="measure nothing: print the table of this .json")
    parser.add_argument("--out", type=Path, help="path without suffix")
    args = parser.parse_args()
    if args.table:
        try:
            text = table(json.loads(args.table.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"--table {args.table}: no result of this program: {error}")
        print(text)
        return
    if not torch.cuda.is_available():
        parser.error("it needs an NVIDIA GPU of compute capability 9.0; --table shows an earlier result anywhere")
    if args.child:
        run_once(args.shape, args.tokens)
        return
    if shutil.which("ncu") is None:
        parser.error("ncu is not on the PATH; it comes with Nsight Compute, in CUDA's toolkit")
    result: dict[str, Any] = {
        "command": " ".join(sys.argv), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "commit": commit(), "shape": args.shape, "tokens": args.tokens, "ceilings": ceilings(),
    }  # fmt: skip
    torch.cuda.empty_cache()  # the other process needs the memory
    result["kernels"] = counters(args.shape, args.tokens)
    for kernel in result["kernels"]:
        kernel["dram_bytes"] = kernel.pop("read") + kernel.pop("written")
    label(result["kernels"], args.shape, args.tokens)
    print(table(result))
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(result, indent=1))
        args.out.with_suffix(".txt").write_text(table(result) + "\n")


if __name__ == "__main__":
    main()
