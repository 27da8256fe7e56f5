"""Requests per second and time to first token of `optimus serve` beside `transformers serve`, in one run.

    python benchmarks/serving.py --preset mula-1b --num-layers 4 --device cpu --out results/serving_cpu.json
    python benchmarks/serving.py --preset mula-7b-a1b --device cuda --clients 1 8 32 128 --out results/serving_h100.json
    python benchmarks/serving.py --checkpoint runs/demo/hf --device cpu --servers ours
    python benchmarks/serving.py --preset mula-tiny --hidden-size 48 --servers ours   # the host alone

Both serve the same Hugging Face folder, one after the other, each as a process of its own: a checkpoint's export, or a
model of a preset with random weights and a tokenizer of 8,192 tokens trained on the documentation; further options are
the model's. ``--repeats 3`` takes turns and gives medians, for a machine that others use too; so does the processor
time of the server, which does not depend on them. Clients on loopback each send one request after the other to
/v1/completions, streaming and greedy. Before each round one request a client warms up and is not counted. transformers
has no field that ignores the token that ends texts, so its answers may be shorter; tokens are counted as the servers
report them. The peer needs: pip install transformers[serving] accelerate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.provenance import commit
from megatron.optimus.checkpoint import model_slices, save
from megatron.optimus.config.load import load
from megatron.optimus.config.serialize import to_dict
from megatron.optimus.convert import Options, convert
from megatron.optimus.data.tokenize.tokenizer import HuggingFaceTokenizer, train_bpe
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights, materialize

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 8192
SERVERS = ("ours", "transformers", "transformers-continuous-batching")


def corpus() -> list[str]:
    """The documentation and the sources: real text in enough words for the tokenizer."""
    return [path.read_text() for folder in ("docs", "megatron") for path in sorted((ROOT / folder).rglob("*.[mp][dy]"))]


def random_model(args: argparse.Namespace, folder: Path) -> Path:
    """Writes a model of the preset with random weights as a Hugging Face folder."""
    train_bpe(corpus(), VOCABULARY, folder / "tokenizer")
    words = ["--preset", args.preset, "--vocab-size", str(VOCABULARY), "--data-path", "none"]
    words += args.model_options
    run = load(words).config
    with torch.device("meta"):
        model = Decoder(run.model)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    materialize(model, torch.device("cpu"), dtype)
    initialize_weights(model, seed=1, device=torch.device("cpu"), dtype=dtype)
    slices = model_slices(model, dense=True, experts=True)
    save(folder / "ours", 1, slices, kind="model", consumed_samples=0, config=to_dict(run), metadata={})
    options = Options(dtype=args.dtype, tokenizer=folder / "tokenizer")
    convert(folder / "ours", folder / "hf", to="hf", options=options)
    shutil.rmtree(folder / "ours")
    return folder / "hf"


def command(server: str, model: Path, port: int, args: argparse.Namespace) -> list[str]:
    if server == "ours":
        words = ["-m", "megatron.optimus", "serve", str(model), "--served-model-name", str(model)]
        words += ["--batch-size", str(max(args.clients)), "--max-queue", "1024"]
    else:
        words = ["-m", "transformers.cli.transformers", "serve", str(model)]
        words += ["--continuous-batching"] if server.endswith("batching") else []
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[args.dtype] if server != "ours" else args.dtype
    return [sys.executable, *words, "--port", str(port), "--device", args.device, "--dtype", dtype]


async def one_request(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[str, float]:
    """Seconds to the first text and to the end, and the tokens that the server counts."""
    began, first, tokens, chunks = time.perf_counter(), 0.0, 0, 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()[:500]}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(line[:500])
            tokens = max(tokens, (chunk.get("usage") or {}).get("completion_tokens", 0))
            if any(choice.get("text") for choice in chunk["choices"]):
                first, chunks = first or time.perf_counter() - began, chunks + 1
    return {"first": first, "seconds": time.perf_counter() - began, "tokens": tokens or chunks}


async def load_test(url: str, server: str, prompts: list[str], clients: int, args: argparse.Namespace) -> dict:
    """Lets some clients send one request after the other."""
    fields: dict[str, Any] = {"model": args.model, "max_tokens": args.max_tokens, "temperature": 0, "stream": True}
    fields |= {"ignore_eos": True, "stream_options": {"include_usage": True}} if server == "ours" else {}
    waiting, done = iter(prompts), []

    async def client_of(client: httpx.AsyncClient) -> None:
        for prompt in waiting:
            done.append(await one_request(client, url, fields | {"prompt": prompt}))

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=args.timeout, limits=limits) as client:
        began = time.perf_counter()
        await asyncio.gather(*(client_of(client) for _ in range(clients)))
        seconds = time.perf_counter() - began
    firsts = sorted(one["first"] for one in done)
    return {
        "clients": clients,
        "requests": len(done),
        "requests_per_second": len(done) / seconds,
        "tokens_per_second": sum(one["tokens"] for one in done) / seconds,
        "tokens": sum(one["tokens"] for one in done),
        "first_token_median_s": statistics.median(firsts),
        "first_token_p99_s": firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))],
        "request_median_s": statistics.median(one["seconds"] for one in done),
    }


def wait_until_ready(process: subprocess.Popen, url: str, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=60).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
        time.sleep(0.2)


def processor_seconds(process: subprocess.Popen) -> float:
    """Processor time that a server has taken so far, with its threads."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def medians(repeats: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The median of each number over the repeats that were not cut short by an error, by number of clients."""
    whole = [one["rounds"] for one in repeats if "rounds" in one]
    return [
        {key: statistics.median(each[key] for each in same) for key in same[0]} for same in zip(*whole, strict=True)
    ]


def measure(server: str, model: Path, prompts: list[str], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Starts a server, measures it at each number of clients, and ends it."""
    port = 8400 + SERVERS.index(server)
    url, log = f"http://127.0.0.1:{port}", folder / f"{server}.log"
    words = command(server, model, port, args)
    shown = [word.replace(str(model), "MODEL") for word in words[1:]]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(args.threads)}
    with log.open("w") as stream:
        process = subprocess.Popen(words, stdout=stream, stderr=stream, cwd=ROOT, env=environment)
    try:
        wait_until_ready(process, url, log, 600)
        rounds = []
        for clients in args.clients:
            asyncio.run(load_test(url, server, prompts[: max(4, clients)], clients, args))
            before = processor_seconds(process)
            found = asyncio.run(load_test(url, server, prompts[: max(args.requests, 2 * clients)], clients, args))
            found["load"] = os.getloadavg()[0]
            found["processor_ms_per_token"] = 1000 * (processor_seconds(process) - before) / found["tokens"]
            rounds.append(found)
        return {"command": shown, "rounds": rounds}
    except (RuntimeError, httpx.HTTPError) as error:
        return {"command": shown, "error": f"{type(error).__name__}: {error}", "log": log.read_text()[-1500:]}
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def show(server: str, found: dict[str, Any]) -> None:
    """Prints what was measured of a server."""
    for one in found.get("rounds", []):
        print(
            f"{server:<34} {one['clients']:>4} clients: {one['requests_per_second']:.2f} requests/s, "
            f"{one['tokens_per_second']:.1f} tokens/s, first token {one['first_token_median_s']:.3f} s (median), "
            f"{one['first_token_p99_s']:.3f} s (p99), {one['processor_ms_per_token']:.2f} ms of processor a token",
            flush=True,
        )
    if "error" in found:
        print(f"{server:<34} {found['error']}\n{found['log']}", flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--checkpoint", type=Path, help="a checkpoint or export; default: random weights of --preset")
    made.add_argument("--preset", default="mula-1b")
    made.add_argument("--device", default="cpu", help="cpu, cuda or xpu")
    made.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    made.add_argument("--threads", type=int, default=os.cpu_count(), help="OMP_NUM_THREADS of the servers")
    made.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    made.add_argument("--clients", nargs="+", type=int, default=[1, 8])
    made.add_argument("--requests", type=int, default=16, help="of each round; at least two a client")
    made.add_argument("--prompt-tokens", type=int, default=128)
    made.add_argument("--max-tokens", type=int, default=32)
    made.add_argument("--repeats", type=int, default=1, help="times that each server is started and measured, in turns")
    made.add_argument("--timeout", type=float, default=300.0)
    made.add_argument("--out", type=Path)
    return made


def main() -> None:
    args, args.model_options = parser().parse_known_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = args.checkpoint or random_model(args, folder)
        if not (model / "config.json").is_file():
            convert(model, folder / "hf", to="hf", options=Options(dtype=args.dtype))
            model = folder / "hf"
        args.model = str(model)
        tokenizer = HuggingFaceTokenizer(model)
        ids = tokenizer.encode("\n\n".join(corpus()))
        count = max(args.requests, 2 * max(args.clients))
        size = args.prompt_tokens
        prompts = [tokenizer.decode(ids[(i * size) % (len(ids) - size) :][:size]) for i in range(count)]
        device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
        left_out = ("checkpoint", "out", "model", "preset")
        result = {
            "commit": commit(), "torch": torch.__version__, "device": device,
            "model": args.checkpoint.name if args.checkpoint else args.preset,
            "options": {key: value for key, value in vars(args).items() if key not in left_out},
            "load_before": os.getloadavg()[0], "servers": {},
        }  # fmt: skip
        for server in args.servers * args.repeats:
            found = measure(server, model, prompts, args, folder)
            show(server, found)
            kept = result["servers"].setdefault(server, {"repeats": []})
            kept["repeats"].append(found)
            kept["rounds"] = medians(kept["repeats"])
            if args.out:  # what is measured stays, whatever happens to the next
                args.out.write_text(json.dumps(result, indent=1) + "\n")
        for server, kept in result["servers"].items() if args.repeats > 1 else ():
            show(f"{server} (median)", kept)


if __name__ == "__main__":
    main()
