"""How far gradients in bf16 and in float8 are from those in fp32, tensor by tensor, on one GPU.

    python benchmarks/fp8_gradients.py --out fp8_gradients.json
    python benchmarks/fp8_gradients.py --data DATA/tokens_text_document --layers 12
    python benchmarks/fp8_gradients.py --device cpu --width 64 --layers 1 --sequences 1        bf16 alone: that it runs

The 720M MoE of time_to_loss.py, or fewer layers of it, at its initial weights rounded to bf16, so that the three
programs have the same. An error is the norm of the difference over the norm of the fp32 gradient. In a MoE a part of it
is not of the products: where two experts have nearly the same score, rounding sends a token to another one. ``--dense``
has none of that. Tokens are random without ``--data``.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from provenance import commit

from megatron.optimus.config.load import load
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights
from megatron.optimus.parallel.converters import fp8

SEQ_LENGTH = 1024


def words(args: argparse.Namespace) -> list[str]:
    """The model's options."""
    width = args.width
    found = f"--num-layers {args.layers} --hidden-size {width} --num-attention-heads {width // 64} --vocab-size 32000 "
    found += f"--seq-length {SEQ_LENGTH} --qk-layernorm-scope head --norm-epsilon 1e-5 --data-path TOKENS "
    if args.dense:
        return (found + f"--ffn-hidden-size {width * 11 // 4}").split()
    return (found + f"--num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size {width // 2}").split()


def gradients(decoder: Decoder, tokens_BS: Tensor, labels_BS: Tensor) -> dict[str, Tensor]:
    """Every parameter's gradient of the mean loss, in fp32."""
    output = decoder(tokens_BS, labels_BS)
    (output.loss_sum / labels_BS.numel()).backward()
    return {name: param.grad.float() for name, param in decoder.named_parameters() if param.grad is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--data", type=Path, help="prefix of a token file of uint16; its first tokens are taken")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, config = torch.device(args.device), load(words(args)).config.model
    count = args.sequences * SEQ_LENGTH + 1
    if args.data is None:
        ids = torch.randint(0, config.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
    else:
        ids = torch.from_numpy(np.fromfile(args.data.with_suffix(".bin"), np.uint16, count).astype(np.int64))
    tokens_BS, labels_BS = (part.view(args.sequences, SEQ_LENGTH).to(device) for part in (ids[:-1], ids[1:]))
    found: dict[str, dict[str, Tensor]] = {}
    for precision in ("fp32", "bf16", "fp8") if args.device == "cuda" else ("fp32", "bf16"):
        with torch.device("meta"):
            decoder = Decoder(config)
        initialize_weights(decoder, seed=1, device=device, dtype=torch.bfloat16)
        if precision == "fp32":
            decoder.float()
        if precision == "fp8":
            fp8.convert(decoder)
        found[precision] = gradients(decoder, tokens_BS, labels_BS)
    exact = found.pop("fp32")
    errors: dict[str, dict[str, list[float]]] = {}
    for precision, grads in found.items():
        for name, grad in grads.items():
            kind = re.sub(r"layers\.\d+\.", "", name)
            error = float((grad - exact[name]).norm() / exact[name].norm())
            errors.setdefault(kind, {}).setdefault(precision, []).append(error)
    print("| gradient of | " + " | ".join(f"{precision}: median, largest of the layers" for precision in found) + " |")
    print("|---|" + "---|" * len(found))
    for kind, by_precision in errors.items():
        cells = [f"{statistics.median(by_precision[one]):.4f}, {max(by_precision[one]):.4f}" for one in found]
        print(f"| {kind} | {' | '.join(cells)} |")
    if args.out:
        name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        about = {"command": " ".join(sys.argv), "commit": commit(), "device": name, "errors": errors}
        args.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
