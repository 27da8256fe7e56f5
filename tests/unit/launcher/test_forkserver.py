"""When the fork server may fork ranks: imports have touched NVML (yes, once it is closed) or CUDA (never)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import pytest

from megatron.optimus.launcher import forkserver
from megatron.optimus.launcher.agent import LocalAgent
from megatron.optimus.platform import device, environment

# Stand-ins for the driver's libraries, which are found by the names they give themselves. NVML counts its users and
# holds a file open while it has any.
NVML = """
#include <fcntl.h>
#include <unistd.h>
static int users = 0, file = -1;
int nvmlInit_v2(void) { if (users++ == 0) file = open(DEVICE, O_RDONLY); return 0; }
int nvmlShutdown(void) { if (users == 0) return 1; if (--users == 0) close(file); return 0; }
"""
CUDA = """
static int is_initialized = 0;
int cuInit(unsigned flags) { is_initialized = 1; return 0; }
int cuDeviceGetCount(int *count) { if (!is_initialized) return 3; *count = 1; return 0; }
"""
PROGRAM = """
import ctypes, os, sys
from megatron.optimus.launcher import forkserver
from megatron.optimus.launcher.agent import LocalAgent
from megatron.optimus.platform import device, environment
device_file, nvml, cuda = sys.argv[1:]
forkserver._DEVICES = (device_file,)
is_open = lambda: any(os.path.realpath(f"/proc/self/fd/{n}") == device_file for n in os.listdir("/proc/self/fd"))
answer = lambda: forkserver._why_not_fork("cpu").replace(device_file, "DEVICE") or "may fork"
say = lambda: print(is_open(), answer(), is_open(), flush=True)
device.open_nvml(), say()  # no such library: nothing happens
nvml, cuda = ctypes.CDLL(nvml), ctypes.CDLL(cuda)
say()
nvml.nvmlInit_v2(), nvml.nvmlInit_v2(), say()  # two imports
if os.fork() == 0:
    device.open_nvml(), print(is_open(), flush=True)
    os._exit(0)
os.wait()
file = os.open(device_file, os.O_RDONLY)
say()
os.close(file)
cuda.cuInit(0), say()
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for the imitated driver")
def test_ranks_are_forked_after_nvml_was_used_and_never_after_cuda(tmp_path: Path) -> None:
    device = tmp_path / "nvidiactl"
    device.touch()
    words = [str(device)]
    for name, source in (("libnvidia-ml.so.1", NVML), ("libcuda.so.1", CUDA)):
        (tmp_path / "source.c").write_text(source)
        words.append(str(tmp_path / name))
        compiler = ["cc", "-shared", "-fPIC", f'-DDEVICE="{device}"', f"-Wl,-soname,{name}", "-o", words[-1]]
        subprocess.run([*compiler, str(tmp_path / "source.c")], check=True)
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "False may fork False",
        "False may fork False",
        "True may fork False",
        "True",  # NVML in a rank
        "True the imports have opened DEVICE True",
        "False the imports have initialised CUDA False",
    ]


def test_a_first_fork_has_to_compute_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kind: str) -> bool:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    def hang(kind: str) -> bool:
        time.sleep(60)
        return True

    monkeypatch.setattr(forkserver, "_PROBE_SECONDS", 0.3)
    answers = []
    for computes in (lambda kind: kind == "cuda", lambda kind: False, fail, hang):
        monkeypatch.setattr(device, "computes", computes)
        answers.append(forkserver._why_not_fork("cuda"))
    assert answers == ["", *["a forked process could not compute on a cuda device"] * 3]


def test_the_cpu_computes() -> None:
    assert device.computes("cpu")


def test_the_port_is_chosen_after_the_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs beside this one take ports for their connections in the seconds of the imports."""

    class Server:
        has_imported = False

        def is_ready(self) -> bool:
            self.has_imported = True
            return False

        def start(self, *words: object) -> None:
            return None

        def close(self) -> None:
            pass

    server, found = Server(), []
    choose = environment.rendezvous_port
    monkeypatch.setattr(environment, "rendezvous_port", lambda: found.append(server.has_imported) or choose())
    # Not one of those that the system gives to connections.
    rank = "import os; assert 20000 <= int(os.environ['MASTER_PORT']) < 30000"
    with LocalAgent([sys.executable, "-c", rank], 2, fork_server=cast("forkserver.ForkServer", server)) as agent:
        assert agent.run().code == 0
    assert found == [True]
