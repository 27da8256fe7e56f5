"""Weights & Biases gets every number of a step, and a resumed run continues there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.training.trackers.wandb import WandbTracker
from tests.unit.training.test_metrics import metrics


class FakeWandb:
    """The three calls of wandb that are used; a run's id is made where none is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def init(self, **arguments: Any) -> Any:
        self.calls.append(("init", arguments))
        return SimpleNamespace(
            id=arguments["id"] or "made", log=lambda *a, **k: self.calls.append((*a, k)), finish=lambda: None
        )


def test_wandb_gets_every_number_and_a_resumed_run_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        tracker = WandbTracker("moe", None, tmp_path / "first", {"model": {"num_layers": 2}})
        tracker.log(metrics(7, valid_loss=3.5, valid_losses={"web": 2.5}, recorded={"attention/entropy": 1.5}))
        tracker.close()
    (_, first), (numbers, keywords), (_, second), _ = fake.calls
    assert (first["project"], first["name"], first["config"]) == ("moe", "first", {"model": {"num_layers": 2}})
    assert (first["id"], second["id"], second["resume"]) == (None, "made", "allow")
    assert keywords == {"step": 7} and numbers["valid_loss"] == 3.5 and numbers["valid_loss/web"] == 2.5
    assert numbers["attention/entropy"] == 1.5
    assert not {"step", "mfu"} & numbers.keys(), "what is not applicable is left out"


def test_wandb_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"wandb_project='moe' needs a package .*pip install wandb"):
        WandbTracker("moe", None, tmp_path, {})
