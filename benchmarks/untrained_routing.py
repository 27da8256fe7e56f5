"""How unevenly an untrained model routes random tokens, layer by layer: what benchmarks of training steps run on.

    python benchmarks/untrained_routing.py --layers 12 --out benchmarks/results/untrained_routing_20b.json

Forward of single layers of a preset, in fp32 on the CPU, one behind the other, each with weights of its own seed, in
the memory of one. ``alike``: mean cosine between the tokens that a layer gives. ``busiest_expert`` and
``busiest_of_ranks``: slots over the mean, of experts, and of ranks that hold equal shares of them in order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

import torch
from provenance import commit

from megatron.optimus.config.load import load
from megatron.optimus.layers.rope import rope_table
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights
from megatron.optimus.moe.layer import MoE

CPU = torch.device("cpu")


def layer_of(model: Any, seed: int) -> Decoder:
    """A decoder of one layer."""
    with torch.device("meta"):
        decoder = Decoder(model)
    initialize_weights(decoder, seed=seed, device=CPU, dtype=torch.float32)
    return decoder


def busiest(counts_E: torch.Tensor, ranks: int) -> float:
    loads = counts_E.double().view(ranks, -1).sum(dim=1)
    return float(loads.max() / loads.mean())


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="mula-20b-a2b")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = load(["--preset", args.preset, "--num-layers", "1", "--data-path", "RANDOM_TOKENS"]).config.model
    rope = rope_table(args.tokens, model, CPU)
    tokens = torch.randint(0, model.vocab_size, (1, args.tokens), generator=torch.Generator().manual_seed(0))
    x_BSD, rows = None, []
    for number in range(args.layers):
        decoder = layer_of(model, seed=number)
        if x_BSD is None:
            x_BSD = decoder.embedding(tokens)
        seen: list[Any] = []
        [moe] = [module for module in decoder.modules() if isinstance(module, MoE)]
        moe.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output[1].counts_E))
        x_BSD = decoder.layers[0](x_BSD, rope)[0]
        unit_TD = torch.nn.functional.normalize(x_BSD.flatten(0, 1), dim=1)
        row: dict[str, Any] = {"layer": number, "alike": float(unit_TD.mean(dim=0).square().sum())}
        row["busiest_expert"] = busiest(seen[0], len(seen[0]))
        row["busiest_of_ranks"] = {ranks: busiest(seen[0], ranks) for ranks in args.ranks}
        rows.append(row)
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
    means = {ranks: statistics.fmean(row["busiest_of_ranks"][ranks] for row in rows) for ranks in args.ranks}
    command = " ".join(["benchmarks/untrained_routing.py", *sys.argv[1:]])
    about = {"command": command, "torch": torch.__version__, "commit": commit(), "mean_busiest_of_ranks": means}
    args.out.write_text(json.dumps({**about, "layers": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
