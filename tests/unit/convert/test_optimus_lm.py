"""Checkpoints of Optimus-LM: a state_dict with Hugging Face's names, whole, over ranks, and with merged experts."""

import os
import re

import pytest
import torch

from megatron.optimus.checkpoint import CheckpointError
from megatron.optimus.convert import Options, convert, open_source

pytest.importorskip("transformers")
from .convert_cases import assert_same, our_config, our_run, tensors


def renumbered(name, module, count):
    """The name as a rank has it that counts its layers or experts from 0."""
    return re.sub(rf"{module}\.(\d+)", lambda match: f"{module}.{int(match[1]) % count}", name)


def sharded(weights, pp, ep, merged):
    """What each of pp x ep ranks saves of a model of two layers and four experts."""
    layers, experts = 2 // pp, 4 // ep
    for number in range(pp * ep):
        found = {}
        for name, tensor in weights.items():
            layer, expert = (re.search(rf"{module}\.(\d+)", name) for module in ("layers", "experts"))
            stage = int(layer[1]) // layers if layer else (0 if "embed" in name else pp - 1)
            rank = int(expert[1]) // experts if expert else number % ep
            if (stage, rank) == (number // ep, number % ep):
                found[renumbered(renumbered(name, "layers", layers), "experts", experts)] = tensor
        for name in [name for name in found if merged and ".experts.0." in name]:
            parts = [found.pop(name.replace("experts.0.", f"experts.{i}.")) for i in range(experts)]
            found[name.replace("experts.0.", "experts.").removesuffix(".weight") + "_merged_weight"] = torch.stack(
                parts
            )
        yield found


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    our_run(folder / "run", our_config(), "full")
    convert(folder / "run", folder / "hf", to="hf", options=Options("fp32"))
    return folder / "hf"


@pytest.mark.parametrize("pp, ep, merged", [(1, 1, False), (2, 2, False), (1, 2, True)])
def test_they_become_our_checkpoint(exported, tmp_path, pp, ep, merged):
    source = tmp_path / "step4-tokens0B"
    source.mkdir()
    for number, shard in enumerate(sharded(tensors(exported), pp, ep, merged)):
        name = "model_checkpoint.pth" if pp * ep == 1 else f"model_checkpoint_shard-{number}.pth"
        torch.save({"state_dict": shard, "step": 4}, source / name)
    convert(source, tmp_path / "ours", to="optimus", model_config=exported, verify=True)
    convert(tmp_path / "ours", tmp_path / "hf", to="hf")
    assert_same(tensors(tmp_path / "hf"), tensors(exported))
    with pytest.raises(CheckpointError, match="do not say what the model looks like"):
        open_source(source)
    if pp * ep > 1:
        (source / f"model_checkpoint_shard-{pp * ep - 1}.pth").unlink()
        with pytest.raises(CheckpointError, match=f"so {pp * ep} files are expected, and there are {pp * ep - 1}"):
            open_source(source, exported)


def test_files_that_are_none(exported, tmp_path):
    torch.save({"weights": {}}, tmp_path / "model_checkpoint.pth")
    with pytest.raises(CheckpointError, match=r"model_checkpoint.pth: has no state_dict of tensors"):
        open_source(tmp_path, exported)
    torch.save({"state_dict": {"x": os.system}}, tmp_path / "model_checkpoint.pth")
    with pytest.raises(CheckpointError, match="system"):  # code is refused by name
        open_source(tmp_path, exported)
