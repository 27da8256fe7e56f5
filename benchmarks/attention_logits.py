"""The largest attention logits, which QK-clip needs: the kernel beside products in PyTorch and attention's forward.

    python benchmarks/attention_logits.py --out attention_logits_h200.txt

One GPU, bf16, causal, medians of device time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from training_step import between, mark

from megatron.optimus import ops
from megatron.optimus.ops.attention_logits import _largest_scores

SHAPES = [(32, 12, 12, 1024, 64), (4, 16, 16, 4096, 128), (2, 32, 8, 4096, 128), (2, 16, 16, 4096, 192)]


def median_ms(run: Callable[[], object], device: torch.device, repetitions: int = 20) -> float:
    for _ in range(3):
        run()
    marks = [mark(device)]
    for _ in range(repetitions):
        run()
        marks.append(mark(device))
    torch.cuda.synchronize()
    return statistics.median(between(*pair) for pair in pairwise(marks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}", ""]
    lines += ["| sequences, query heads, key heads, length, width | products | kernel | attention's forward |"]
    lines += ["|---|---|---|---|"]
    for batch, heads, groups, length, width in SHAPES:
        made = [torch.randn(batch, length, n, width, device=device).bfloat16() for n in (heads, groups, groups)]
        q, k, v = (x.transpose(1, 2) for x in made)
        at = torch.arange(length, device=device)
        times = [
            median_ms(lambda q=q, k=k, at=at: _largest_scores(q, k, at, at, None, None), device, 5),
            median_ms(lambda q=q, k=k, at=at: ops.largest_logits(q, k, at, at), device),
            median_ms(
                lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), device
            ),
        ]
        cells = " | ".join(f"{one:.3f} ms" for one in times)
        lines.append(f"| {batch}, {heads}, {groups}, {length}, {width} | {cells} |")
    text = "\n".join(lines)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
