"""A full disk costs lines of a report, not the run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from megatron.optimus.config.load import load
from megatron.optimus.parallel.mesh import Mesh
from megatron.optimus.trainer.reporting import Reporter
from tests.unit.observe.test_metrics import metrics


def test_a_full_disk_is_told_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(["--preset", "mula-tiny", "--run-dir", str(tmp_path)]).config
    mesh = Mesh(config.parallel, rank=0, world_size=1)
    logging.getLogger("optimus").propagate = True
    with Reporter(config, mesh, first_step=0, last_step=9, total_samples=9) as reporter:
        reporter.write(metrics(1), [[3, 1]], {})
        disk, reporter._metrics._file = reporter._metrics._file, open("/dev/full", "w", buffering=1)  # noqa: SIM115
        for step in (2, 3):
            reporter.write(metrics(step), [[3, 1]], {"validation": 3.0, "web": 2.5})
        with pytest.raises(OSError):
            reporter._metrics._file.close()
        reporter._metrics._file = disk
        reporter.write(metrics(4), [[3, 1]], {})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 4]
    assert json.loads((tmp_path / "expert_load.json").read_text())["total_slots_per_layer_and_expert"] == [[12, 4]]
    assert [record.message.count("No space left on device") for record in caplog.records] == [1]
    assert capsys.readouterr().out.count(" valid_loss=3.0000 valid_loss/web=2.5000 ") == 2
