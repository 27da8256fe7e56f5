"""Serve a checkpoint over an OpenAI-compatible API (docs/serving.md).

    optimus serve runs/demo --port 8000
    optimus serve exported --served-model-name mula-1b --batch-size 64 --dtype bf16
    torchrun --nproc-per-node 2 -m megatron.optimus serve runs/demo --tensor-model-parallel-size 2
    optimus serve runs/demo --print-vllm

The checkpoint is any that `optimus generate` takes. Endpoints: /v1/completions, /v1/chat/completions, /v1/models,
/health, /metrics, and a page at /. SIGTERM and Ctrl-C let running requests finish. Needs the packages fastapi and
uvicorn: pip install optimus-megatron[serve]. Exit code: 0 after a signal, or 2 after one line that says what is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.optimus.commands.model_options import add_model_options, load_model, run_on_ranks
from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.convert import open_source
from megatron.optimus.inference.load import TextModel, on_all_ranks
from megatron.optimus.inference.server.engine import Engine
from megatron.optimus.inference.server.metrics import Metrics
from megatron.optimus.inference.server.paged_cache import PAGE_TOKENS, num_pages
from megatron.optimus.inference.server.scheduler import Scheduler
from megatron.optimus.models.huggingface.architectures import architecture_of
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.environment import RankEnvironment
from megatron.optimus.platform.ranks import Ranks

# The scheduler's thread gives the GIL away at every operation of torch. With Python's 5 ms it would wait so long for it
# whenever answers are being written, many times a step.
_SWITCH_SECONDS = 0.0002

if TYPE_CHECKING:
    import socket

_FREE_SHARE = 0.85  # of an accelerator's free memory that the cache takes at most; the rest is for steps


def _parser() -> Parser:
    parser = Parser("serve", __doc__ or "", usage="optimus serve CHECKPOINT [--port 8000] [options]")
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or of a run (its newest checkpoint)")
    text = "address to listen on; default: 127.0.0.1, this machine alone"
    parser.add_argument("--host", default="127.0.0.1", help=text)
    parser.add_argument("--port", type=whole_number(0), default=8000, help="0: any free one; default: 8000")
    parser.add_argument("--served-model-name", help="the model's name in requests; default: the folder's")
    text = "most tokens of a prompt with its completion; default: what the model was trained on"
    parser.add_argument("--max-model-len", type=whole_number(2), help=text)
    text = "tokens that a step computes at most, those of prompts included; default: 2048"
    parser.add_argument("--max-step-tokens", type=whole_number(), default=2048, help=text)
    text = "tokens whose keys and values fit the cache; default: as many as --batch-size needs and memory has"
    parser.add_argument("--cache-tokens", type=whole_number(), help=text)
    parser.add_argument("--max-queue", type=whole_number(), default=256, help="prompts that may wait; default: 256")
    parser.add_argument("--max-body-bytes", type=whole_number(), default=4 << 20, help="default: 4194304")
    text = "seconds that running requests have after SIGTERM; default: 60"
    parser.add_argument("--drain-seconds", type=whole_number(0), default=60, help=text)
    parser.add_argument("--chat-template", type=Path, help="Jinja file; default: the tokenizer's own, if it has one")
    text = "print the command that serves the exported model with vLLM, and end"
    parser.add_argument("--print-vllm", action="store_true", help=text)
    add_model_options(parser, batch_size=32)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus serve``; returns 0, 2 after one line that says what is wrong, or 1 if another rank ended."""
    return run_on_ranks(_parser(), argv, _prepare)


def _prepare(args: argparse.Namespace) -> Callable[[RankEnvironment, Ranks], None]:
    """Checks the options; returns what every rank runs."""
    if args.print_vllm:
        lines = _vllm_lines(args)
        return lambda launch, ranks: print("\n".join(lines)) if ranks.rank == 0 else None
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        raise ConfigError(f"optimus serve needs {names}: pip install optimus-megatron[serve]")
    if args.port > 65535:
        raise ConfigError(f"--port {args.port} must be at most 65535")
    return lambda launch, ranks: _run(args, launch, ranks)


def _run(args: argparse.Namespace, launch: RankEnvironment, ranks: Ranks) -> None:
    """Takes the port, loads the model and serves it. Collective."""
    from megatron.optimus.inference.server.lifetime import bind

    needed = max(args.tensor_model_parallel_size, args.expert_model_parallel_size)
    if ranks.size != needed:
        raise ConfigError(
            f"{ranks.size} ranks, and the sizes of tensor and expert parallelism use {needed}: all ranks of a server "
            "compute the same tokens; start so many ranks, or further servers on other ports"
        )
    is_first = ranks.rank == 0
    listening = on_all_ranks(ranks, lambda: bind(args.host, args.port) if is_first else None, "binding", ConfigError)
    loaded = load_model(args, launch, ranks)
    with ranks.failing_alike():
        length = _length(args, loaded)
        engine = Engine(loaded, ranks, _pages(args, loaded, length))
    if listening is not None:
        _serve(args, loaded, engine, length, listening)
        return
    for number in (signal.SIGTERM, signal.SIGINT):  # the first rank says when to end, after its requests
        signal.signal(number, signal.SIG_IGN)
    engine.follow()


def _vllm_lines(args: argparse.Namespace) -> list[str]:
    """The commands that export the checkpoint, unless it is a Hugging Face folder, and serve it with vLLM."""
    source = open_source(args.checkpoint)
    try:
        model, is_export = source.model, source.format == "hf"
        title = architecture_of(model).title
    finally:
        source.close()
    name = args.served_model_name or args.checkpoint.resolve().name
    folder = args.checkpoint if is_export else Path(f"{name}-hf")
    words = ["vllm", "serve", str(folder), "--served-model-name", name, "--host", args.host, "--port", str(args.port)]
    words += ["--max-model-len", str(args.max_model_len or model.max_position_embeddings)]
    if args.dtype is not None:
        words += ["--dtype", {"bf16": "bfloat16", "fp32": "float32"}[args.dtype]]
    ranks = max(args.tensor_model_parallel_size, args.expert_model_parallel_size)
    if ranks > 1:  # vLLM splits experts over the ranks of tensor parallelism
        words += ["--tensor-parallel-size", str(ranks)]
        words += ["--enable-expert-parallel"] if args.expert_model_parallel_size > 1 else []
    lines = [f"# {title}; not checked against the vLLM that is installed where this runs", shlex.join(words)]
    if not is_export:
        lines.insert(1, shlex.join(["optimus", "convert", str(args.checkpoint), str(folder), "--to", "hf"]))
    return lines


def _length(args: argparse.Namespace, loaded: TextModel) -> int:
    """Returns the largest number of tokens of a prompt with its completion. Raises ConfigError."""
    trained = loaded.config.max_position_embeddings
    if args.max_model_len is not None and args.max_model_len > trained:
        raise ConfigError(
            f"--max-model-len {args.max_model_len}: the model was trained on {trained} positions "
            "(max_position_embeddings), which is the most"
        )
    return args.max_model_len or trained


def _pages(args: argparse.Namespace, loaded: TextModel, length: int) -> int:
    """Returns the pages of the cache: --cache-tokens, else a full batch as far as it fits. Raises ConfigError."""
    if args.cache_tokens is not None:
        pages = num_pages(args.cache_tokens)
    else:
        pages = num_pages(length) * args.batch_size
        if loaded.device.type != "cpu":
            free, _, _ = devices.memory_info(loaded.device)
            pages = min(pages, int(free * _FREE_SHARE) // Engine.bytes_of_page(loaded))
    if pages < num_pages(length):
        raise ConfigError(
            f"the cache has room for {pages * PAGE_TOKENS} tokens, and one request may have {length}: lower "
            "--max-model-len, or raise --cache-tokens"
        )
    return pages


def _serve(args: argparse.Namespace, loaded: TextModel, engine: Engine, length: int, listening: socket.socket) -> None:
    """Serves requests until a signal asks to stop and the running requests have ended."""
    from megatron.optimus.inference.server.app import ServerLimits, Service, build_app
    from megatron.optimus.inference.server.chat import ChatTemplate
    from megatron.optimus.inference.server.lifetime import Server

    metrics = Metrics()
    scheduler = Scheduler(
        engine,
        metrics,
        max_batch=args.batch_size,
        max_step_tokens=max(args.max_step_tokens, args.batch_size),
        max_waiting=args.max_queue,
    )
    name = args.served_model_name or args.checkpoint.resolve().name
    chat = ChatTemplate(loaded.tokenizer_path, args.chat_template)
    limits = ServerLimits(length, args.max_body_bytes, args.max_queue)
    app = build_app(Service(loaded, scheduler, metrics, chat, name, limits))
    server = Server(app, scheduler, args.drain_seconds)
    engine.warm_up()
    sys.setswitchinterval(_SWITCH_SECONDS)
    scheduler.start()
    host, port, *_ = listening.getsockname()
    shown = f"[{host}]" if ":" in host else host
    tokens = engine.pages * PAGE_TOKENS
    print(f"serving {name} at http://{shown}:{port} (page at /, API at /v1, cache of {tokens:,} tokens)", flush=True)
    try:
        server.run(sockets=[listening])
    finally:
        scheduler.stop()
    if scheduler.failure is not None:
        raise scheduler.failure
