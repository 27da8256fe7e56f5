"""Minutes and tokens to a loss on real text, on one device: the training program beside its peers.

    python benchmarks/time_to_loss.py prepare DATA                     the text, a tokenizer, token files
    python benchmarks/time_to_loss.py sweep DATA --system ours --rates 3e-4 6e-4 1.2e-3 --steps 75 --out result.json
    python benchmarks/time_to_loss.py run DATA --system transformers --rate 6e-4 --seconds 200 --out result.json
    python benchmarks/time_to_loss.py table result.json --picture time_to_loss.png
    ... run DATA --model tiny --device cpu --system ours --rate 1e-3 --steps 10                      that it runs

``prepare`` takes every Python source in this interpreter's site-packages, each content once, trains a BPE of 32,000
tokens on a part of it and tokenizes all; 1% of the documents, by hash, are held out. The text is what the machine has,
so results of two machines are not of the same text; the result names its tokens.

Every system trains an architecture of equal size on the same samples in the same order, with the same schedule
(warm-up of 50 steps, cosine to a tenth), betas (0.9, 0.95), weight decay 0.1 and clipping at 1, from an initialisation
of its own. The clock counts training steps alone, from the end of the first one, without evaluations. A loss is the
mean of training losses over WINDOW steps: no token is seen twice, so it is the loss on unseen text; the held-out loss
stands beside it.
``sweep`` makes short runs, each with a schedule of that length, and the table prints them all. Systems:

ours, ours-muon, ours-normuon, ours-fp8      the training program as users start it
transformers, torchtitan                     see time_to_loss_peers.py
nanochat                                     its optimizer recipe in the loop of transformers, dense models only
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import site
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from provenance import commit  # noqa: E402

WINDOW = 10  # steps whose mean is a loss of the table
SEQ_LENGTH = 1024
_COMMON = "--seq-length 1024 --vocab-size 32000 --hidden-size 1024 --num-attention-heads 16 --qk-layernorm-scope head "
MODELS = {
    "moe-720m": _COMMON + "--num-layers 12 --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 512 "
    "--moe-aux-loss-coeff 0.01 --global-batch-size 128",
    "dense-350m": _COMMON + "--num-layers 24 --ffn-hidden-size 2816 --global-batch-size 128",
    # 134M with a head of its own, as every program here has it: the peers' FSDP does not tie it.
    "dense-120m": "--seq-length 1024 --vocab-size 32000 --hidden-size 768 --num-attention-heads 12 --num-layers 12 "
    "--ffn-hidden-size 2048 --qk-layernorm-scope head --global-batch-size 128",
    "tiny": "--seq-length 128 --vocab-size 32000 --hidden-size 64 --num-attention-heads 2 --num-layers 2 "
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --qk-layernorm-scope head --global-batch-size 8",
    "tiny-dense": "--seq-length 128 --vocab-size 32000 --hidden-size 64 --num-attention-heads 2 --num-layers 2 "
    "--ffn-hidden-size 128 --qk-layernorm-scope head --global-batch-size 8",
}
MICRO_BATCHES = {"ours": 64, "transformers": 16, "torchtitan": 32}
OURS = {
    "ours": "--optimizer adam",
    "ours-muon": "--optimizer muon",
    "ours-normuon": "--optimizer normuon",
    "ours-fp8": "--optimizer adam --fp8 hybrid",
}
PEERS = ("transformers", "torchtitan", "nanochat")
RECIPE = "--lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0"
EVALUATIONS = 10  # in a run
HELD_OUT_BATCHES = 2


def words(args: argparse.Namespace, data: Path) -> list[str]:
    """The training program's options: peers read model, data and schedule from the configuration that they make."""
    model = MODELS[args.model].split()
    batch = int(model[model.index("--global-batch-size") + 1])
    kind = "ours" if args.system in OURS else "transformers" if args.system == "nanochat" else args.system
    micro = min(batch, args.micro_batch_size or MICRO_BATCHES[kind])
    options = [*model, "--norm-epsilon", "1e-5", *RECIPE.split(), "--params-dtype", "bf16", "--device", args.device]
    options += ["--micro-batch-size", str(micro), "--train-iters", str(args.steps), "--seed", str(args.seed)]
    options += ["--lr", repr(args.rate), "--min-lr", repr(args.rate / 10)]
    options += ["--lr-warmup-iters", str(min(args.warmup, args.steps // 2))]
    options += ["--data-path", str(data / "tokens_text_document"), "--tokenizer-model", str(data / "tokenizer")]
    options += ["--split", "99,1,0", "--eval-interval", str(max(1, args.steps // EVALUATIONS))]
    options += ["--eval-iters", str(HELD_OUT_BATCHES), "--log-interval", "25"]
    return options + OURS.get(args.system, "").split() + args.options


def prepare(data: Path, args: argparse.Namespace) -> None:
    """Writes DATA/corpus.jsonl, DATA/tokenizer and DATA/tokens_text_document.{bin,idx}."""
    data.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    corpus, sample = data / "corpus.jsonl", data / "sample.jsonl"
    size = sampled = 0
    with corpus.open("w") as out, sample.open("w") as part:
        for folder in [Path(one) for one in args.sources or site.getsitepackages()]:
            for path in sorted(folder.rglob("*.py")):
                content = path.read_bytes()
                digest = hashlib.sha256(content).digest()
                is_taken = int.from_bytes(digest[1:3], "big") < args.files * 65536 / 100
                if not is_taken or not 200 <= len(content) <= 1_000_000 or digest in seen:
                    continue
                seen.add(digest)
                line = json.dumps({"text": content.decode(errors="replace")}) + "\n"
                out.write(line)
                size += len(content)
                if digest[0] < args.sample * 256 // 100:
                    part.write(line)
                    sampled += len(content)
    print(f"{len(seen):,} files, {size / 1e6:.1f} MB; {sampled / 1e6:.1f} MB for the tokenizer", flush=True)
    if args.tokenizer is not None:
        shutil.copytree(args.tokenizer, data / "tokenizer", dirs_exist_ok=True)
    else:
        vocab_size = ("--vocab-size", args.vocab_size)
        _optimus("train-tokenizer", "--input", sample, *vocab_size, "--output", data / "tokenizer")
    _optimus(
        *("preprocess", "--input", corpus, "--output-prefix", data / "tokens", "--tokenizer-model", data / "tokenizer"),
        *("--append-eod", "--overwrite"),
    )


def _optimus(*command: Any) -> None:
    subprocess.run([sys.executable, "-m", "megatron.optimus", *map(str, command)], check=True, cwd=ROOT)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains one system; returns its steps, seconds, losses and what it ran on."""
    folder = Path(args.run_dir or tempfile.mkdtemp(dir=args.data))
    options = words(args, args.data)
    if args.system in OURS:
        command = ["-m", "megatron.optimus.pretrain", *options, "--run-dir", str(folder)]
        command += [] if args.run_dir else ["--save-interval", "0", "--save", str(folder / "none")]
    else:
        peer = [str(ROOT / "benchmarks/time_to_loss_peers.py"), args.system, str(folder), str(args.seconds)]
        command = [*peer, "--", *options]
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT)
    try:
        code = process.wait(args.seconds + 120 if args.seconds else None)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = -1
    if not (folder / "metrics.jsonl").exists():
        raise SystemExit(f"{args.system} ended with exit code {code} before its first step; its output is above")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    about = json.loads(path.read_text()) if (path := folder / "about.json").exists() else {}
    if not args.run_dir:
        shutil.rmtree(folder)
    print(f"{args.system}: rate {args.rate:g}, {len(lines)} steps, loss {_last(lines):.4f}", flush=True)
    return {
        "system": args.system,
        "rate": args.rate,
        "seed": args.seed,
        "steps": args.steps,
        "exit_code": code,
        "loss": [one["loss"] for one in lines],
        "tokens": [one["consumed_tokens"] for one in lines],
        # From the end of the first step, which compiles kernels, in every system.
        "seconds": _sums([one["step_time_s"] for one in lines]),
        "valid": [[one["step"], one["valid_loss"]] for one in lines if one.get("valid_loss") is not None],
        "options": " ".join(options),
        "commit": commit(),
        **about,
    }


def _sums(times: list[float]) -> list[float]:
    total, found = 0.0, []
    for number, time in enumerate(times):
        total += time if number else 0.0
        found.append(round(total, 4))
    return found


def _last(lines: list[dict[str, Any]]) -> float:
    last = [one["loss"] for one in lines[-WINDOW:] if one["loss"] is not None]
    return sum(last) / len(last) if last else math.nan


def smoothed(one: dict[str, Any]) -> list[float]:
    """The loss at each step: the mean of the WINDOW steps that end there."""
    losses = [math.nan if loss is None else loss for loss in one["loss"]]
    return [sum(losses[max(0, at - WINDOW + 1) : at + 1]) / min(WINDOW, at + 1) for at in range(len(losses))]


def reached(one: dict[str, Any], loss: float) -> int | None:
    """The first step after WINDOW steps whose loss is not above ``loss``; None where there is none."""
    return next((at for at, value in enumerate(smoothed(one)) if at >= WINDOW - 1 and value <= loss), None)


def _name(one: dict[str, Any]) -> str:
    is_fp8 = "--fp8 hybrid" in one["options"] and "fp8" not in one["system"]
    return f"{one['system']}{', float8' if is_fp8 else ''}, rate {one['rate']:g}"


def table(results: dict[str, Any], losses: list[float]) -> str:
    """Markdown: minutes (and tokens) to given losses for every run, and the sweeps."""
    lines = ["| run | tokens/s | " + " | ".join(f"loss {loss:g}" for loss in losses) + " | last loss | held out |"]
    lines.append("|" + "---|" * (len(losses) + 4))
    for one in results["runs"]:
        cells = []
        for loss in losses:
            at = reached(one, loss)
            cells.append("-" if at is None else f"{one['seconds'][at]:.0f} s, {one['tokens'][at] / 1e6:.1f}M tokens")
        pace = (one["tokens"][-1] - one["tokens"][0]) / one["seconds"][-1]
        held = f"{one['valid'][-1][1]:.4f} (step {one['valid'][-1][0]})" if one["valid"] else "-"
        name = f"{_name(one)}, seed {one['seed']}, {len(one['loss'])} of {one['steps']} steps"
        lines.append(f"| {name} | {pace:,.0f} | {' | '.join(cells)} | {smoothed(one)[-1]:.4f} | {held} |")
    lines += ["", "| sweep | rate: loss at its end |", "|---|---|"]
    sweeps: dict[str, list[str]] = {}
    for one in results["sweeps"]:
        name = f"{one['system']}, {one['steps']} steps"
        sweeps.setdefault(name, []).append(f"{one['rate']:g}: {smoothed(one)[-1]:.4f}")
    lines += [f"| {name} | {'; '.join(found)} |" for name, found in sweeps.items()]
    return "\n".join(lines) + "\n"


def draw(results: dict[str, Any], path: Path) -> None:
    """The loss over minutes and over tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    seeds = {one["seed"] for one in results["runs"]}
    for one in results["runs"]:
        label, losses = _name(one) + (f", seed {one['seed']}" if len(seeds) > 1 else ""), smoothed(one)
        left.plot([seconds / 60 for seconds in one["seconds"]], losses, label=label)
        right.plot([tokens / 1e6 for tokens in one["tokens"]], losses, label=label)
    left.set(xlabel="minutes of training", ylabel=f"loss (mean of {WINDOW} steps)", ylim=(None, 7))
    right.set(xlabel="million tokens")
    right.legend()
    figure.suptitle(f"{results['model']}, {results['device']}")
    figure.savefig(path, dpi=110)


def _add(args: argparse.Namespace, key: str, found: dict[str, Any]) -> None:
    """Adds a run to the result file, so that runs of several calls come into one."""
    about = {"model": args.model, "device": _device_name(args.device), "runs": [], "sweeps": []}
    results = json.loads(args.out.read_text()) if args.out.exists() else about
    if (results["model"], results["device"]) != (about["model"], about["device"]):
        raise SystemExit(f"{args.out} holds runs of {results['model']} on {results['device']}; give another --out")
    results[key].append(found)
    args.out.write_text(json.dumps(results) + "\n")


def _device_name(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_name()) if device == "cuda" else f"{device}, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("prepare")
    first.add_argument("data", type=Path)
    first.add_argument(
        "--sources", nargs="+", help="folders of Python sources; default: the interpreter's site-packages"
    )
    first.add_argument("--files", type=float, default=100, help="percent of the files, by hash, that are taken")
    first.add_argument("--vocab-size", type=int, default=32000, help="of the tokenizer; the models here have 32,000")
    first.add_argument("--sample", type=int, default=20, help="percent of the files that the tokenizer is trained on")
    first.add_argument("--tokenizer", type=Path, help="folder of a tokenizer to take instead of training one")
    for name in ("sweep", "run"):
        one = commands.add_parser(name)
        one.add_argument("data", type=Path)
        one.add_argument("--system", required=True, choices=[*OURS, *PEERS])
        one.add_argument("--model", default="moe-720m", choices=MODELS)
        one.add_argument("--device", default="cuda")
        one.add_argument("--steps", type=int, default=300)
        one.add_argument("--warmup", type=int, default=50, help="steps; at most half of the run")
        one.add_argument("--seed", type=int, default=1234)
        one.add_argument("--seconds", type=float, default=0.0, help="ends a peer's run early; 0: never")
        one.add_argument("--micro-batch-size", type=int)
        one.add_argument("--out", type=Path, default=Path("time_to_loss.json"))
        one.add_argument("--run-dir", help="keep ours, with its checkpoints, there")
        one.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="further options of the program")
        if name == "sweep":
            one.add_argument("--rates", nargs="+", type=float, required=True)
        else:
            one.add_argument("--rate", type=float, required=True)
    last = commands.add_parser("table")
    last.add_argument("result", type=Path)
    last.add_argument("--losses", nargs="+", type=float, default=[5.0, 4.0, 3.5, 3.0, 2.7])
    last.add_argument("--picture", type=Path)
    args = parser.parse_args()
    if args.command == "prepare":
        prepare(args.data.resolve(), args)
    elif args.command == "table":
        results = json.loads(args.result.read_text())
        sys.stdout.write(table(results, args.losses))
        if args.picture is not None:
            draw(results, args.picture)
    elif args.command == "sweep":
        args.data = args.data.resolve()
        for rate in args.rates:
            args.rate = rate
            _add(args, "sweeps", run(args))
    else:
        args.data = args.data.resolve()
        _add(args, "runs", run(args))


if __name__ == "__main__":
    main()
