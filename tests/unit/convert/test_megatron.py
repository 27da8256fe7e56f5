"""Conversion against megatron-core: it loads our files and gives our logits, and its files come back bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.optimus.checkpoint import CheckpointError, load, load_manifest, model_slices, resolve, save
from megatron.optimus.config.schema import ModelConfig, Normalization, QKNormScope, RunConfig, ScoreFunction
from megatron.optimus.config.serialize import from_dict, to_dict
from megatron.optimus.convert import Options, convert, open_source
from megatron.optimus.convert.formats import WEIGHT, matrices
from megatron.optimus.models.decoder import Decoder
from tests.helpers import run_distributed
from tests.unit.convert import megatron_core_model as core

pytest.importorskip("megatron.core")


def our_checkpoint(folder, config, seed=0):
    torch.manual_seed(seed)
    model = Decoder(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.randn_like(buffer))
    slices = model_slices(model, dense=True, experts=True)
    run = RunConfig(model=config)
    save(folder, 5, slices, kind="model", consumed_samples=40, config=to_dict(run), metadata={})
    return model


def our_model(folder):
    model = Decoder(from_dict(load_manifest(folder).config).model)
    load(folder, model_slices(model, dense=True, experts=True))
    return model


def assert_same_weights(left, right):
    assert left.dtypes == right.dtypes and left.dtypes
    for name, start, stop in matrices(left.model):
        a, b = left.read(name, WEIGHT, start, stop), right.read(name, WEIGHT, start, stop)
        assert torch.equal(a, b), name
    assert left.buffers.keys() == right.buffers.keys()
    assert all(torch.equal(left.buffers[name], right.buffers[name]) for name in left.buffers)


# tensor-, pipeline-, expert-parallel size, MoE, QK-norm per head, tied embeddings, shared experts, dense first layer
_LOADED = [
    (1, 1, 1, False, True, True),
    (2, 1, 1, False, False, False),
    (1, 1, 2, True, True, False),
    (2, 1, 1, True, False, False),
    (2, 1, 1, True, False, False, True),
    (2, 1, 1, True, False, False, True, True),
    (1, 1, 2, True, True, False, False, True),
]
_WRITTEN = [
    (2, 2, 1, False, True, True),
    (1, 2, 2, True, True, False),
    (2, 1, 1, True, False, False),
    (2, 2, 1, True, False, False, True),
    (1, 2, 2, True, True, False, True),
    (1, 2, 2, True, False, False, False, True),
]


def test_megatron_core_loads_our_files_and_computes_the_same(tmp_path):
    tokens = torch.randint(0, core.VOCAB, (2, 13))
    expected, cases = [], []
    for number, case in enumerate(_LOADED):
        ours = our_checkpoint(tmp_path / f"ours{number}", ModelConfig(**core.shape(*case[3:])))
        options = Options(tp=case[0], pp=case[1], ep=case[2], transformer_engine=False)
        convert(tmp_path / f"ours{number}", tmp_path / f"m{number}", to="megatron", options=options, verify=True)
        with torch.no_grad():
            expected.append(ours(tokens).logits_BSV)
        cases.append((str(tmp_path / f"m{number}" / "iter_0000005"), case))
    answers = run_distributed(core.load_our_files, 2, cases, tokens, timeout=300)
    for number, case in enumerate(_LOADED):
        columns = dict(answer[number] for answer in answers)
        found = torch.cat([columns[tp_rank] for tp_rank in range(case[0])], dim=-1)
        assert found.shape == expected[number].shape
        difference = (found - expected[number]).abs().max() / expected[number].abs().max()
        assert difference <= 1e-5, (case, difference)


def test_files_of_megatron_core_come_back_bit_for_bit(tmp_path):
    run_distributed(
        core.write_files, 4, [(str(tmp_path / f"m{n}"), case) for n, case in enumerate(_WRITTEN)], timeout=300
    )
    for number, (tp, pp, ep, *kind) in enumerate(_WRITTEN):
        source, ours, back = (tmp_path / f"{name}{number}" for name in ("m", "ours", "back"))
        values = "\n".join(f"  {n}: {getattr(v, 'value', v)}" for n, v in core.shape(*kind).items())
        (tmp_path / "model.yaml").write_text(f"model:\n{values}\n")
        with pytest.raises(CheckpointError, match="has no 'args'; describe the model with --model-config"):
            open_source(source)
        convert(source, ours, to="optimus", model_config=tmp_path / "model.yaml", verify=True)
        assert from_dict(load_manifest(ours).config).model == ModelConfig(**core.shape(*kind))
        options = Options(tp=tp, pp=pp, ep=ep, transformer_engine=False)
        convert(ours, back, to="megatron", options=options, verify=True)
        files = {file.parent.name: file for file in source.glob("iter_0000007/*/*.pt")}
        again = {file.parent.name: file for file in back.glob("iter_*/*/*.pt")}
        assert files.keys() == again.keys() and len(files) == tp * pp * ep
        for folder, file in files.items():
            original = torch.load(file, weights_only=False)["model"]
            found = torch.load(again[folder], weights_only=False)["model"]
            original = {name: tensor for name, tensor in original.items() if isinstance(tensor, torch.Tensor)}
            assert original.keys() == found.keys()
            for name, tensor in original.items():
                assert torch.equal(found[name], tensor), (folder, name)


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
    our_checkpoint(tmp_path / "ours", ModelConfig(**_SMALL, **more, qk_layernorm=False))
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


_SMALL = dict(
    num_layers=4,
    hidden_size=24,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=6,
    ffn_hidden_size=16,
    vocab_size=300,  # padded to 512 on two ranks and 1,024 on four: the last ranks hold zeros only
)
_MODELS = {
    "mula-moe": dict(num_experts=4, moe_ffn_hidden_size=8, moe_router_topk=2),
    "biased-sigmoid": dict(
        num_experts=4,
        moe_ffn_hidden_size=8,
        moe_router_topk=2,
        moe_router_score_function=ScoreFunction.SIGMOID,
        moe_router_enable_expert_bias=True,
        moe_router_norm_topk_prob=True,
    ),
    "shared": dict(
        num_experts=4,
        moe_ffn_hidden_size=8,
        moe_router_topk=2,
        moe_shared_expert_intermediate_size=12,
        moe_shared_expert_gate=True,
        add_qkv_bias=True,
    ),
    "dense-first": dict(num_experts=4, moe_ffn_hidden_size=8, moe_router_topk=2, moe_layer_freq=[0, 1, 0, 1]),
    "mula-dense": dict(normalization=Normalization.LAYERNORM_NONPARAMETRIC, qk_layernorm=False),
    "llama-tied": dict(qk_layernorm=False, untie_embeddings_and_output_weights=False),
    "qwen3": dict(qk_layernorm_scope=QKNormScope.HEAD),
}


@pytest.mark.parametrize("kind", _MODELS)
def test_every_layout_and_back(tmp_path, kind):
    """Ours -> a layout -> another layout of Megatron's -> ours: the same bits, whatever the ranks."""
    config = ModelConfig(**_SMALL, **_MODELS[kind])
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


def test_the_model_is_understood_from_the_arguments_alone(tmp_path):
    """Without our description beside the files, Megatron's own arguments must say the same."""
    cases = {
        "moe": dict(
            num_experts=4, moe_ffn_hidden_size=8, moe_router_topk=2, qk_layernorm=False, moe_router_norm_topk_prob=True
        ),
        "shared": _MODELS["shared"] | dict(qk_layernorm=False, moe_router_norm_topk_prob=True),
        "dense-first": _MODELS["dense-first"] | dict(qk_layernorm=False, moe_router_norm_topk_prob=True),
        "qwen3": dict(qk_layernorm_scope=QKNormScope.HEAD),
        "dense": _MODELS["mula-dense"],
    }
    for name, options in cases.items():
        config = ModelConfig(**_SMALL, **options)
        our_checkpoint(tmp_path / name, config)
        convert(tmp_path / name, tmp_path / f"m-{name}", to="megatron", options=Options(tp=2))
        [sidecar] = (tmp_path / f"m-{name}").glob("iter_*/optimus_model.json")
        sidecar.unlink()
        found = open_source(tmp_path / f"m-{name}")
        assert_same_weights(found, open_source(tmp_path / name))
        ours = Decoder(config)
        load(resolve(tmp_path / name), model_slices(ours, dense=True, experts=True))
        convert(tmp_path / f"m-{name}", tmp_path / f"o-{name}", to="optimus")
        tokens = torch.randint(0, 300, (1, 9))
        with torch.no_grad():
            assert torch.equal(our_model(tmp_path / f"o-{name}")(tokens).logits_BSV, ours(tokens).logits_BSV)


def edit(folder, rank, change):
    [file] = folder.glob(f"iter_*/{rank}/model_optim_rng.pt")
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


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
    our_checkpoint(tmp_path / "ours", ModelConfig(**_SMALL, qk_layernorm=False))
    options = Options(tp=2, transformer_engine=False)
    convert(tmp_path / "ours", tmp_path / "mcore", to="megatron", options=options)
    [sidecar] = (tmp_path / "mcore").glob("iter_*/optimus_model.json")
    sidecar.unlink()
    edit(tmp_path / "mcore", "mp_rank_01" if "copies" in message else "mp_rank_00", change)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "mcore", tmp_path / "back", to="optimus")
    assert not (tmp_path / "back").exists()


def test_missing_ranks_and_impossible_layouts(tmp_path):
    config = ModelConfig(**_SMALL, qk_layernorm=False)
    our_checkpoint(tmp_path / "ours", config)
    for options, message in (
        (Options(tp=3), "tensor-parallel size 3 must divide num_query_groups=4"),
        (Options(pp=3), "--target-pipeline-parallel-size 3 must divide num_layers=4"),
        (Options(ep=2), "the model has no experts"),
    ):
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / "ours", tmp_path / "mcore", to="megatron", options=options)
    convert(tmp_path / "ours", tmp_path / "mcore", to="megatron", options=Options(tp=2, pp=2))
    [file] = (tmp_path / "mcore").glob("iter_*/mp_rank_00_001/*.pt")
    file.unlink()
    file.parent.rmdir()
    with pytest.raises(CheckpointError, match="files are missing for the ranks tp 0 pp 1 ep 0"):
        open_source(tmp_path / "mcore")
    (tmp_path / "mcore" / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(CheckpointError, match="is neither an iteration nor 'release'"):
        open_source(tmp_path / "mcore")
