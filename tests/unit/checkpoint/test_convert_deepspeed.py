"""Conversion against DeepSpeed itself: what its engine writes we read, what we write it loads, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import os
import re

import pytest
import torch

from megatron.optimus.checkpoint import CheckpointError, load, load_manifest, model_slices
from megatron.optimus.checkpoint.convert import Options, convert, open_source
from megatron.optimus.checkpoint.convert.names import parts_under
from megatron.optimus.checkpoint.convert.parts import gather
from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.config.serialize import from_dict
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.hf_config import hf_config
from megatron.optimus.models.hf_map import parameter_shapes
from tests.helpers import run_distributed
from tests.unit.checkpoint import stock_deepspeed as stock

_EXPERTS = re.compile(r"(.*deepspeed_experts\.)(\d+)(\..*)")


def moe_config():
    s = stock.SHAPE
    return ModelConfig(
        num_layers=s["layers"],
        hidden_size=s["hidden"],
        num_attention_heads=s["heads"],
        num_query_groups=s["kv_heads"],
        vocab_size=stock.VOCAB,
        num_experts=s["experts"],
        moe_ffn_hidden_size=s["inner"],
        moe_router_topk=2,
        qk_layernorm=False,
        moe_router_norm_topk_prob=True,
    )


def config_file(tmp_path, model):
    """--model-config, in both of its forms."""
    if model.is_moe:
        (tmp_path / "config.json").write_text(json.dumps(hf_config(model, "float32")))
        return tmp_path / "config.json"
    text = "\n".join(f"  {field}: {value}" for field, value in dataclasses.asdict(model).items() if type(value) is int)
    (tmp_path / "run.yaml").write_text(f"model:\n{text}\n  qk_layernorm: false\n")
    return tmp_path / "run.yaml"


def merged(ranks, ep_size):
    """One state of the whole model from those of all ranks; experts get their global numbers."""
    whole = {}
    for kind in ranks[0]:
        whole[kind] = {}
        for rank, state in enumerate(ranks):
            for name, tensor in state[kind].items():
                match = _EXPERTS.fullmatch(name)
                if match:
                    per_rank = stock.SHAPE["experts"] // ep_size
                    name = f"{match[1]}{rank % ep_size * per_rank + int(match[2])}{match[3]}"
                known = whole[kind].setdefault(name, tensor)
                assert torch.equal(known, tensor), (kind, name, rank)  # replicas agree
    return whole


def assert_holds(source, state, names):
    """Every tensor of every kind of an opened checkpoint, under the foreign names."""
    shapes = parameter_shapes(source.model)
    parts = parts_under(names, source.model)
    assert source.kinds == set(state)
    for kind, expected in state.items():
        assert expected.keys() == {part.key for part in parts}
        for part in parts:
            dtype = expected[part.key].dtype
            found = gather(part, shapes, lambda name, a, b, kind=kind: source.read(name, kind, a, b), dtype)
            assert source.dtypes[part.blocks[0].name, kind] == dtype
            assert torch.equal(found, expected[part.key]), (kind, part.key)


CASES = {
    "dense-z1-bf16": ("decoder", 2, 1, 1, "bf16"),
    "dense-z2-fp32": ("decoder", 3, 2, 1, "fp32"),
    "moe-z1-ep2-bf16": ("moe", 4, 1, 2, "bf16"),
    "moe-z2-ep4-fp32": ("moe", 4, 2, 4, "fp32"),
}


@pytest.mark.parametrize("case", CASES)
def test_zero_to_optimus_to_universal_and_into_deepspeed(tmp_path, case):
    """A stock run -> ours -> universal -> a stock run of another size: weights, masters, moments and step, exactly."""
    what, world, stage, ep_size, precision = CASES[case]
    names = "hf-native-moe" if what == "moe" else "optimus"
    model = moe_config() if what == "moe" else stock.decoder_config()
    ranks = run_distributed(stock.write_checkpoint, world, str(tmp_path / "run"), what, stage, ep_size, precision)
    state = merged(ranks, ep_size)
    config = config_file(tmp_path, model)

    with pytest.raises(CheckpointError, match="do not say what the model looks like.*--model-config"):
        open_source(tmp_path / "run")
    source = open_source(tmp_path / "run", config)
    assert (source.format, source.step, source.optimizer_steps) == ("zero", 3, 3)
    assert source.consumed_samples == 3 * 2 * world
    assert_holds(source, state, names)

    done = convert(tmp_path / "run", tmp_path / "ours", to="optimus", model_config=config, verify=True)
    assert done.compared == 3 * len(parameter_shapes(model))
    manifest = load_manifest(tmp_path / "ours")
    assert (manifest.kind, manifest.step, manifest.consumed_samples) == ("full", 3, 3 * 2 * world)
    assert manifest.metadata["optimizer_step_count"] == 3
    full = {kind: tensors for kind, tensors in state.items() if kind != "weight"}
    assert_holds(open_source(tmp_path / "ours"), full, names)

    options = Options(names=names)
    convert(tmp_path / "ours", tmp_path / "universal", to="universal", options=options, verify=True)
    assert_holds(open_source(tmp_path / "universal"), full, names)
    loaded = run_distributed(
        stock.load_universal, 1 if what == "moe" else world - 1, str(tmp_path / "universal"), what, stage, precision
    )
    for before, _ in loaded:
        for kind, expected in full.items():
            assert before[kind].keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(before[kind][name], tensor), (kind, name)
    convert(tmp_path / "universal", tmp_path / "back", to="optimus", verify=True)
    assert_holds(open_source(tmp_path / "back"), full, names)
