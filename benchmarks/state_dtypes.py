"""What moments in bf16 and 8 bits cost in quality: loss curves of one small MoE with each, on the same batches.

    python benchmarks/state_dtypes.py --out benchmarks/results/state_dtypes_cpu.json

A Mula of two layers learns the bytes of this Python's standard library with this package's AdamW. A second fp32 run
with other initial weights shows how far two equally good runs lie apart. CPU, fp32 arithmetic, a few minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from deepspeed_ext.optimizers import ShardableOptimizer, ShardOptimizer
from deepspeed_ext.optimizers.elementwise import ShardAdam
from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights

BATCH, LENGTH, WARMUP, TAIL = 8, 64, 20, 25
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=64,
    vocab_size=256,
    max_position_embeddings=LENGTH,
)
BYTES = {"fp32": 8.0, "bf16": 4.0, "int8": 2 + 8 / 256}  # two moments


class AdamW(ShardableOptimizer):
    """The sharded optimizer's AdamW on whole parameters."""

    def shard_optimizer(self, group: Mapping[str, Any]) -> ShardOptimizer:
        return ShardAdam()


def corpus() -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def train(tokens: Tensor, state_dtype: str, beta2: float, seed: int, steps: int) -> list[float]:
    model = Decoder(MODEL)
    initialize_weights(model, seed=seed, device=torch.device("cpu"), dtype=torch.float32)
    options = {"betas": (0.9, beta2), "eps": 1e-8, "weight_decay": 0.1, "state_dtype": state_dtype}
    optimizer = AdamW(model.parameters(), {"lr": 0.0, **options})
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(tokens) - LENGTH - 1, (BATCH, 1), generator=generator)
        batch = tokens[starts + torch.arange(LENGTH + 1)]
        output = model(batch[:, :-1], batch[:, 1:])
        assert output.loss_sum is not None
        loss = output.loss_sum / (BATCH * LENGTH)
        (loss + 0.01 * output.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / WARMUP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokens = corpus()
    rows = []
    for beta2 in (0.95, 0.999):
        for name, state_dtype, seed in (
            ("fp32", "fp32", 0),
            ("fp32, other initial weights", "fp32", 1),
            ("bf16", "bf16", 0),
            ("int8", "int8", 0),
        ):
            losses = train(tokens, state_dtype, beta2, seed, args.steps)
            rows.append({"beta2": beta2, "states": name, "bytes": BYTES[state_dtype], "losses": losses})
            reference = next(row["losses"] for row in rows if row["beta2"] == beta2)
            last, base = (sum(curve[-TAIL:]) / TAIL for curve in (losses, reference))
            print(
                f"beta2 {beta2:5}  moments {name:28s} {BYTES[state_dtype]:5.2f} B/parameter  loss of the last {TAIL} "
                f"steps {last:.4f} ({last - base:+.4f})",
                flush=True,
            )
    if args.out:
        result = {"command": " ".join(sys.argv), "torch": torch.__version__, "steps": args.steps, "runs": rows}
        args.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
