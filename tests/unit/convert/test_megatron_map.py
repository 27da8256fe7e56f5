"""Megatron's names and layouts: every layout and back, spellings before megatron-core, files that do not fit."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.optimus.checkpoint import CheckpointError
from megatron.optimus.config.family import Family
from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.convert import Options, convert, open_source
from megatron.optimus.convert.megatron_map import megatron_tensors
from tests.unit.convert.megatron_cases import MODELS, SMALL, assert_same_weights, edit, our_checkpoint


def test_megatrons_files_hold_no_other_attention(monkeypatch):
    class Other(Family):
        attention = "somewhere:Else"

    monkeypatch.setattr("megatron.optimus.config.family._load", lambda name: Other())
    with pytest.raises(CheckpointError, match="model_family=decoder: Megatron's files hold model_family=decoder only"):
        megatron_tensors(ModelConfig(), {(0, 0, 0): None})


def legacy(tensors):
    """megatron-core's names -> those of Megatron-LM before core and of Megatron-DeepSpeed, nested as they nest them."""
    encoder, language = {}, {}
    for core_name, tensor in tensors.items():
        name = core_name
        for new, old in (
            ("linear_qkv", "query_key_value"),
            ("linear_proj", "dense"),
            ("pre_mlp_layernorm", "post_attention_layernorm"),
            ("linear_fc1", "dense_h_to_4h"),
            ("linear_fc2", "dense_4h_to_h"),
            ("mlp.router", "mlp.deepspeed_moe.gate.wg"),
            ("mlp.experts.local_experts", "mlp.deepspeed_moe.experts.deepspeed_experts"),
        ):
            name = name.replace(new, old)
        if name.startswith("decoder."):
            encoder[name.removeprefix("decoder.")] = tensor
        elif name.startswith("output_layer."):
            language["output_layer"] = {"weight": tensor}
        else:
            language["embedding"] = {"word_embeddings": {"weight": tensor}}
    return {"language_model": language | {"encoder": encoder}}


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("container", ["megatron", "deepspeed"])
def test_names_before_megatron_core(tmp_path, moe, container):
    """Also as the module of a DeepSpeed checkpoint, where Megatron-DeepSpeed puts them."""
    more = dict(num_experts=4, moe_ffn_hidden_size=8, moe_router_topk=2) if moe else {}
    our_checkpoint(tmp_path / "ours", ModelConfig(**SMALL, **more, qk_layernorm=False))
    convert(tmp_path / "ours", tmp_path / "m", to="megatron", options=Options(transformer_engine=False))
    edit(tmp_path / "m", "mp_rank_00", lambda content: content.update(model=legacy(content["model"])))
    source = tmp_path / "m"
    if container == "deepspeed":
        [file] = source.glob("iter_*/*/*.pt")
        source = tmp_path / "ds"
        source.mkdir()
        module = torch.load(file, weights_only=False)["model"]
        torch.save({"module": module, "global_steps": 5}, source / "mp_rank_00_model_states.pt")
        [sidecar] = (tmp_path / "m").glob("iter_*/optimus_model.json")
        sidecar.rename(source / "optimus_model.json")
    found = open_source(source)
    assert found.format == ("zero" if container == "deepspeed" else "megatron")
    assert_same_weights(found, open_source(tmp_path / "ours"))


@pytest.mark.parametrize("kind", MODELS)
def test_every_layout_and_back(tmp_path, kind):
    """Ours -> a layout -> another layout of Megatron's -> ours: the same bits, whatever the ranks."""
    config = ModelConfig(**SMALL, **MODELS[kind])
    our_checkpoint(tmp_path / "ours", config)
    original = open_source(tmp_path / "ours")
    layouts = [(1, 1, 1), (2, 1, 1), (4, 2, 1), (1, 4, 1), (2, 2, 2), (1, 1, 4)]
    last = tmp_path / "ours"
    for number, ((tp, pp, ep), te) in enumerate(zip(layouts, itertools.cycle((True, False)), strict=False)):
        if ep > 1 and not config.is_moe:
            continue
        folder = tmp_path / f"layout{number}"
        convert(last, folder, to="megatron", options=Options(tp=tp, pp=pp, ep=ep, transformer_engine=te), verify=True)
        files = list(folder.glob("iter_*/*/model_optim_rng.pt"))
        assert len(files) == tp * pp * ep
        last = folder
        assert_same_weights(open_source(last), original)
    convert(last, tmp_path / "back", to="optimus", verify=True)
    assert_same_weights(open_source(tmp_path / "back"), original)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c["model"].popitem(), "lacks 1 tensors"),
        (lambda c: c["model"].update(bias=torch.zeros(1)), "has unexpected 1 tensors.*bias"),
        (
            lambda c: c["model"].update({"decoder.layers.0.mlp.linear_fc2.weight": torch.zeros(3, 3)}),
            r"linear_fc2.weight has shape \(3, 3\), its configuration says \(24, 8\)",
        ),
        (
            lambda c: c["model"]["decoder.layers.0.input_layernorm.weight"].add_(1),
            "the ranks' copies differ: .*input_l",
        ),
        (lambda c: c.pop("model"), "has no 'model' with the weights"),
        (lambda c: c.update(checkpoint_version=1.0), "checkpoint_version 1.0 orders QKV differently"),
        (lambda c: vars(c["args"]).update(multi_latent_attention=True), "multi_latent_attention=True is not supported"),
        (lambda c: vars(c["args"]).update(add_bias_linear=True), "add_bias_linear=True is not supported"),
        (
            lambda c: vars(c["args"]).update(moe_shared_expert_intermediate_size=8),
            "moe_shared_expert_intermediate_size",
        ),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path, change, message):
    our_checkpoint(tmp_path / "ours", ModelConfig(**SMALL, qk_layernorm=False))
    options = Options(tp=2, transformer_engine=False)
    convert(tmp_path / "ours", tmp_path / "mcore", to="megatron", options=options)
    [sidecar] = (tmp_path / "mcore").glob("iter_*/optimus_model.json")
    sidecar.unlink()
    edit(tmp_path / "mcore", "mp_rank_01" if "copies" in message else "mp_rank_00", change)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "mcore", tmp_path / "back", to="optimus")
    assert not (tmp_path / "back").exists()
