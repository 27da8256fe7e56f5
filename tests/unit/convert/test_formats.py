"""Conversions hold one matrix at a time, whatever the size of the model and of the pieces it is stored in."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.optimus.checkpoint import Manifest
from megatron.optimus.checkpoint.manifest import MANIFEST_NAME, StoredPiece, TensorEntry
from megatron.optimus.checkpoint.shards import shard_header
from megatron.optimus.checkpoint.slices import Region
from megatron.optimus.config.presets import PRESETS
from megatron.optimus.config.serialize import from_dict, to_dict
from megatron.optimus.convert import FORMATS, convert
from megatron.optimus.models.parameters import parameter_shapes
from tests.unit.convert.test_optimus import write_model

_ROOT = Path(__file__).parents[3]
_MB = 1 << 20

# Converts small models, so that everything is imported, then each large one in a fork of its own; prints by how much
# the memory of each grew, in bytes. A case: small model, large one, destination, options.
_MEASURE = """
import json, os, sys, threading, time
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from megatron.optimus.commands import convert as convert_command
import megatron.optimus.convert

def now():
    text = open("/proc/self/status").read()
    return int(text.split("RssAnon:")[1].split()[0]) << 10

def measure(small, large, destination, *options):
    peak, done = [0], threading.Event()
    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], now())
            time.sleep(0.002)

    assert convert_command.main([small, destination + "-small", *options]) == 0
    start = now()
    thread = threading.Thread(target=watch)
    thread.start()
    code = convert_command.main([large, destination, *options])
    done.set()
    thread.join()
    assert code == 0
    print("GREW", peak[0] - start, flush=True)

for case in json.loads(sys.argv[2]):
    if (pid := os.fork()) == 0:
        code = 1
        try:
            measure(*case)
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            if code:
                sys.excepthook(*sys.exc_info())
            os._exit(code)
    if os.waitpid(pid, 0)[1]:
        sys.exit(1)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's account of memory")
def test_memory_does_not_grow_with_the_model(tmp_path):
    """The experts are pieces of 160 and 80 MB; a single matrix has half a megabyte, each of a few buffers 16."""
    write_model(tmp_path / "small", 4)
    assert write_model(tmp_path / "large", 160) > 240 * _MB
    cases = {}
    for to in ("hf", "optimus", "megatron", "universal"):
        small, large = ("hf-small", "hf") if to == "optimus" else ("small", "large")
        cases[to] = [*(str(tmp_path / name) for name in (small, large, to)), "--to", to, "--verify"]
        cases[to] += ["--names", "hf"] if to == "universal" else []
    command = [sys.executable, "-c", _MEASURE, str(_ROOT), json.dumps(list(cases.values()))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    grown = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("GREW ")]
    for to, grew in zip(cases, grown, strict=True):
        assert grew < 140 * _MB, (to, grew / _MB)


@pytest.mark.parametrize("name", ["mula-1b", "mula-7b-a1b", "mula-20b-a2b", "mula-100b-a7b", "mula-220b-a10b"])
def test_every_mula_model_can_be_planned(tmp_path, name):
    """A dry run over a sparse checkpoint of the real size: every tensor is listed, in every format."""
    run = from_dict(PRESETS[name])
    shapes = parameter_shapes(run.model)
    header, tensors, files = [], {}, {}
    for index, (tensor, shape) in enumerate(shapes.items()):
        file, numel = f"rank-{index:05d}.safetensors", math.prod(shape)
        header = shard_header([("x", "BF16", (numel,))])
        with open(tmp_path / file, "wb") as sparse:
            sparse.write(header)
            sparse.truncate(len(header) + 2 * numel)
        files[file] = len(header) + 2 * numel
        piece = StoredPiece(tensor, "weight", "BF16", Region(shape, 0, numel), "x", file, "0" * 32)
        tensors[tensor, "weight"] = TensorEntry(tensor, "weight", "BF16", shape, (piece,))
    config = {section: to_dict(run)[section] for section in ("model", "data")}
    (tmp_path / MANIFEST_NAME).write_bytes(Manifest("model", 0, 0, config, {}, files, tensors).to_bytes())
    total = sum(math.prod(shape) for shape in shapes.values())
    for to in FORMATS:
        if to == "optimus":
            continue
        done = convert(tmp_path, tmp_path / "out", to=to, dry_run=True)
        assert done.num_bytes == total * (4 if to == "universal" else 2), to
    hf = convert(tmp_path, tmp_path / "out", to="hf", dry_run=True)
    c = run.model
    dense = len(shapes) - (2 * c.num_layers if c.is_moe else 0)
    assert len(hf.tensors) == dense + (3 * c.num_experts * c.num_layers if c.is_moe else 0)
    assert not (tmp_path / "out").exists()
    if name == "mula-220b-a10b":
        assert hf.num_bytes == 2 * 220_205_681_664
        assert max(tensor.num_bytes for tensor in hf.tensors) == 50304 * 3072 * 2  # the largest thing ever held
    assert json.loads((tmp_path / MANIFEST_NAME).read_text())["kind"] == "model"
