"""What an average of checkpoints refuses, and that it holds one matrix of each source at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.optimus.checkpoint import CheckpointError
from megatron.optimus.commands import average as command
from megatron.optimus.convert import convert, open_source
from megatron.optimus.convert.average import average
from megatron.optimus.models.parameters import parameter_shapes

pytest.importorskip("transformers")
from .convert_cases import our_config, our_run


def test_unlike_models_and_wrong_weights_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, model = our_config(), our_config().model
    our_run(tmp_path / "one", run, "full")
    our_run(tmp_path / "deeper", replace(run, model=replace(model, num_layers=model.num_layers + 1)), "full")
    our_run(tmp_path / "other", replace(run, model=replace(model, rotary_base=5.0)), "model")
    our_run(tmp_path / "same", replace(run, model=replace(model, moe_aux_loss_coeff=0.5)), "model")
    one, out = tmp_path / "one", tmp_path / "out"
    for name, part in (
        ("deeper", f"num_layers {model.num_layers} -> {model.num_layers + 1}; average checkpoints of one model"),
        ("other", "rotary_base"),
    ):
        with pytest.raises(CheckpointError, match=part) as error:
            average([one, tmp_path / name], out)
        assert "is another model than" in str(error.value)
    for weights, part in (([1.0], "1 numbers for 2"), ([1.0, -1.0], "above zero"), ([1.0, float("nan")], "above zero")):
        with pytest.raises(CheckpointError, match=part):
            average([one, tmp_path / "same"], out, weights)
    with pytest.raises(CheckpointError, match="two checkpoints or more, 1 given"):
        average([one], out)
    with pytest.raises(CheckpointError, match="holds the source"):
        average([one, tmp_path / "same"], tmp_path, overwrite=True)
    assert command.main([str(one), str(tmp_path / "same"), "--out", str(out), "--weights", "1,x"]) == 2
    assert "'1,x' is no list of numbers such as 1,1,2" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="holds no moving average"):
        convert(one, out, to="hf", averaged=True)
    assert not out.exists()
    average([one, tmp_path / "same"], out)  # how a model is balanced is not what it computes


def test_a_range_is_read_of_one_source_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.optimus.convert.optimus import OptimusSource

    for name in ("one", "two", "three"):
        our_run(tmp_path / name, our_config(), "full")
    largest, read = 0, OptimusSource.read

    def watched(self: OptimusSource, name: str, kind: str, start: int, stop: int) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, stop - start)
        return read(self, name, kind, start, stop)

    monkeypatch.setattr(OptimusSource, "read", watched)
    average([tmp_path / name for name in ("one", "two", "three")], tmp_path / "out")
    source = open_source(tmp_path / "out")
    shapes = parameter_shapes(source.model).values()
    source.close()
    assert largest == max(shape[-1] * shape[-2] // (2 if len(shape) == 3 else 1) for shape in shapes if len(shape) > 1)
