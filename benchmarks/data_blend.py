#!/usr/bin/env python3
"""The realised shares of a blend with stages, as numbers and as a picture.

    python benchmarks/data_blend.py --output benchmarks/results/data_blend

A stand-in for a 2 T token run: seven corpora in sparse files, 1.5 epochs of the small ones, other weights for the last
tenth. Written are the largest distance from the share over windows all along the run, the time to find a sample
anywhere, and the picture of `optimus inspect-data`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_startup import write_sparse_pair

from megatron.optimus.commands.inspect_data import plot_shares
from megatron.optimus.config.schema import DataConfig
from megatron.optimus.data.dataset import Split
from megatron.optimus.data.mixture import Mixture
from megatron.optimus.data.sources import read_sources

GIGA, SEQ_LENGTH, SAMPLES = 10**9, 4096, 488_281_250
CORPORA = {  # tokens in 1e9, weight, weight in the last tenth
    "web": (1700, 0.82, 0.4),
    "code": (120, 0.09, 0.2),
    "papers": (60, 0.04, 0.1),
    "math": (12, 0.009, 0.1),
    "forum": (40, 0.02, 0.05),
    "wiki": (4, 0.003, 0.05),
    "books": (30, 0.018, 0.1),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", help="path without suffix: .json and .png are written")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines, last = ["corpora:"], []
        for corpus, (tokens, weight, later) in CORPORA.items():
            for part in range(4):
                write_sparse_pair(folder / f"{corpus}-{part}", tokens * GIGA // 4)
            lines.append(f'  {corpus}: {{paths: ["{corpus}-*"], weight: {weight}}}')
            last.append(f"{corpus}: {later}")
        change = SAMPLES * 9 // 10
        lines += ["stages:", f"  - {{start_samples: {change}, weights: {{{', '.join(last)}}}}}"]
        (folder / "blend.yaml").write_text("\n".join(lines) + "\n")
        sources = read_sources(DataConfig(data_file_list=str(folder / "blend.yaml")))
        mixture = Mixture(sources, SEQ_LENGTH, split="1,0,0", part=Split.TRAIN, seed=1)
        largest, times, window = 0.0, [], 20_000
        before_change = np.array(mixture.counts(change))
        for start in np.random.default_rng(0).integers(0, SAMPLES - window, 40).tolist():
            fresh = Mixture(sources, SEQ_LENGTH, split="1,0,0", part=Split.TRAIN, seed=1)
            started = time.perf_counter()
            fresh.ids_at(start, 1)
            times.append(time.perf_counter() - started)
            if start < change < start + window:
                continue
            stage = int(start >= change)
            base = np.array(mixture.counts(start)) - before_change * stage
            corpora = mixture.corpora_at(start, window)
            shares = [float(weight) for weight in sources.stages[stage].weights]
            n = start - change * stage + np.arange(1, window + 1)
            for i, share in enumerate(shares):
                off = base[i] + np.cumsum(corpora == i) - n * (share / sum(shares))
                largest = max(largest, float(abs(off).max()))
        result = {
            "samples": SAMPLES,
            "windows": len(times),
            "window": window,
            "largest_distance_from_share_in_samples": largest,
            "seconds_to_first_sample_anywhere_median": round(float(np.median(times)), 4),
            "seconds_to_first_sample_anywhere_max": round(max(times), 4),
            "plan": [vars(corpus) | {"epochs": round(corpus.epochs, 4)} for corpus in mixture.plan(SAMPLES)],
        }
        print(json.dumps(result, indent=1))
        if args.output:
            Path(f"{args.output}.json").write_text(json.dumps(result, indent=1) + "\n")
            plot_shares(mixture, SAMPLES, Path(f"{args.output}.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
