"""The model card of an export: README.md with the hub's front matter, and the loss curve beside it.

Nothing private is in it: of paths there are only the last parts, and neither hosts nor users are named.
"""

from __future__ import annotations

import io
import json
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.untrusted import parse_json
from megatron.optimus.config.schema import ConfigError, DataConfig, RunConfig
from megatron.optimus.config.serialize import to_dict
from megatron.optimus.convert.formats import CardOptions, Source
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.sources import read_sources
from megatron.optimus.models.huggingface.architectures import Architecture
from megatron.optimus.models.huggingface.serving import not_honoured
from megatron.optimus.models.parameters import count_parameters
from megatron.optimus.report import figure
from megatron.optimus.version import __version__

CARD, CURVE = "README.md", "loss.png"
_LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.-]*")
_TRAINING = ("training", "optimizer", "parallel", "data")  # sections that say how a model was made
_MAX_RESULTS = 1 << 24  # bytes of a file of results


def model_card(source: Source, architecture: Architecture, dtype: str, options: CardOptions) -> dict[str, bytes]:
    """Writes the card.

    Args:
        source: what is exported.
        architecture: of the export.
        dtype: of its weights, such as "bfloat16".
        options: what the command line says.

    Returns:
        README.md and, where the run's metrics and matplotlib are there, loss.png.

    Raises:
        CheckpointError: a file of results cannot be read.
    """
    metrics = _metrics(source)
    curve = _curve(metrics)
    sections = [
        f"# {_plain(options.title) or 'A language model'}",
        _summary(source, architecture, dtype),
        *_usage(architecture),
        *_training(source, metrics, has_curve=curve is not None),
        *_evaluation(options.evaluations),
        *_servers(source, architecture),
        "## Licence",
        _plain(options.license) if options.license else "unknown; set before publishing",
        *_made(source),
    ]
    text = f"---\n{_front_matter(source, architecture, options)}---\n\n" + "\n\n".join(sections) + "\n"
    return {CARD: text.encode(), **({CURVE: curve} if curve is not None else {})}


def _front_matter(source: Source, architecture: Architecture, options: CardOptions) -> str:
    license_fields = {"license": options.license or "unknown"}
    if not _LICENSE_ID.fullmatch(license_fields["license"]):
        license_fields = {"license": "other", "license_name": _plain(options.license)}
    tags = ["optimus", *(["moe"] if source.model.is_moe else []), *(["custom_code"] * architecture.has_own_code)]
    fields = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags, **license_fields}
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)


def _summary(source: Source, architecture: Architecture, dtype: str) -> str:
    model, counts = source.model, count_parameters(source.model)
    lines = [
        f"A decoder-only language model of {counts.total:,} parameters"
        + (f", {counts.active:,} of them active for a token" if model.is_moe else "")
        + f"{', trained with Optimus' * bool(source.step)}. `{architecture.class_name}`, weights in {dtype}.",
        "",
        "| | |",
        "|---|---|",
        f"| layers | {model.num_layers}" + f", {len(model.moe_layers)} with experts" * model.is_moe + " |",
        f"| hidden size | {model.hidden_size} |",
        f"| attention | {model.num_attention_heads} heads, {model.num_kv_heads} of keys and values, "
        f"width {model.head_dim} |",
    ]
    if model.is_moe:
        shared = model.moe_shared_expert_intermediate_size
        lines.append(
            f"| experts | {model.num_experts} of width {model.moe_ffn_hidden_size}, {model.moe_router_topk} for each "
            f"token, scores by {model.moe_router_score_function.value}" + f"; shared: {shared}" * bool(shared) + " |"
        )
    lines += [f"| vocabulary | {model.vocab_size:,} |", f"| positions | {model.max_position_embeddings:,} |"]
    return "\n".join(lines)


def _usage(architecture: Architecture) -> list[str]:
    code = ", trust_remote_code=True" if architecture.has_own_code else ""
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("FOLDER OR NAME"{code})']
    lines += [f'model = AutoModelForCausalLM.from_pretrained("FOLDER OR NAME"{code}, dtype="auto")']
    note = ["transformers has no such architecture: the code is `modeling_optimus.py` in this folder."]
    return ["## Use", "```python\n" + "\n".join(lines) + "\n```", *(note if architecture.has_own_code else [])]


def _training(source: Source, metrics: list[dict[str, Any]], *, has_curve: bool) -> list[str]:
    run, rows = source.run, []
    tokens = metrics[-1].get("consumed_tokens") if metrics else None
    tokens = tokens or source.consumed_samples * run.training.seq_length
    rows.append(("tokens", f"{tokens:,}" if tokens else "not recorded"))
    if source.step:
        rows.append(("optimizer steps", f"{source.step:,}"))
        sizes = f"{run.training.global_batch_size:,} of {run.training.seq_length:,} tokens"
        rows.append(("sequences of a step", sizes))
    axes = {name: size for name, size in source.layout.items() if isinstance(size, int)}
    ranks = axes.get("world_size") or _product(axes.get(name, 1) for name in ("pp", "dp", "cp", "tp"))
    if source.layout:
        device = _plain(str(source.layout.get("device", "")))
        rows.append(("hardware", f"{ranks:,} x {device}" if device else f"{ranks:,} ranks; their kind is not recorded"))
    rows += _measured(metrics)
    text = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
    curve = [f"![Loss over steps]({CURVE})"] if has_curve else []
    return ["## Training", text, *curve, "### Data", _data(run.data)]


def _measured(metrics: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """What metrics.jsonl says: rows of a table."""
    seconds = sum(record["step_time_s"] for record in metrics if isinstance(record.get("step_time_s"), float))
    if seconds:
        yield "time in steps", f"{seconds / 3600:.2f} hours"
    for name, text in (("loss", "last training loss"), ("valid_loss", "last validation loss")):
        values = [record[name] for record in metrics if isinstance(record.get(name), float)]
        if values:
            yield text, f"{values[-1]:.4f} nats a token"


def _data(data: DataConfig) -> str:
    """The blend, by the names of corpora."""
    if not data.data_path and not data.data_file_list:
        return "Not recorded."
    try:
        sources = read_sources(data)
        weights = sources.stages[0].weights if sources.stages else ()
        shares = [f"{float(weight / sum(weights)):.4f}" for weight in weights]
        shares = shares or ["by its tokens"] * len(sources.corpora)
        rows = [
            f"| {_plain(Path(corpus.name).name)} | {share} |"
            for corpus, share in zip(sources.corpora, shares, strict=True)
        ]
        later = f"\n\nThe shares change {len(sources.stages) - 1} times during the run." * (len(sources.stages) > 1)
        return "\n".join(["| corpus | share |", "|---|---|", *rows]) + later
    except (ConfigError, DataError, OSError, ValueError, ArithmeticError):  # the files may have been left elsewhere
        named = [data.data_file_list] if data.data_file_list else data.data_path
        names = [_plain(Path(name).name) for name in named]
        return f"The run names {', '.join(names)}."


def _evaluation(files: Sequence[Path]) -> list[str]:
    rows = []
    for file in files:
        content = _results(file)
        shots = content.get("num_fewshot")
        note = "task's own" if shots is None else str(shots)
        for task, metrics in content["results"].items():
            values = metrics.items() if isinstance(metrics, dict) else []
            rows += [
                f"| {_plain(str(task))} | {_plain(str(name).removesuffix(',none'))} | {note} | {value:.6g} |"
                for name, value in values
                if isinstance(value, int | float) and not isinstance(value, bool)
            ]
    table = "\n".join(["| task | metric | shots | value |", "|---|---|---|---|", *rows])
    return ["## Evaluation", table if rows else "Not evaluated."]


def _results(file: Path) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(file.stat().st_mode) or file.stat().st_size > _MAX_RESULTS:
            raise CheckpointError(f"--evaluation {file}: not a file of results as `optimus evaluate --out` writes it")
        content = parse_json(file.read_bytes(), f"--evaluation {file}")
    except OSError as error:
        raise CheckpointError(f"--evaluation {file}: {error.strerror}") from error
    if not isinstance(content.get("results"), dict):
        raise CheckpointError(f"--evaluation {file}: has no results; name what `optimus evaluate --out` wrote")
    return content


def _servers(source: Source, architecture: Architecture) -> list[str]:
    lines = not_honoured(source.model, architecture.model_type)
    return ["## Servers", "\n".join(f"- {line}." for line in lines)] if lines else []


def _made(source: Source) -> list[str]:
    """Options that differ from the defaults, commands and versions."""
    given, defaults = to_dict(source.run), to_dict(RunConfig())
    shown = {
        section: {name: _public(value) for name, value in options.items() if value != defaults[section][name]}
        for section, options in given.items()
        if section == "model" or (source.step and section in _TRAINING)
    }
    text = yaml.safe_dump({name: options for name, options in shown.items() if options}, sort_keys=False)
    packages = {name: value for name, value in source.packages.items() if isinstance(value, str)}
    versions = ", ".join(f"{_plain(name)} {_plain(value)}" for name, value in packages.items())
    made = f"Trained with {versions}. " if versions else ""
    commands = "optimus pretrain --config run.yaml\noptimus convert RUN FOLDER --to hf"
    return [
        "## How it was made",
        f"{made}Exported by Optimus {__version__}. Options of `run.yaml` that are not the defaults, of paths the last "
        "part:",
        f"```yaml\n{text}```",
        f"```bash\n{commands if source.step else commands.splitlines()[1]}\n```",
    ]


# ---- helpers


def _public(value: Any) -> Any:
    """A value without the folders of a path."""
    if isinstance(value, list):
        return [_public(element) for element in value]
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1] if isinstance(value, str) else value


def _plain(text: str | None) -> str:
    """Text on one line without the characters that Markdown and HTML give a meaning."""
    return " ".join(re.sub(r"[|<>`\[\]\\*\x00-\x1f\x7f]", " ", text or "").split())


def _product(sizes: Iterable[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _metrics(source: Source) -> list[dict[str, Any]]:
    """Lines of the run's metrics.jsonl up to the exported step; none where there is no such file."""
    found = []
    for folder in (source.path.parent, source.path.parent.parent):
        path = folder / "metrics.jsonl"
        if not source.step or path.is_symlink() or not path.is_file():
            continue
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the last one of a run that was killed
                if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= source.step:
                    found.append(record)
        break
    return found


def _curve(metrics: list[dict[str, Any]]) -> bytes | None:
    """The loss over steps as a PNG; None without metrics or matplotlib."""
    train = [(record["step"], record["loss"]) for record in metrics if isinstance(record.get("loss"), float)]
    valid = [(r["step"], r["valid_loss"]) for r in metrics if isinstance(r.get("valid_loss"), float)]
    if not train or not figure.is_drawable():
        return None
    points = {"training": train} | ({"validation": valid} if valid else {})
    lines = {name: ([step for step, _ in own], [loss for _, loss in own]) for name, own in points.items()}
    panel = figure.Panel("", "optimizer step", "cross-entropy (nats per token)", lines, is_log_x=False)
    content = io.BytesIO()
    figure.figure_of([panel]).savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
