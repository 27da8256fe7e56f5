"""A run's answers beside those of its export in transformers and in lm-eval, as one table.

    python benchmarks/equal_answers.py runs/demo --out equal_answers.json

Greedy completions and log-probabilities of ``optimus generate`` beside ``transformers``; log-likelihoods and scores of
what ``optimus evaluate`` runs beside those of ``lm_eval --model hf``, on a CPU in fp32, for examples/evaluation.
Prompts are the beginnings of this repository's pages.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from provenance import commit  # noqa: E402

from megatron.optimus.commands import generate  # noqa: E402
from megatron.optimus.config.schema import ParallelConfig  # noqa: E402
from megatron.optimus.convert import Options, convert  # noqa: E402
from megatron.optimus.inference.load import load_text_model  # noqa: E402
from megatron.optimus.inference.tasks import find_tasks, load_tasks, run_tasks, scores  # noqa: E402
from megatron.optimus.platform.ranks import Ranks  # noqa: E402

NEW_TOKENS = 16
TASKS = ["optimus_science", "optimus_text"]  # a small model completes the arithmetic with nothing
TASK_FILES = ROOT / "examples/evaluation"


def prompts(count: int) -> list[str]:
    """Beginnings of lines of the pages, each at least 20 characters long."""
    lines = [line for page in sorted((ROOT / "docs").glob("*.md")) for line in page.read_text().splitlines()]
    return [line[:40] for line in lines if len(line) > 40][:count]


def completions(run: Path, exported: Path, folder: Path, count: int) -> dict[str, Any]:
    """How many greedy completions are the same tokens, and how far log-probabilities of the same tokens are apart."""
    import transformers

    texts = prompts(count)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    words = [str(run), "--prompts", str(folder / "prompts.jsonl"), "--device", "cpu", "--dtype", "fp32"]
    words += ["--temperature", "0", "--ignore-eos", "--max-new-tokens", str(NEW_TOKENS), "--logprobs"]
    if generate.main([*words, "--out", str(folder / "completions.jsonl")]):
        raise SystemExit(1)
    ours = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    same, apart = 0, 0.0
    for text, own in zip(texts, ours, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            whole = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
            logprobs = model(whole).logits[0].log_softmax(-1)[:-1].gather(1, whole[0, 1:, None])[:, 0]
        if own["token_ids"] == whole[0, ids.shape[1] :].tolist():
            same += 1
            theirs = logprobs[ids.shape[1] - 1 :].tolist()
            apart = max(apart, *(abs(a - b) for a, b in zip(own["logprobs"], theirs, strict=True)))
    return {"prompts": len(texts), "same": same, "logprobs_apart": apart}


def log_likelihoods(samples: list[dict[str, Any]]) -> list[float]:
    """Of all answers, in nats, in the order of the questions."""
    ordered = sorted(samples, key=lambda sample: sample["doc_id"])
    found = [response[0] for sample in ordered for response in sample["resps"]]
    return [answer[0] if isinstance(answer, tuple) else answer for answer in found]


def tasks(run: Path, exported: Path) -> dict[str, dict[str, Any]]:
    """Each task's metrics, ours and lm-eval's, and how the single answers differ."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    model = load_text_model(run, ParallelConfig(), Ranks.alone(), dtype=torch.float32)
    ours = run_tasks(model, load_tasks(find_tasks(TASKS, TASK_FILES, "TASKS")), batch_size=8, samples=True)
    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={exported},dtype=float32,trust_remote_code=True",
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(TASK_FILES)),
        device="cpu",
        bootstrap_iters=0,
    )
    found: dict[str, dict[str, Any]] = {}
    for task in TASKS:
        left, right = (log_likelihoods(of["samples"][task]) for of in (ours, theirs))
        apart = max(abs(a - b) / abs(b) for a, b in zip(left, right, strict=True))
        found[task] = {"answers": len(left), "relative_difference": apart}
        own, other = scores(ours)[task], scores(theirs)[task]
        found[task]["metrics"] = {name.split(",")[0]: [own[name], other[name]] for name in own if "stderr" not in name}
    return found


def table(results: dict[str, Any]) -> str:
    """Markdown."""
    done = results["completions"]
    lines = ["| | Optimus | the export |", "|---|---|---|"]
    title = f"greedy completions of {NEW_TOKENS} tokens, same tokens in transformers"
    lines.append(f"| {title} | {done['same']} of {done['prompts']} | |")
    lines.append(f"| log-probabilities of their tokens, furthest apart | {done['logprobs_apart']:.1e} nats | |")
    for task, of in results["tasks"].items():
        apart = f"{of['relative_difference']:.1e} of the value"
        lines.append(f"| {task}, {of['answers']} log-likelihoods by lm-eval, furthest apart | {apart} | |")
        lines += [f"| {task}, {name}, by lm-eval | {a:.6f} | {b:.6f} |" for name, (a, b) in of["metrics"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run with its tokenizer, or a checkpoint")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert(args.run, folder / "hf", to="hf", options=Options(dtype="fp32"))
        results: dict[str, Any] = {name: version(name) for name in ("torch", "transformers", "lm_eval")}
        results["commit"] = commit()
        results["completions"] = completions(args.run, folder / "hf", folder, args.prompts)
        results["tasks"] = tasks(args.run, folder / "hf")
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    sys.stdout.write(table(results))


if __name__ == "__main__":
    main()
