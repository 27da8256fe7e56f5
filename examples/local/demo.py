"""The whole path on one machine: corpus, tokenizer, token files, pretraining with a resume, export, generated text.

``make demo`` calls it. Every stage is one of the project's own command lines, printed before it runs, so that each can
be repeated alone. Where torch sees GPUs it trains on up to two of them, otherwise with two CPU processes; two processes
share the experts (expert parallelism 2).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["def __init__(self", "class Test", "import os\n"]  # of the default corpus


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"), help="everything is written here")
    parser.add_argument("--corpus", type=Path, help="JSON lines with a text field; default: Python's standard library")
    parser.add_argument("--corpus-mb", type=int, default=24, help="size of the default corpus")
    parser.add_argument("--preset", default="mula-tiny")
    parser.add_argument("--train-iters", type=int, help="optimizer steps; default: the preset's")
    parser.add_argument("pretrain_options", nargs="*", help="after --: further options of megatron.optimus.pretrain")
    return parser.parse_args()


def run(title: str, *command: object) -> None:
    """Runs one stage; its failure ends the demo with its exit code (its own message has been printed)."""
    words = [str(word) for word in command]
    print(f"\n== {title}\n$ {shlex.join(words).replace(str(ROOT) + os.sep, '')}", flush=True)
    started = time.perf_counter()
    code = subprocess.run(words, check=False, env={**os.environ, "PYTHONPATH": python_path()}).returncode
    if code:
        sys.exit(code)
    print(f"   ({time.perf_counter() - started:.0f} s)", flush=True)


def python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def prepare_folder(run_dir: Path) -> None:
    """An empty folder with a mark of ours, or one of an earlier demo."""
    mark = run_dir / ".demo"
    if run_dir.exists() and not run_dir.is_dir():
        sys.exit(f"error: --run-dir {run_dir} is not a folder")
    if run_dir.exists() and any(run_dir.iterdir()) and not mark.exists():
        sys.exit(f"error: --run-dir {run_dir} holds files that no demo has written; name a new folder, or remove it")
    run_dir.mkdir(parents=True, exist_ok=True)
    mark.touch()


def prepare_data(run_dir: Path, corpus: Path, vocab_size: int) -> tuple[Path, Path]:
    """Trains the tokenizer and writes the token files; returns (tokenizer folder, data prefix).

    The results of an earlier demo are removed once the corpus has been read, which may have been a wrong file.
    """
    tokenizer, prefix = run_dir / "tokenizer", run_dir / "data" / "corpus"
    train_tokenizer = [ROOT / "tools/train_tokenizer.py", "--input", corpus, "--output", tokenizer]
    run("train a byte-level BPE tokenizer", sys.executable, *train_tokenizer, "--vocab-size", vocab_size, "--overwrite")
    for leftover in ("checkpoints", "data", "hf"):
        shutil.rmtree(run_dir / leftover, ignore_errors=True)
    for leftover in ("last_checkpoint.json", "metrics.jsonl", "expert_load_history.jsonl"):  # else the run goes on
        (run_dir / leftover).unlink(missing_ok=True)
    preprocess = [ROOT / "tools/preprocess_data.py", "--input", corpus, "--output-prefix", prefix]
    preprocess += ["--tokenizer-model", tokenizer, "--append-eod", "--workers", os.cpu_count() or 1]
    run("tokenize into Megatron .bin/.idx files", sys.executable, *preprocess)
    return tokenizer, Path(f"{prefix}_text_document")


def pretrain(arguments: argparse.Namespace, tokenizer: Path, data: Path, steps: int) -> None:
    """Trains half of the steps, stops, and resumes from the checkpoint for the rest."""
    processes = min(2, device_count()) or 2
    command = [sys.executable, "-m", "megatron.optimus.launch", "--nproc-per-node", processes]
    command += ["--preset", arguments.preset, "--run-dir", arguments.run_dir]
    command += ["--data-path", data, "--tokenizer-model", tokenizer, "--expert-model-parallel-size", processes]
    command += ["--train-iters", steps, "--save-interval", max(1, steps // 4), *arguments.pretrain_options]
    half = max(1, steps // 2)
    run(f"pretrain {arguments.preset}, first half", *command, "--exit-interval", half)
    if half < steps:
        run("resume from the checkpoint, second half", *command)


def device_count() -> int:
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def export(run_dir: Path) -> Path:
    """Converts the last checkpoint to Hugging Face format."""
    folder = run_dir / "hf"
    convert = [ROOT / "tools/convert_checkpoint.py", run_dir / "checkpoints", folder, "--to", "hf"]
    run("export to Hugging Face format", sys.executable, *convert, "--overwrite")
    return folder


def prompts_from(corpus: Path) -> list[str]:
    """The first words of the corpus's first documents: text of the kind that the model has been trained on."""
    from megatron.optimus.data.tokenize.corpus import read_documents

    prompts: list[str] = []
    for text in read_documents([corpus]):
        prompt = " ".join(text.split()[:4])[:60]
        if prompt and prompt not in prompts:
            prompts.append(prompt)
        if len(prompts) == len(PROMPTS):
            break
    return prompts


def generate(folder: Path, prompts: list[str]) -> list[str]:
    """Loads the export in transformers and continues each prompt (sampling, fixed seed)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from transformers.utils import logging

    logging.disable_progress_bar()
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        settings = {"max_new_tokens": 48, "do_sample": True, "temperature": 0.7, "top_k": 40}
        out = model.generate(**ids, **settings, pad_token_id=tokenizer.eos_token_id)
        texts.append(tokenizer.decode(out[0], skip_special_tokens=True))
    return texts


def report(run_dir: Path, preset: str, vocab_size: int, texts: list[str], seconds: float) -> bool:
    """Prints what came out and where it lies; True when the model has learned as much as the demo promises."""
    from megatron.optimus.report import figure
    from megatron.optimus.training.metrics import read_metrics

    metrics = read_metrics(run_dir / "metrics.jsonl")
    uniform = math.log(vocab_size)
    steps = [line["step"] for line in metrics]
    points = {
        label: [(line["step"], line[key]) for line in metrics if line.get(key) is not None]
        for label, key in (("training", "loss"), ("validation", "valid_loss"))
    }
    lines = {label: tuple(zip(*found, strict=True)) for label, found in points.items()}
    lines[f"a guess: ln({vocab_size}) = {uniform:.2f}"] = (steps[:1] + steps[-1:], [uniform, uniform])
    loss = "cross-entropy (nats per token)"
    figure.draw(run_dir / "loss.png", [figure.Panel(preset, "optimizer step", loss, lines, is_log_x=False)])
    valid = [line["valid_loss"] for line in metrics if "valid_loss" in line][-1]
    speed = sorted(line["tokens_per_second_per_device"] for line in metrics)[len(metrics) // 2]
    print("\n== generated by the export in transformers")
    for text in texts:
        print("-" * 60 + f"\n{text}")
    print("-" * 60)
    print(f"validation loss {valid:.3f} nats, {uniform - valid:.2f} below ln({vocab_size}) = {uniform:.3f} of a guess")
    print(f"{metrics[-1]['step']} steps, median {speed:,.0f} tokens/s per device, {seconds:.0f} s in all")
    for what, name in (
        ("loss curve", "loss.png"),
        ("report, for a browser", "report.html"),
        ("metrics", "metrics.jsonl"),
        ("checkpoints", "checkpoints/"),
        ("Hugging Face model", "hf/"),
        ("tokenizer", "tokenizer/"),
        ("token files", "data/"),
    ):
        print(f"  {what:<24}{run_dir / name}")
    print(
        f"\nserve it: {sys.executable} -m megatron.optimus serve {run_dir}    (OpenAI's API and a page to type prompts)"
    )
    summary = {"valid_loss": valid, "uniform_loss": uniform, "steps": metrics[-1]["step"], "seconds": round(seconds)}
    (run_dir / "summary.json").write_text(json.dumps({**summary, "generated": texts}, indent=1) + "\n")
    return uniform - valid >= 3.0


def main() -> int:
    arguments = parse_arguments()
    sys.path.insert(0, str(ROOT))
    from megatron.optimus.platform import missing_packages

    sys.excepthook = missing_packages.excepthook
    from megatron.optimus.config.load import load
    from megatron.optimus.config.schema import ConfigError

    started = time.perf_counter()
    try:
        config = load(["--preset", arguments.preset, *arguments.pretrain_options]).config
    except ConfigError as error:
        sys.exit(f"error: {error}")
    if arguments.train_iters is not None and arguments.train_iters < 1:
        sys.exit(f"error: --train-iters {arguments.train_iters} must be 1 or more")
    steps = arguments.train_iters or config.training.train_iters
    warmup = min(config.optimizer.lr_warmup_iters, steps // 2)  # of a shorter run than the preset's
    arguments.pretrain_options += ["--lr-warmup-iters", str(warmup)]
    run_dir = arguments.run_dir
    prepare_folder(run_dir)
    corpus = arguments.corpus
    if corpus is None:
        corpus = run_dir / "corpus.jsonl"
        build = [ROOT / "examples/local/build_corpus.py", "--output", corpus, "--max-mb", arguments.corpus_mb]
        run("build a corpus from this Python's standard library", sys.executable, *build)
    tokenizer, data = prepare_data(run_dir, corpus, config.model.vocab_size)
    pretrain(arguments, tokenizer, data, steps)
    folder = export(run_dir)
    texts = generate(folder, PROMPTS if arguments.corpus is None else prompts_from(arguments.corpus))
    learned = report(run_dir, arguments.preset, config.model.vocab_size, texts, time.perf_counter() - started)
    if arguments.train_iters is None and not learned:
        print("error: validation loss is less than 3.0 nats below that of a guess", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the stage under way has got it too, and has said what it leaves
        sys.exit(130)
