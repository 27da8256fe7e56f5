"""A run's answers beside those of its export in transformers and in lm-eval, as one table.

    python benchmarks/equal_answers.py runs/demo --out equal_answers.json

Greedy completions and log-probabilities of ``optimus generate`` beside ``transformers``, and scores of
``optimus evaluate`` beside ``lm_eval --model hf``, on a CPU in fp32, on the tasks of examples/evaluation. Prompts are
the beginnings of this repository's pages.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from provenance import commit  # noqa: E402

from megatron.optimus.commands import evaluate, generate  # noqa: E402
from megatron.optimus.convert import Options, convert  # noqa: E402

NEW_TOKENS = 16
TASKS = ["optimus_arithmetic", "optimus_science", "optimus_text"]
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


def scores(run: Path, exported: Path, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Each task's metrics: ours and lm-eval's."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    words = [str(run), "--tasks", ",".join(TASKS), "--include-path", str(TASK_FILES), "--device", "cpu"]
    words += ["--dtype", "fp32", "--out", str(folder / "scores.json")]
    if evaluate.main(words):
        raise SystemExit(1)
    ours = json.loads((folder / "scores.json").read_text())["results"]
    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={exported},dtype=float32,trust_remote_code=True",
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(TASK_FILES)),
        device="cpu",
        bootstrap_iters=0,
    )["results"]
    found: dict[str, dict[str, list[float]]] = {}
    for task in TASKS:
        numbers = {name: value for name, value in theirs[task].items() if isinstance(value, float) and "," in name}
        numbers = {name: value for name, value in numbers.items() if "stderr" not in name}
        found[task] = {
            name.split(",")[0]: [float(ours[task].get(name, ours[task].get(name.split(",")[0]))), value]
            for name, value in numbers.items()
        }
    return found


def table(results: dict[str, Any]) -> str:
    """Markdown."""
    done = results["completions"]
    lines = ["| | Optimus | the export |", "|---|---|---|"]
    lines.append(f"| greedy completions, same tokens in transformers | {done['same']} of {done['prompts']} | |")
    lines.append(f"| log-probabilities of their tokens, furthest apart | {done['logprobs_apart']:.1e} nats | |")
    for task, metrics in results["scores"].items():
        lines += [f"| {task}, {name}, by lm-eval | {a:.6f} | {b:.6f} |" for name, (a, b) in metrics.items()]
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
        results: dict[str, Any] = {"commit": commit(), "torch": torch.__version__}
        results["completions"] = completions(args.run, folder / "hf", folder, args.prompts)
        results["scores"] = scores(args.run, folder / "hf", folder)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    sys.stdout.write(table(results))


if __name__ == "__main__":
    main()
