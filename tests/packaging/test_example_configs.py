"""The run of each preset in examples/configs, started as its first lines say, could start and fits its machines."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron.optimus import launch
from megatron.optimus.config.load import load
from megatron.optimus.config.options import OPTIONS
from megatron.optimus.config.presets import PRESETS
from megatron.optimus.planner.hardware import machine_named
from megatron.optimus.planner.plan import plan

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "examples" / "configs"


def command(preset: str) -> list[str]:
    """The words of the command in the file's first lines."""
    lines = (CONFIGS / f"{preset}.yaml").read_text(encoding="utf-8").splitlines()
    [line] = [line.removeprefix("#") for line in lines if line.startswith("#   optimus ")]
    return shlex.split(line)[1:]


def test_every_preset_has_an_example_and_no_other_file_is_there() -> None:
    assert sorted(path.name for path in CONFIGS.iterdir()) == sorted(f"{name}.yaml" for name in PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_an_example_run_could_start(
    preset: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    name, *words = command(preset)
    assert name == "launch" and launch.main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"output: runs/{preset};" in shown and "data: data/corpus_text_document; tokenizer: data/tokenizer;" in shown
    world_size = int(shown.partition(" ranks, ")[0].rpartition("= ")[2])
    run = load(words[words.index("--preset") :])
    assert run.preset == preset
    assert plan(run.config, world_size, machine_named("h200")).fits
    config = load(["--config", f"examples/configs/{preset}.yaml"]).config
    own = [name for name, option in OPTIONS.items() if getattr(getattr(config, option.section), name) != option.default]
    assert len(own) <= 8, "thin: the model and its recipe are the preset's"
