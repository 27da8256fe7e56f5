"""One training run that changes its layout twice, is exported, and writes text; no step may be lost on the way.

    python -m tests.campaigns.layout_chain --output benchmarks/results/layout_chain_cpu.json
    python -m tests.campaigns.layout_chain --layouts "1" "2 --expert-model-parallel-size 2" \
        "2 --tensor-model-parallel-size 2" --output ...                     on a machine with two GPUs

Default layouts: one rank, eight ranks with the experts spread over all of them, four ranks with two tensor-parallel
halves of two pipeline stages. Each takes up the checkpoint of the one before. The same run on one rank without a stop
is the reference: the chain's log must have every step once, with the same tokens consumed and learning rate, and losses
within ``--tolerance`` of it. Every checkpoint is verified, the last one exported to Hugging Face format (read back and
compared), and ``transformers`` continues a prompt with it. Everything goes through the project's command lines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron.optimus.config.load import load
from megatron.optimus.training.metrics import read_metrics
from tests.campaigns.rank_process import ROOT

LAYOUTS = (
    "1",
    "8 --expert-model-parallel-size 8",
    "4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
)
PROMPT = "def __init__(self"


class Chain:
    """The commands of one folder, each with its time and what it was for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: list[dict[str, Any]] = []

    def run(self, what: str, *words: object) -> str:
        """Runs one of the project's programs; its output. Raises SystemExit with its last lines if it fails."""
        command = [str(word) for word in words]
        shown = shlex.join(command).replace(f"{ROOT}{os.sep}", "").replace(str(self.folder), "RUN")
        print(f"== {what}\n   {shown}", flush=True)
        began = time.monotonic()
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(
            [sys.executable, *command], check=False, capture_output=True, text=True, cwd=ROOT, env=environment
        )
        if done.returncode:
            raise SystemExit(f"{what} failed ({done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        self.commands.append({"what": what, "command": shown, "seconds": round(time.monotonic() - began, 1)})
        return done.stdout + done.stderr

    def prepare(self, corpus_mb: int, vocab_size: int) -> tuple[Path, Path]:
        """Tokenizer and token files of this Python's standard library."""
        corpus, tokenizer, prefix = self.folder / "corpus.jsonl", self.folder / "tokenizer", self.folder / "corpus"
        self.run("corpus", ROOT / "examples/local/build_corpus.py", "--output", corpus, "--max-mb", corpus_mb)
        train = ["--input", corpus, "--output", tokenizer, "--vocab-size", vocab_size]
        self.run("tokenizer", ROOT / "tools/train_tokenizer.py", *train)
        words = ["--input", corpus, "--output-prefix", prefix, "--tokenizer-model", tokenizer, "--append-eod"]
        self.run("token files", ROOT / "tools/preprocess_data.py", *words)
        return tokenizer, Path(f"{prefix}_text_document")

    def train(self, what: str, layout: str, options: list[object], until: int) -> str:
        ranks, *parallel = layout.split()
        words = ["-m", "megatron.optimus.launch", "--nproc-per-node", ranks, *options, *parallel]
        return self.run(what, *words, "--exit-interval", until)


def compare(chain: list[dict[str, Any]], whole: list[dict[str, Any]]) -> dict[str, Any]:
    """What the two logs say of each other, step by step."""
    assert [line["step"] for line in chain] == [line["step"] for line in whole], "steps are missing or double"
    for key in ("consumed_tokens", "lr"):
        assert [line[key] for line in chain] == [line[key] for line in whole], f"{key} differs"
    deviations = [abs(one["loss"] / other["loss"] - 1) for one, other in zip(chain, whole, strict=True)]
    return {
        "largest_relative_deviation_of_the_loss": max(deviations),
        "losses": [line["loss"] for line in chain],
        "losses_of_one_rank": [line["loss"] for line in whole],
    }


def generate(folder: Path, num_tokens: int) -> str:
    """The prompt, continued greedily by the export in transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=num_tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), help='"RANKS OPTIONS" of each part of the run')
    parser.add_argument("--preset", default="mula-tiny")
    parser.add_argument("--steps", type=int, default=12, help="of each part")
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--corpus-mb", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative, of each step's loss")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    steps, parts = arguments.steps, arguments.layouts
    total = steps * len(parts)
    with tempfile.TemporaryDirectory() as name:
        chain = Chain(Path(name))
        preset: list[object] = ["--preset", arguments.preset]
        vocab_size = load([*map(str, preset)]).config.model.vocab_size
        tokenizer, data = chain.prepare(arguments.corpus_mb, vocab_size)
        options = [*preset, "--data-path", data, "--tokenizer-model", tokenizer, "--train-iters", total]
        options += ["--micro-batch-size", arguments.micro_batch_size, "--seq-length", arguments.seq_length]
        options += ["--eval-interval", 0, "--log-interval", 1, "--lr-warmup-iters", 4, "--device", arguments.device]
        options += ["--save-interval", max(1, steps // 2), "--save-retain", 2 * len(parts)]
        whole, own = chain.folder / "whole", chain.folder / "chain"
        chain.train("one rank, no stop", "1", [*options, "--run-dir", whole], total)
        resumed = []
        for number, layout in enumerate(parts, start=1):
            said = chain.train(f"ranks {layout}", layout, [*options, "--run-dir", own], number * steps)
            resumed += [line.split("] ")[-1] for line in said.splitlines() if "resumed from" in line]
        resumed = [line.replace(str(chain.folder), "RUN") for line in resumed]
        assert len(resumed) == len(parts) - 1, resumed
        found = compare(list(read_metrics(own / "metrics.jsonl")), list(read_metrics(whole / "metrics.jsonl")))
        verified = chain.run("every checkpoint", ROOT / "tools/verify_checkpoint.py", own / "checkpoints")
        words = [own / "checkpoints", own / "hf", "--to", "hf", "--tokenizer", tokenizer, "--verify"]
        chain.run("export", ROOT / "tools/convert_checkpoint.py", *words)
        text = generate(own / "hf", 48)
    assert found["largest_relative_deviation_of_the_loss"] <= arguments.tolerance, found
    assert len(text) > len(PROMPT)
    evidence = {
        "layouts": parts,
        "steps": total,
        "preset": arguments.preset,
        "resumed": resumed,
        "tolerance": arguments.tolerance,
        **found,
        "checkpoints_verified": [line.replace(name, "RUN") for line in verified.splitlines() if line.strip()],
        "generated": text,
        "commands": chain.commands,
        "host": f"{platform.machine()}, {os.cpu_count()} cores, device {arguments.device}",
    }
    arguments.output.write_text(json.dumps(evidence, indent=1) + "\n")
    print(
        f"{total} steps over {len(parts)} layouts; losses within {found['largest_relative_deviation_of_the_loss']:.1e}"
    )
    print(text)


if __name__ == "__main__":
    main()
