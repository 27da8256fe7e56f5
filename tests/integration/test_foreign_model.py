"""The example of a transformers model under deepspeed_ext alone, as its README says it is run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.integration.conftest import ROOT, environment

pytest.importorskip("transformers")


def test_two_ranks_learn_to_count_and_nothing_of_megatron_is_imported() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = ROOT / "examples/foreign_model/train.py"
    assert "megatron" not in script.read_text()
    done = subprocess.run(
        [*launcher, str(script)], capture_output=True, text=True, timeout=240, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(value) for value in re.findall(r"step \d+ loss ([\d.]+)", done.stdout)]
    assert len(losses) == 6 and losses[-1] < 0.2 * losses[0], losses
