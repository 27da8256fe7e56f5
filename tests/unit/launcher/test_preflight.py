"""Checks of nodes before the first attempt: bad ones are exchanged, and what names none is an error."""

import json
import os
import sys
from pathlib import Path

import pytest

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.launch import main as launch_main
from megatron.optimus.launcher.preflight import bad_nodes
from tests.integration.conftest import TINY, environment

WORDS = [*TINY, "--data-path", "none"]
MPIEXEC = """#!{python}
# Stands for mpiexec: the checks find a fault on the second node; training is done at once.
import sys
words = sys.argv[1:]
print(*open(words[words.index("--hostfile") + 1]).read().split(), file=open("{log}", "a"))
if any("preflight" in word for word in words):
    print("preflight: rank 0 on x0: memory gb s 3")
    print("preflight: rank 1 on x1: FAILED: products: 3 wrong numbers, limit 0; take this device out of use")
    sys.exit(1)
"""


def test_a_bad_node_is_exchanged_before_the_first_attempt(tmp_path: Path, monkeypatch, capfd, caplog) -> None:
    mpiexec, nodes, log = tmp_path / "mpiexec", tmp_path / "nodes", tmp_path / "log"
    mpiexec.write_text(MPIEXEC.format(python=sys.executable, log=log))
    mpiexec.chmod(0o755)
    nodes.write_text("x0\nx1\nx2\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PBS_NODEFILE", str(nodes))
    words = ["--preflight", "--mpi", "pals", "--nproc-per-node", "1", *WORDS, "--run-dir", str(tmp_path / "run")]
    assert launch_main(["--nodes", "2", *words]) == 0
    assert log.read_text().splitlines() == ["x0 x1 x2", "x0 x2"]
    [(host, entry)] = json.loads((tmp_path / "run" / "bad_nodes.json").read_text()).items()
    assert host == "x1" and entry["reason"].startswith("check: products: 3 wrong numbers")
    assert "bad node x1" in caplog.text
    nodes.write_text("x3\nx4\n")  # no spare
    assert launch_main(["--nodes", "2", *words]) == 1
    assert "no spare for the bad nodes x4; ask for more nodes" in capfd.readouterr().err


def test_what_names_no_node_is_an_error(tmp_path):
    def run(*lines, code=1):
        text = "".join(f"print({line!r});" for line in lines)
        return bad_nodes(
            [sys.executable, "-c", f"{text}import sys;sys.exit({code})"], environment(), ["a", "b", "c"], 2
        )

    with pytest.raises(ConfigError, match="preflight: space: 1 GiB free"):
        run("preflight: FAILED: space: 1 GiB free")
    assert run("preflight: rank 0 on a: ok", "[0] preflight: rank 5 on c: ok") == {"b": "no rank answered"}
    with pytest.raises(ConfigError, match="ended with code 1 and names no node: mpiexec: not allowed"):
        run("mpiexec: not allowed")
    assert run("preflight: 6 ranks on 3 nodes: all is well, after 3 s", code=0) == {}
