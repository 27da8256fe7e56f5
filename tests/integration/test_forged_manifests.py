"""Manifests with right hashes and values of every wrong type: each command ends with one error, or takes them."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from tests.integration.conftest import ROOT, TINY, Program, environment
from tests.unit.checkpoint.test_hostile import fields, put
from tests.unit.checkpoint.test_manifest import sealed

WRONG = (None, True, -1, 1 << 63, 10**400, 1.5, "text", "\x1b[31m", [], [1], [[]], {}, {"a": 1})
# In the checkpoint's folder, one case a file: manifests are put in place one after the other. All in one process, since
# a start takes seconds.
LOOP = """
import contextlib, io, json, logging, resource, shutil, signal, sys, traceback
from pathlib import Path
from megatron.optimus import cli
checkpoint, cases, work, tokens, *tiny = sys.argv[1:]
checkpoint, work = Path(checkpoint), Path(work)
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))

def hang(*_):
    raise TimeoutError("more than 30 s")

signal.signal(signal.SIGALRM, hang)
for number, case in enumerate(sorted(Path(cases).iterdir())):
    shutil.copy(case, checkpoint / "manifest.json")
    run = str(work / f"run{number}")
    commands = [["verify", str(checkpoint), "--list"]]
    if "config" in case.name or "metadata" in case.name or number % 7 == 0:
        commands.append(["convert", str(checkpoint), str(work / f"hf{number}"), "--to", "hf"])
    if "config.model" not in case.name:
        commands.append(["pretrain", "--load", str(checkpoint), "--data-path", tokens, "--run-dir", run, *tiny])
    for words in commands:
        printed = io.StringIO()
        signal.alarm(30)
        try:
            with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
                code = cli.main(words)
            errors = [line for line in printed.getvalue().splitlines() if line.startswith("error")]
            good = code == 0 or "DAMAGED" in printed.getvalue() or code == 2 and len(errors) == 1
            good = good and "Traceback" not in printed.getvalue() and chr(27) not in printed.getvalue()
            found = "ok" if good else f"code {code}: {printed.getvalue()[-400:]!r}"
        except BaseException as error:
            found = "raised " + repr(traceback.format_exception(error)[-4:])
        finally:
            signal.alarm(0)
        print(json.dumps([case.name, words[0], found]), flush=True)
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
        wrongs = WRONG if field[0] in ("config", "metadata", "step", "consumed_samples") else WRONG[number % 3 :: 3]
        if (
            field[:2] == ("config", "training")
            and len(field) > 2
            and field[2] not in ("global_batch_size", "seq_length")
        ):
            wrongs = WRONG[number % 13 :: 13]
        for index, wrong in enumerate(wrongs):
            body = copy.deepcopy(good)
            put(body, field, wrong)
            text = json.dumps(body["config"], sort_keys=True, separators=(",", ":"))
            body["config_xxh3_128"] = xxhash.xxh3_128_hexdigest(text.encode())
            yield f"{'.'.join(map(str, field))}.{index:02d}", body


def test_wrong_types_under_right_hashes(pretrain: Program, tokens: Path, tmp_path: Path) -> None:
    done = pretrain(tmp_path / "run", "--train-iters", 2)
    assert done.returncode == 0, done.stderr
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    good = json.loads((checkpoint / "manifest.json").read_text())
    good["metadata"] |= {"hf_token_ids": {"eos_token_id": 0}, "hf_generation_config": {"eos_token_id": 0}}
    cases, work = tmp_path / "cases", tmp_path / "work"
    cases.mkdir()
    work.mkdir()
    for name, body in forged(good):
        (cases / name).write_bytes(sealed(body))
    assert len(list(cases.iterdir())) > 190
    words = [
        sys.executable,
        "-c",
        LOOP,
        str(checkpoint),
        str(cases),
        str(work),
        str(tokens),
        *TINY,
        "--train-iters",
        "2",
    ]
    loop = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    results = [json.loads(line) for line in loop.stdout.splitlines() if line.startswith("[")]
    assert {name for name, _, _ in results} == {case.name for case in cases.iterdir()}, loop.stderr[-2000:]
    bad = [result for result in results if result[2] != "ok"]
    assert not bad, "\n".join(map(str, bad[:20]))
