"""Manifests with right hashes and values of every wrong type: each command ends with one error, or takes them.

verify reads all of them, convert every fourth, a run every eighth; OPTIMUS_EVERY_FORGED=1 has all converted.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.integration.conftest import ROOT, TINY, Program, environment
from tests.unit.checkpoint.test_hostile import fields, put
from tests.unit.checkpoint.test_manifest import sealed

WRONG = (None, True, -1, 10**400, 1.5, "\x1b[31m", [[]], {"a": 1})
# Puts one manifest after the other in the checkpoint's folder. Commands are forked from one process that has imported
# everything, since a start takes seconds.
LOOP = """
import json, os, shutil, signal, sys, traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
import megatron.optimus.commands.convert, megatron.optimus.commands.verify
import tests.preload
from megatron.optimus import cli
every, checkpoint, cases, work, tokens, *tiny = sys.argv[1:]
every, checkpoint, work = int(every), Path(checkpoint), Path(work)
RESUMED = ("0", "step", "consumed", "config.training.0", "config.optimizer.0", "config.training.seq_length")
RESUMED += ("config.training.global", "metadata.optimizer", "metadata.recent", "metadata.data")

def run(words, output):
    if words[0] != "pretrain":
        with open(output, "w") as file, redirect_stdout(file), redirect_stderr(file):
            try:
                return cli.main(words)
            except BaseException:
                traceback.print_exc(file=file)
                return 99
    pid = os.fork()  # process groups are left for good once a run has failed
    if pid == 0:
        signal.alarm(60)
        for stream in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
        code = 99
        try:
            code = cli.main(words)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for number, case in enumerate(sorted(Path(cases).iterdir())):
    shutil.copy(case, checkpoint / "manifest.json")
    commands = [["verify", str(checkpoint), "--list"]]
    if case.name.startswith(("config", "metadata", "step", "consumed", "0")) and number % every == 0:
        commands.append(["convert", str(checkpoint), str(work / f"hf{number}"), "--to", "hf"])
        folder = str(work / f"run{number}")
        load = ["pretrain", "--load", str(checkpoint), "--data-path", tokens, "--run-dir", folder, *tiny]
        commands += [load] if case.name.startswith(RESUMED) and number % (2 * every) == 0 else []
    for words in commands:
        output = work / f"{words[0]}{number}"
        code, text = run(words, output), output.read_text()
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        good = code == 0 or words[0] == "verify" and code == 1 and "DAMAGED" in text or code == 2 and len(errors) == 1
        good = good and "Traceback" not in text and chr(27) not in text and (code == 0 or case.name != "0")
        print(json.dumps([case.name, words[0], "ok" if good else f"code {code}: {text[-700:]}"]), flush=True)
"""


def forged(good: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """One of each kind of field with each wrong value, and the hash of the configuration made right again."""
    seen = set()
    for number, field in enumerate(fields(good)):
        kind = tuple("#" if isinstance(step, int) else step for step in field)
        is_long = len(field) > 2 and field[0] == "config" and field[:2] != ("config", "training")
        if kind in seen or field[0] in ("xxh3_128", "config_xxh3_128") or is_long:
            continue
        seen.add(kind)
        wrongs = WRONG if field[0] in ("config", "metadata", "step", "consumed_samples") else WRONG[number % 4 :: 4]
        if (
            field[:2] == ("config", "training")
            and len(field) > 2
            and field[2] not in ("global_batch_size", "seq_length")
        ):
            wrongs = WRONG[number % 8 :: 8]
        for index, wrong in enumerate(wrongs):
            body = copy.deepcopy(good)
            put(body, field, wrong)
            text = json.dumps(body["config"], sort_keys=True, separators=(",", ":"))
            body["config_xxh3_128"] = xxhash.xxh3_128_hexdigest(text.encode())
            yield f"{'.'.join(map(str, field))}.{index:02d}", body


@pytest.mark.timeout(900)
def test_wrong_types_under_right_hashes(train: Program, tokens: Path, tmp_path: Path) -> None:
    done = train(tmp_path / "run", "--train-iters", 2)
    assert done.returncode == 0, done.stderr
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    good = json.loads((checkpoint / "manifest.json").read_text())
    good["metadata"] |= {"hf_token_ids": {"eos_token_id": 0}, "hf_generation_config": {"eos_token_id": 0}}
    cases, work = tmp_path / "cases", tmp_path / "work"
    cases.mkdir()
    work.mkdir()
    for name, body in [("0", good), *forged(good)]:
        (cases / name).write_bytes(sealed(body))
    assert len(list(cases.iterdir())) > 180
    words = [
        sys.executable,
        "-c",
        LOOP,
        os.environ.get("OPTIMUS_EVERY_FORGED", "4"),
        str(checkpoint),
        str(cases),
        str(work),
        str(tokens),
        *TINY,
        "--train-iters",
        "2",
    ]
    loop = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    results = [json.loads(line) for line in loop.stdout.splitlines() if line.startswith('["')]
    assert {name for name, _, _ in results} == {case.name for case in cases.iterdir()}, loop.stderr[-2000:]
    bad = [result for result in results if result[2] != "ok"]
    assert not bad, "\n".join(map(str, bad[:20]))
