"""The Triton kernels on the CPU under Triton's interpreter: part of the tests of every backend, in other processes.

Triton is installed beside the environment by `make test` (requirements-triton.txt), or is in it anyway. fp16: the
interpreter has no bf16 product.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BESIDE = Path(sys.prefix) / "triton"
CASES = ("one_token", "no_token", "odd_widths", "empty_experts", "some_foreign", "none_local")
LAYER_CASES = ("one_expert_exists", "all_to_one", "every_expert")
TESTS = {
    "tests/ops/test_fused_moe.py": (
        "triton and (may_hold_anything or is_kept or narrowing or non_contiguous or opcheck or "
        f"(values and float16 and ({' or '.join((*CASES, *LAYER_CASES))})))"
    ),
    "tests/ops/test_symmetric_memory.py": "",
    "tests/ops/test_main_grads.py": (
        "triton and float16 and ((twice and (no_token or (one_of_two and fp32))) or (whatever and one_of_two))"
    ),
    "tests/ops/test_row_copies.py": "triton and (not values or some or wide or none or row)",
    "tests/ops/test_router.py": (
        "triton and ((values and (22 or 9)) or alone or equal or reaches or underflow or (autocast and float32) or "
        "(linear and 72 and float16) or (expert_counts and int32) or refused or opcheck)"
    ),
    "tests/ops/test_router_statistics.py": "triton",
    "tests/ops/test_autograd_guards.py": "triton and (second or jvp or numbers or tangent or fake or meta)",
    "tests/ops/test_attention_logits.py": "triton and not bfloat16",
    "tests/ops/test_router_linear.py": "",
    "tests/ops/test_row_order.py": "",
    "tests/ops/test_permute.py": "",
    "tests/ops/test_autotune.py": "not for_real",
    "tests/ops/test_elementwise.py": (
        "triton and (loss or computes or (not 64 and not 2048 and float32) or (gaps and 9 and float16))"
    ),
    "tests/ops/test_linear.py": "triton and (main or float16)",
    "tests/ops/test_norm.py": "triton and not 150 and (float32 or (gaps and 9 and float16))",
}


# Imports what the tests need and forks for each of the files named on its input.
PROGRAM = """
import os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what imports print is none
import deepspeed, hypothesis, pytest, torch._dynamo, torch._inductor, triton
import megatron.optimus.ops.triton
for line in sys.stdin:
    path, words, output = line.rstrip("\\n").split("\\t")
    pid = os.fork()
    if pid == 0:
        for stream in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
        code = pytest.main(["-q", "-p", "no:cacheprovider", path, "-k", words])
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)
"""
# Runs one file's tests: its exit code and what it printed.
Interpreter = Callable[[str], tuple[int, str]]


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    if not BESIDE.is_dir() and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install --no-deps --target <venv>/triton -r requirements-triton.txt")
    places = (str(ROOT), str(BESIDE), os.environ.get("PYTHONPATH", ""))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, places))}
    folder = tmp_path_factory.mktemp("interpreted")
    words, pipe = [sys.executable, "-c", PROGRAM], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=env) as process:
        assert process.stdin is not None and process.stdout is not None
        to, of = process.stdin, process.stdout

        def run(path: str) -> tuple[int, str]:
            output = folder / Path(path).name
            print(path, TESTS[path], output, sep="\t", file=to, flush=True)
            code = int(of.readline())
            return code, output.read_text()

        yield run
        to.close()


@pytest.mark.parametrize("path", TESTS)
def test_under_the_interpreter(interpreter: Interpreter, path: str) -> None:
    code, output = interpreter(path)
    passed = re.search(r"(\d+) passed", output)
    assert code == 0 and passed is not None and int(passed[1]) >= 2, output[-4000:]
    assert "neither CUDA nor Triton's interpreter" not in output
