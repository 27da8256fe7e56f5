"""The command line of ``optimus serve``, and the server as a process."""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from megatron.optimus.commands import serve
from megatron.optimus.convert import Options, convert
from tests.integration.conftest import environment
from tests.unit.inference.cases import checkpoint

needs_packages = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn")), reason="needs fastapi and uvicorn"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"), "moe")


def ask(port: int, **body: object) -> tuple[int, dict]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def _leave_before_the_answer(port: int) -> None:
    """Sends a request and closes the connection, so that the second part of the answer has no reader."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")


@needs_packages
def test_a_process_serves_and_ends_after_its_requests(model: Path) -> None:
    command = [sys.executable, "-u", "-m", "megatron.optimus", "serve", str(model), "--port", "0", "--device", "cpu"]
    command += ["--served-model-name", "small", "--cache-tokens", "128"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as one:
        assert one.stdout is not None and one.stderr is not None
        line = one.stdout.readline()
        assert line.startswith("serving small at http://127.0.0.1:") and "cache of 128 tokens" in line, (
            one.stderr.read()
        )
        port = int(line.split("http://127.0.0.1:")[1].split()[0])
        for _ in range(20):
            _leave_before_the_answer(port)
        answers: list[tuple[int, dict]] = []
        body = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "n": 8, "seed": 1}
        thread = threading.Thread(target=lambda: answers.append(ask(port, **body)))
        thread.start()
        while b"requests_running 0" in urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read():
            time.sleep(0.002)
        one.send_signal(signal.SIGTERM)
        thread.join(60)
        assert one.wait(60) == 0
        [(status, answer)] = answers
        assert status == 200 and answer["usage"]["completion_tokens"] == 8 * 60
        assert one.stderr.read() == "" and one.stdout.read() == ""


@needs_packages
def test_what_is_wrong_is_one_line_before_the_model_is_loaded(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, message in (
            (["--port", port], f"--port {port} on 127.0.0.1: Address already in use; name another with --port"),
            (["--expert-model-parallel-size", "2"], "1 ranks, and the sizes of tensor and expert parallelism use 2"),
            (["--port", "70000"], "--port 70000 must be at most 65535"),
            (["--port", "0", "--host", "192.0.2.1"], "Cannot assign requested address"),
            (["--port", "0", "--max-model-len", "65"], "the model was trained on 64 positions"),
            (["--port", "0", "--cache-tokens", "40"], "room for 48 tokens, and one request may have 64"),
            (["--port", "0", "--chat-template", "nowhere.jinja"], "--chat-template nowhere.jinja: "),
        ):
            assert serve.main([str(model), "--device", "cpu", *words]) == 2
            err = capsys.readouterr().err
            assert err.startswith("error: ") and err.count("\n") == 1 and message in err, err


def test_without_the_packages_the_line_names_them(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert serve.main([str(model)]) == 2
    message = "error: optimus serve needs fastapi and uvicorn: pip install optimus-megatron[serve]\n"
    assert capsys.readouterr().err == message


def test_the_command_of_vllm(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main([str(model), "--print-vllm", "--served-model-name", "small", "--port", "9000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        f"optimus convert {model} small-hf --to hf",
        "vllm serve small-hf --served-model-name small --host 127.0.0.1 --port 9000 --max-model-len 64",
    ]
    convert(model, tmp_path / "hf", to="hf", options=Options(dtype="fp32"))
    words = [str(tmp_path / "hf"), "--print-vllm", "--expert-model-parallel-size", "4", "--dtype", "bf16"]
    assert serve.main(words) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"vllm serve {tmp_path}/hf --served-model-name hf --host 127.0.0.1 --port 8000 --max-model-len 64 "
        "--dtype bfloat16 --tensor-parallel-size 4 --enable-expert-parallel"
    ]
