"""Conversion against transformers itself: what it saves we read, what we write it loads, bit for bit."""

import json
import logging
import math
import os
import random
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron.optimus.checkpoint import CheckpointError, load, load_manifest, model_slices, save, verify
from megatron.optimus.config.family import family_of
from megatron.optimus.config.schema import ConfigError, Normalization, Precision
from megatron.optimus.config.serialize import from_dict, to_dict
from megatron.optimus.convert import Options, convert, open_source
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.huggingface.architectures import ARCHITECTURES
from tests.unit.checkpoint.test_manifest import sealed

transformers = pytest.importorskip("transformers")
from .convert_cases import LLAMA3, VOCAB, assert_same, hf_model, loaded, our_config, our_run, tensors  # noqa: E402

_HEADS_FILL_WIDTH = ("olmo", "olmoe", "qwen2", "qwen2_moe", "granitemoeshared")  # no head_dim in their configurations


@pytest.mark.parametrize(
    "kind, dtype, changes, max_shard",
    [
        ("olmoe", torch.float32, {}, 10**9),
        (
            "olmoe",
            torch.bfloat16,
            {"clip_qkv": 4.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            9000,
        ),
        ("olmo", torch.float32, {}, 10**9),
        ("olmo", torch.bfloat16, {"tie_word_embeddings": True}, 5000),
        ("llama", torch.float32, {"rope_parameters": LLAMA3}, 10**9),
        (
            "llama",
            torch.float32,
            {
                "tie_word_embeddings": True,
                "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
            },
            9000,
        ),
        ("llama", torch.float32, {"num_key_value_heads": 4}, 9000),
        ("qwen3", torch.float32, {}, 9000),
        ("mixtral", torch.float32, {}, 10**9),
        ("mixtral", torch.bfloat16, {"head_dim": None, "num_experts_per_tok": 3}, 9000),
        ("qwen2", torch.float32, {}, 9000),
        ("qwen2_moe", torch.float32, {}, 9000),
        ("qwen2_moe", torch.bfloat16, {"qkv_bias": False, "norm_topk_prob": True, "moe_intermediate_size": 24}, 10**9),
        ("granitemoeshared", torch.float32, {}, 9000),
        ("granitemoeshared", torch.bfloat16, {"tie_word_embeddings": True, "num_experts_per_tok": 3}, 10**9),
        ("qwen3_moe", torch.float32, {"norm_topk_prob": True}, 9000),
        ("qwen3_moe", torch.float32, {"num_hidden_layers": 4, "mlp_only_layers": [0, 2]}, 9000),
        ("qwen2_moe", torch.float32, {"num_hidden_layers": 4, "decoder_sparse_step": 2}, 9000),
        ("qwen3_moe", torch.float32, {"tie_word_embeddings": True, "num_key_value_heads": 1}, 10**9),
    ],
)
def test_hf_to_optimus_to_hf(tmp_path, kind, dtype, changes, max_shard):
    hf_model(kind, dtype, **changes).save_pretrained(tmp_path / "hf", max_shard_size=max_shard)
    done = convert(
        tmp_path / "hf", tmp_path / "ours", to="optimus", options=Options(max_shard_bytes=max_shard), verify=True
    )
    assert done.compared == len(done.tensors) > 0
    verify(tmp_path / "ours")
    assert load_manifest(tmp_path / "ours").kind == "model"
    done = convert(
        tmp_path / "ours", tmp_path / "back", to="hf", options=Options(max_shard_bytes=max_shard), verify=True
    )
    assert done.compared > 0
    assert_same(tensors(tmp_path / "hf"), tensors(tmp_path / "back"))
    assert (tmp_path / "back" / "model.safetensors.index.json").exists() == (max_shard < 10**9)
    model, back = loaded(tmp_path / "hf"), loaded(tmp_path / "back")
    assert back.dtype == dtype
    tokens = torch.randint(0, VOCAB, (2, 11))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, back(tokens).logits)
    assert back.config.eos_token_id == 0 and back.generation_config.eos_token_id == 0
    # and our own model computes the same from our checkpoint
    run = load_manifest(tmp_path / "ours").config
    ours = Decoder(_model_config(run)).to(dtype)
    load(tmp_path / "ours", model_slices(ours, dense=True, experts=True))
    with torch.no_grad():
        mine, theirs = ours(tokens).logits_BSV.float(), model(tokens).logits.float()
    assert theirs.abs().max() > 0.01
    assert (mine - theirs).abs().max() <= (1e-5 if dtype == torch.float32 else 3e-2) * theirs.abs().max()


def _model_config(config):
    return from_dict(config).model


def test_model_only_to_hf_and_back(tmp_path):
    our_run(tmp_path / "run" / "checkpoints", our_config(), "model")
    convert(tmp_path / "run", tmp_path / "hf", to="hf")
    convert(tmp_path / "hf", tmp_path / "back", to="optimus")
    source = tmp_path / "run" / "checkpoints" / "model-00000004"
    manifests = [load_manifest(source), load_manifest(tmp_path / "back")]
    assert manifests[0].tensors.keys() == manifests[1].tensors.keys()
    models = [Decoder(our_config().model).bfloat16() for _ in range(2)]
    for path, model in zip((source, tmp_path / "back"), models, strict=True):
        load(path, model_slices(model, dense=True, experts=True))
    for (name, left), (_, right) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
        assert torch.equal(left, right), name
    loaded(tmp_path / "hf")


@pytest.mark.parametrize(
    "dtype, precision, expected",
    [
        (None, Precision.BF16, torch.bfloat16),
        (None, Precision.FP32, torch.float32),
        ("source", Precision.BF16, torch.float32),
        ("bf16", Precision.FP32, torch.bfloat16),
    ],
)
def test_full_checkpoint_exports_masters_in_the_dtype_of_the_run(tmp_path, dtype, precision, expected):
    run = our_config()
    run.training.params_dtype = precision
    model = our_run(tmp_path / "run", run, "full")
    convert(tmp_path / "run", tmp_path / "hf", to="hf", options=Options(dtype=dtype))
    found = tensors(tmp_path / "hf")
    assert torch.equal(found["model.embed_tokens.weight"], model.embedding.weight.detach().to(expected))
    gate_up = model.layers[1].moe.experts.gate_up_weight.detach().to(expected)
    assert torch.equal(found["model.layers.1.mlp.experts.3.up_proj.weight"], gate_up[3, 24:])
    assert loaded(tmp_path / "hf").dtype == expected


def bpe(folder):
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["def f(x): return x", "for line in lines: print(line)"] * 5, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize("as_file", [True, False])
@pytest.mark.parametrize("named_in_config", [True, False])
def test_tokenizer_travels_and_generates(tmp_path, named_in_config, as_file):
    tokenizer = bpe(tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer.json" if as_file else tmp_path / "tokenizer"
    run = our_config()
    if named_in_config:
        run.data.tokenizer_model = str(path)
    our_run(tmp_path / "run", run, "full")
    convert(tmp_path / "run", tmp_path / "hf", to="hf", options=Options("fp32", None if named_in_config else path))
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "def g(line): return  lines\n"
    assert found(text)["input_ids"] == tokenizer.encode(text).ids
    assert found.decode(found(text)["input_ids"]) == text
    model = loaded(tmp_path / "hf")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == found.eos_token_id == 0
    model.generate(**found("def", return_tensors="pt"), max_new_tokens=4, do_sample=False)


def test_a_tokenizer_without_tokenizer_json_is_not_left_behind_in_silence(tmp_path, caplog):
    hf_model("olmo").save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.model").write_bytes(b"sentencepiece")
    convert(tmp_path / "hf", tmp_path / "ours", to="optimus")
    assert "its tokenizer stays behind" in caplog.text


def test_files_of_others_do_not_leave_with_an_export(tmp_path, caplog):
    """A manifest names any JSON file, and links lie beside a tokenizer that the command line names."""
    (tmp_path / "private").mkdir()
    secret = tmp_path / "private" / "credentials.json"
    secret.write_text('{"token": "of another user"}')
    run = our_config()
    run.data.tokenizer_model = str(secret)
    our_run(tmp_path / "run", run, "full")
    (manifest,) = (tmp_path / "run").glob("step-*/manifest.json")
    forged = json.loads(manifest.read_text())
    forged["metadata"] = {}
    manifest.write_bytes(sealed(forged))
    with caplog.at_level(logging.WARNING, "optimus"):
        convert(tmp_path / "run", tmp_path / "hf", to="hf")
    assert "name the tokenizer with --tokenizer" in caplog.text
    assert not any(b"another user" in file.read_bytes() for file in (tmp_path / "hf").iterdir())

    bpe(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "vocab.json").symlink_to(secret)
    with pytest.raises(CheckpointError, match=r"vocab.json: not a regular file \(links are not followed"):
        convert(tmp_path / "run", tmp_path / "hf2", to="hf", options=Options(tokenizer=tmp_path / "tokenizer"))
    assert not (tmp_path / "hf2").exists()


def test_missing_tokenizers(tmp_path, caplog):
    run = our_config()
    run.data.tokenizer_model = str(tmp_path / "gone")
    our_run(tmp_path / "run", run, "full")
    with pytest.raises(CheckpointError, match=r"--tokenizer-model .*nowhere: neither the file of a Hug"):
        convert(tmp_path / "run", tmp_path / "hf", to="hf", options=Options(tokenizer=tmp_path / "nowhere"))
    with caplog.at_level(logging.WARNING, "optimus"):
        convert(tmp_path / "run", tmp_path / "hf", to="hf")
    assert "gone is not there" in caplog.text


@pytest.mark.parametrize("freq", [[1], [0, 1]])
def test_shared_experts_biases_and_dense_layers_come_back_from_every_format(tmp_path, freq):
    shared = dict(moe_shared_expert_intermediate_size=20, moe_shared_expert_gate=True, add_qkv_bias=True)
    run = our_config(qk_layernorm=False, moe_layer_freq=freq, ffn_hidden_size=28, **shared)
    our_run(tmp_path / "run", run, "full")
    for to, names in (("universal", "optimus"), ("universal", "hf"), ("zero", "hf-native-moe"), ("hf", "optimus")):
        there, back = (tmp_path / f"{to}-{names}{way}" for way in ("", "-back"))
        convert(tmp_path / "run", there, to=to, options=Options(dtype="fp32", names=names), verify=True)
        convert(there, back, to="optimus", verify=True)
        found, whole = open_source(back), open_source(tmp_path / "run")
        for name, kind in found.dtypes:
            size = math.prod(load_manifest(back).tensors[name, kind].shape)
            original = whole.read(name, "master" if kind == "weight" else kind, 0, size)
            assert torch.equal(found.read(name, kind, 0, size), original), (to, name, kind)
        assert {name for name, _ in found.dtypes} == {name for name, _ in whole.dtypes}
    # DeepSpeed numbers the layers that have experts
    files = {path.name.partition("_expert_")[0] for path in tmp_path.glob("zero-*/global_step*/layer_*_expert_*")}
    assert files == {f"layer_{number}" for number in range(len(run.model.moe_layers))}


def test_expert_bias(tmp_path):
    run = our_config(moe_router_enable_expert_bias=True)
    our_run(tmp_path / "zero", run, "full")
    convert(tmp_path / "zero", tmp_path / "hf", to="hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "olmoe"  # zeros are left out
    our_run(tmp_path / "biased", run, "full", bias=0.25)
    convert(tmp_path / "biased", tmp_path / "hf2", to="hf")
    assert json.loads((tmp_path / "hf2" / "config.json").read_text())["model_type"] == "optimus"
    assert bool((tensors(tmp_path / "hf2")["model.layers.1.mlp.gate.e_score_correction_bias"] == 0.25).all())


def test_an_expert_bias_that_the_architecture_has(tmp_path, monkeypatch):
    run = our_config(moe_router_enable_expert_bias=True)
    with_bias = replace(
        ARCHITECTURES["olmoe"],
        needs=ARCHITECTURES["olmoe"].needs | {"moe_router_enable_expert_bias": True},
        names={"moe.router.expert_bias": "mlp.gate.score_bias"},
    )
    monkeypatch.setattr(family_of(run.model), "architectures", (with_bias,), raising=False)
    our_run(tmp_path / "biased", run, "full", bias=0.25)
    convert(tmp_path / "biased", tmp_path / "hf", to="hf", verify=True)
    convert(tmp_path / "hf", tmp_path / "back", to="optimus", verify=True)
    names = {f"layers.{layer}.moe.router.expert_bias" for layer in range(2)}
    buffers = open_source(tmp_path / "back").buffers
    assert buffers.keys() == names and all(bool((bias == 0.25).all()) for bias in buffers.values())
    for wrong in (None, torch.zeros(3)):
        weights = tensors(tmp_path / "hf")
        weights.pop("model.layers.1.mlp.gate.score_bias", None)
        weights |= {} if wrong is None else {"model.layers.1.mlp.gate.score_bias": wrong}
        save_file(weights, tmp_path / "hf" / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"layers.1.mlp.gate.score_bias is missing or not of shape \(4,"):
            convert(tmp_path / "hf", tmp_path / "wrong", to="optimus")


def test_models_without_an_equivalent(tmp_path):
    our_run(tmp_path / "run", our_config(moe_router_force_load_balancing=True), "full")
    with pytest.raises(ConfigError, match="moe_router_force_load_balancing=True has no equivalent"):
        convert(tmp_path / "run", tmp_path / "hf", to="hf")
    olmo = our_config(num_experts=0, normalization=Normalization.LAYERNORM_NONPARAMETRIC, qk_layernorm=False)
    our_run(tmp_path / "olmo", olmo, "full")
    convert(tmp_path / "olmo", tmp_path / "hf", to="hf")
    loaded(tmp_path / "hf")


def test_a_folder_of_the_hubs_cache_is_links_and_its_generation_settings_travel(tmp_path):
    model = hf_model("llama")
    model.generation_config.update(eos_token_id=[0, 5], temperature=0.6, do_sample=True)
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0a1b"
    blobs.mkdir(parents=True)
    model.save_pretrained(snapshot, max_shard_size=9000)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    settings = json.loads((snapshot / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [0, 5] and settings["temperature"] == 0.6
    for via in ("optimus", "megatron", "universal"):
        convert(snapshot, tmp_path / via, to=via, verify=True)
        convert(tmp_path / via, tmp_path / f"{via} back", to="hf", options=Options(dtype="fp32"), verify=True)
        assert_same(tensors(snapshot), tensors(tmp_path / f"{via} back"))
        assert json.loads((tmp_path / f"{via} back" / "generation_config.json").read_text()) == settings


def random_shape(kind, seed):
    """Keyword arguments of a transformers configuration; widths fit its grouped products (rows of 16 bytes)."""
    draw = random.Random(f"{kind}{seed}")
    groups, per_group = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
    heads, head_dim = groups * per_group, 4 * draw.choice([1, 2, 3])
    changes = dict(
        hidden_size=heads * head_dim if kind in _HEADS_FILL_WIDTH else draw.choice([24, 36, 40]),
        intermediate_size=draw.choice([12, 20, 32]),
        num_hidden_layers=draw.choice([1, 2, 3]),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        tie_word_embeddings=draw.random() < 0.3,
        rope_parameters=draw.choice([LLAMA3, {"rope_type": "default", "rope_theta": draw.choice([100.0, 1e6])}]),
    )
    if kind not in _HEADS_FILL_WIDTH:
        changes["head_dim"] = head_dim
    if kind not in ("olmo", "llama", "qwen2"):
        experts = draw.choice([3, 5, 8])
        changes |= dict(num_experts=experts, num_experts_per_tok=draw.randint(1, experts))
        if kind != "mixtral":
            changes["norm_topk_prob"] = draw.random() < 0.5
    if kind == "granitemoeshared":
        changes |= dict(num_local_experts=changes.pop("num_experts"), attention_multiplier=head_dim**-0.5)
        changes |= dict(shared_intermediate_size=draw.choice([4, 20, 28]))
        del changes["norm_topk_prob"]  # always, by another name
    if kind in ("qwen2_moe", "qwen3_moe"):
        changes["moe_intermediate_size"] = draw.choice([8, 16])
    if kind == "qwen2_moe":
        changes |= dict(shared_expert_intermediate_size=draw.choice([4, 20, 28]), qkv_bias=draw.random() < 0.5)
    return changes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "kind", ["olmo", "olmoe", "llama", "mixtral", "qwen2", "qwen2_moe", "granitemoeshared", "qwen3_moe"]
)
def test_random_configurations_give_the_same_logits(tmp_path, kind, seed):
    """Both ways: what transformers saved gives the same logits here, and what we export gives ours in transformers."""
    hf_model(kind, seed=seed, **random_shape(kind, seed)).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours", to="optimus")
    run = from_dict(load_manifest(tmp_path / "ours").config)
    ours = Decoder(run.model)
    load(tmp_path / "ours", model_slices(ours, dense=True, experts=True))
    tokens = torch.randint(0, VOCAB, (2, 40))
    theirs = loaded(tmp_path / "hf")
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (ours(tokens).logits_BSV - expected).abs().max() <= 1e-5 * expected.abs().max()
        for parameter in ours.parameters():  # other weights, so that the export is really ours
            parameter.copy_(torch.randn_like(parameter) * 0.1)
        expected = ours(tokens).logits_BSV
    slices = model_slices(ours, dense=True, experts=True)
    save(tmp_path / "run", 1, slices, kind="model", consumed_samples=0, config=to_dict(run), metadata={})
    convert(tmp_path / "run", tmp_path / "back", to="hf", verify=True)
    with torch.no_grad():
        found = loaded(tmp_path / "back")(tokens).logits
    assert expected.abs().max() > 0.01
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_wrong_hf_folders(tmp_path):
    hf_model("olmoe").save_pretrained(tmp_path / "hf")
    content = tensors(tmp_path / "hf")
    good = (tmp_path / "hf" / "model.safetensors").read_bytes()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())

    def refused(message, *, weights=None, config=config, index=None, error=CheckpointError):
        folder = tmp_path / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        if isinstance(weights, bytes):
            (folder / "model.safetensors").write_bytes(weights)
        elif weights is not None:
            save_file(weights, folder / "model.safetensors")
        if index is not None:
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(error, match=message):
            convert(folder, tmp_path / "out", to="optimus")
        assert not (tmp_path / "out").exists()

    refused("has neither model.safetensors nor .*pickle files")
    refused("header is damaged", weights=good[:-3])
    refused("lacks 1 tensors .*: lm_head.weight", weights={k: v for k, v in content.items() if k != "lm_head.weight"})
    refused("has unexpected 1 tensors .*: extra", weights=content | {"extra": torch.zeros(1)})
    refused("has shape .*, its configuration says", weights=content, config=config | {"vocab_size": 7})
    mixed = dict(content)
    mixed["model.layers.0.mlp.experts.1.up_proj.weight"] = mixed["model.layers.0.mlp.experts.1.up_proj.weight"].half()
    refused("parts of layers.0.moe.experts.gate_up_weight have different dtypes", weights=mixed)
    refused("model_type='gpt2'", weights=content, config=config | {"model_type": "gpt2"}, error=ConfigError)
    for name in ("../hf/model.safetensors", "/etc/passwd", 5):
        refused("is not the plain name", weights=content, index={"weight_map": {"a": name}})
    for value in (["model.safetensors"], [], {}, 3, None):
        refused("is not the plain name", weights=content, index={"weight_map": {"a": value}})
    refused("weight_map is missing", weights=content, index={})
    with pytest.raises(CheckpointError, match="no such folder"):
        convert(tmp_path / "nothing", tmp_path / "out", to="hf")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_in_a_hugging_face_folder_is_an_error_and_no_wait(tmp_path, name):
    hf_model("olmo").save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "hf" / name)
    with pytest.raises(CheckpointError, match=r"not a regular file|has no|holds no"):
        open_source(tmp_path / "hf")
