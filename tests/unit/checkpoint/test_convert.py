"""Conversion against transformers itself: what it saves we read, what we write it loads, bit for bit."""

import json
import logging
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron.optimus.checkpoint import CheckpointError, load, load_manifest, model_slices, save, verify
from megatron.optimus.checkpoint.convert import Options, convert, open_source
from megatron.optimus.checkpoint.shards import write_shard
from megatron.optimus.config.schema import ConfigError, ModelConfig, Normalization, Precision, RunConfig
from megatron.optimus.config.serialize import from_dict, to_dict
from megatron.optimus.models.decoder import Decoder
from tests.unit.checkpoint.test_state import FakeOptimizer

transformers = pytest.importorskip("transformers")
from megatron.optimus.checkpoint import training_slices  # noqa: E402

_ROOT = Path(__file__).parents[3]
_VOCAB = 300
_MOE = dict(
    vocab_size=_VOCAB,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    pad_token_id=None,
    eos_token_id=0,
)
_DENSE = {k: v for k, v in _MOE.items() if "expert" not in k}


_LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
_FAMILIES = {
    "olmoe": ("Olmoe", _MOE),
    "olmo": ("Olmo", _DENSE),
    "llama": ("Llama", _DENSE | dict(head_dim=12)),
    "qwen3": ("Qwen3", _DENSE | dict(head_dim=12)),
    "mixtral": ("Mixtral", _MOE | dict(head_dim=12)),
    "qwen2": ("Qwen2", _DENSE),
    "qwen2_moe": ("Qwen2Moe", _MOE | dict(moe_intermediate_size=20, shared_expert_intermediate_size=12)),
    "qwen3_moe": ("Qwen3Moe", _MOE | dict(head_dim=12, moe_intermediate_size=20)),
}


def hf_model(kind, dtype=torch.float32, seed=3, **changes):
    torch.manual_seed(seed)
    title, shape = _FAMILIES[kind]
    config = getattr(transformers, f"{title}Config")(**(shape | changes))
    model = getattr(transformers, f"{title}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()


def tensors(folder):
    return {name: t for file in sorted(Path(folder).glob("*.safetensors")) for name, t in load_file(file).items()}


def assert_same(left, right):
    assert left.keys() == right.keys() and left
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


def loaded(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


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
        ("llama", torch.float32, {"rope_parameters": _LLAMA3}, 10**9),
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
        ("qwen3_moe", torch.float32, {"norm_topk_prob": True}, 9000),
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
    tokens = torch.randint(0, _VOCAB, (2, 11))
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


def our_config(**changes):
    shape = dict(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=_VOCAB,
        num_experts=4,
        moe_ffn_hidden_size=24,
        moe_router_topk=2,
    )
    return RunConfig(model=ModelConfig(**(shape | changes)))


def our_run(folder, run, kind, *, bias=0.0):
    torch.manual_seed(5)
    model = Decoder(run.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.fill_(bias)
    if kind == "full":
        slices = training_slices(model, FakeOptimizer(model), buffers=True)
    else:
        slices = model_slices(model.bfloat16(), dense=True, experts=True)
    save(folder, 4, slices, kind=kind, consumed_samples=0, config=to_dict(run), metadata={})
    return model


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
        vocab_size=_VOCAB, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
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


def test_missing_tokenizers(tmp_path, caplog):
    run = our_config()
    run.data.tokenizer_model = str(tmp_path / "gone")
    our_run(tmp_path / "run", run, "full")
    with pytest.raises(CheckpointError, match=r"--tokenizer .*nowhere: neither a tokenizer.json"):
        convert(tmp_path / "run", tmp_path / "hf", to="hf", options=Options(tokenizer=tmp_path / "nowhere"))
    with caplog.at_level(logging.WARNING, "optimus"):
        convert(tmp_path / "run", tmp_path / "hf", to="hf")
    assert "gone is not there" in caplog.text


def test_shared_experts_and_biases_come_back_from_every_format(tmp_path):
    run = our_config(
        qk_layernorm=False, moe_shared_expert_intermediate_size=20, moe_shared_expert_gate=True, add_qkv_bias=True
    )
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


def test_expert_bias(tmp_path):
    run = our_config(moe_router_enable_expert_bias=True)
    our_run(tmp_path / "zero", run, "full")
    convert(tmp_path / "zero", tmp_path / "hf", to="hf")
    our_run(tmp_path / "biased", run, "full", bias=0.25)
    with pytest.raises(CheckpointError, match=r"buffer layers.0.moe.router.expert_bias is not zero"):
        convert(tmp_path / "biased", tmp_path / "hf2", to="hf")
    assert sorted(os.listdir(tmp_path)) == ["biased", "hf", "zero"]


def test_dense_models_without_an_equivalent(tmp_path):
    our_run(tmp_path / "run", our_config(num_experts=0), "full")
    with pytest.raises(ConfigError, match="qk_layernorm_scope=full has no equivalent"):
        convert(tmp_path / "run", tmp_path / "hf", to="hf")
    olmo = our_config(num_experts=0, normalization=Normalization.LAYERNORM_NONPARAMETRIC, qk_layernorm=False)
    our_run(tmp_path / "olmo", olmo, "full")
    convert(tmp_path / "olmo", tmp_path / "hf", to="hf")
    loaded(tmp_path / "hf")


def test_destination_rules(tmp_path):
    our_run(tmp_path / "run", our_config(), "full")
    done = convert(tmp_path / "run", tmp_path / "hf", to="hf", dry_run=True)
    assert not (tmp_path / "hf").exists() and len(done.tensors) == 2 * (6 + 2 + 1 + 12) + 3
    assert done.num_bytes == sum(math.prod(t.shape) * t.dtype.itemsize for t in done.tensors)
    (tmp_path / "hf").mkdir()
    convert(tmp_path / "run", tmp_path / "hf", to="hf")
    (tmp_path / "hf" / "stale").touch()
    with pytest.raises(CheckpointError, match="not empty; choose another destination or add --overwrite"):
        convert(tmp_path / "run", tmp_path / "hf", to="hf")
    convert(tmp_path / "run", tmp_path / "hf", to="hf", overwrite=True)
    assert not (tmp_path / "hf" / "stale").exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="is no converted model"):
        convert(tmp_path / "run", tmp_path / "home", to="hf", overwrite=True)
    for destination in (tmp_path, tmp_path / "run"):
        with pytest.raises(CheckpointError, match="holds the source"):
            convert(tmp_path / "run", destination, to="hf", overwrite=True)
    with pytest.raises(CheckpointError, match="already is in 'optimus' format"):
        convert(tmp_path / "run", tmp_path / "x", to="optimus")
    assert sorted(os.listdir(tmp_path)) == ["hf", "home", "run"]


def test_a_failing_write_leaves_the_destination(tmp_path, monkeypatch):
    from megatron.optimus.checkpoint import hf_files

    our_run(tmp_path / "run", our_config(), "full")
    convert(tmp_path / "run", tmp_path / "hf", to="hf")
    before = tensors(tmp_path / "hf")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_files, "write_shard", full)
    with pytest.raises(CheckpointError, match=r"writing .*hf: No space left on device"):
        convert(tmp_path / "run", tmp_path / "hf", to="hf", options=Options("fp32"), overwrite=True)
    assert_same(before, tensors(tmp_path / "hf"))
    assert sorted(os.listdir(tmp_path)) == ["hf", "run"]


def test_damaged_checkpoints_are_not_converted(tmp_path):
    our_run(tmp_path / "run", our_config(), "full")
    shard = tmp_path / "run" / "step-00000004" / "node-00000-0.safetensors"
    data = bytearray(shard.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 5] ^= 16  # the first tensor: master weights, which an export reads
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tensor .* damaged: xxh3_128"):
        convert(tmp_path / "run", tmp_path / "hf", to="hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("to", ["hf", "optimus"])
def test_verify_finds_what_was_written_wrong(tmp_path, monkeypatch, to):
    """One bit changes between writing and reading back; without --verify nobody would know."""
    from megatron.optimus.checkpoint import hf_files
    from megatron.optimus.checkpoint.convert import optimus

    def wrong(path, items, *rest):
        result = write_shard(path, items, *rest)
        data = bytearray(path.read_bytes())
        data[-3] ^= 8
        path.write_bytes(data)
        return result

    our_run(tmp_path / "source", our_config(), "model")
    if to == "optimus":
        convert(tmp_path / "source", tmp_path / "hf", to="hf")
    monkeypatch.setattr(hf_files if to == "hf" else optimus, "write_shard", wrong)
    with pytest.raises(CheckpointError, match="read back differ from the source" if to == "hf" else "damaged"):
        convert(tmp_path / ("source" if to == "hf" else "hf"), tmp_path / "out", to=to, verify=True)
    assert not (tmp_path / "out").exists()
    convert(tmp_path / ("source" if to == "hf" else "hf"), tmp_path / "out", to=to)


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
    refused("weight_map is missing", weights=content, index={})
    with pytest.raises(CheckpointError, match="no such folder"):
        convert(tmp_path / "nothing", tmp_path / "out", to="hf")


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


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_in_a_hugging_face_folder_is_an_error_and_no_wait(tmp_path, name):
    hf_model("olmo").save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "hf" / name)
    with pytest.raises(CheckpointError, match=r"not a regular file|has no|holds no"):
        open_source(tmp_path / "hf")


def test_command_line(tmp_path):
    hf_model("olmoe").save_pretrained(tmp_path / "hf")

    def tool(*arguments):
        return subprocess.run(
            [sys.executable, str(_ROOT / "tools" / "convert_checkpoint.py"), *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )

    done = tool("hf", "ours", "--to", "optimus", "--dry-run")
    assert done.returncode == 0 and "layers.1.moe.experts.down_weight  float32  [4, 32, 24]" in done.stdout, done.stderr
    assert not (tmp_path / "ours").exists()
    done = tool("hf", "ours", "--to", "optimus")
    assert done.returncode == 0 and "wrote ours: 25 tensors" in done.stdout, done.stdout + done.stderr
    done = tool("hf", "ours", "--to", "optimus")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "add --overwrite" in done.stderr
