"""Models that transformers has no architecture for: our modelling code in an export computes what the decoder does."""

import logging
import math
import re

import pytest
import torch
import torch.nn.functional as F

from megatron.optimus.checkpoint import model_slices, save
from megatron.optimus.config.schema import (
    ConfigError,
    Normalization,
    ParallelConfig,
    Precision,
    QKNormScope,
    RotaryScaling,
    RunConfig,
    ScoreFunction,
    TokenizerType,
)
from megatron.optimus.config.serialize import changed_options, to_dict
from megatron.optimus.convert import Options, convert, open_source
from megatron.optimus.describe import describe
from megatron.optimus.inference.generate import Limits, generate
from megatron.optimus.inference.load import load_text_model
from megatron.optimus.inference.sampling import Sampling
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.huggingface.architectures import (
    ARCHITECTURES,
    OPTIMUS,
    export_notice,
    exported_architecture,
)
from megatron.optimus.models.huggingface.config import hf_config, model_config_from_hf
from megatron.optimus.models.parameters import parameter_shapes
from megatron.optimus.platform.ranks import Ranks

transformers = pytest.importorskip("transformers")
from tests.unit.convert.convert_cases import our_config  # noqa: E402

_SHARED = dict(moe_shared_expert_intermediate_size=20)
_BIAS = dict(moe_router_enable_expert_bias=True)
_DENSE_FIRST = dict(moe_layer_freq=[0, 1, 1], num_layers=3, ffn_hidden_size=28)
_SIGMOID = dict(moe_router_score_function=ScoreFunction.SIGMOID)
# Every reason for which transformers has no architecture, alone and all at once: (options, bias of the experts).
CASES = {
    "sigmoid": (_SIGMOID, 0),
    "sigmoid_normalised": (_SIGMOID | dict(moe_router_norm_topk_prob=True), 0),
    "expert_bias": (_BIAS, 0.25),
    "dense_first": (_DENSE_FIRST, 0),
    "shared_beside_qk_norm": (_SHARED, 0),
    "gated_shared_beside_qk_norm": (_SHARED | dict(moe_shared_expert_gate=True), 0),
    "moe_without_norm_weights": (dict(normalization=Normalization.LAYERNORM_NONPARAMETRIC, qk_layernorm=False), 0),
    "unnormalised_without_qk_norm": (dict(qk_layernorm=False), 0),
    "qkv_bias_beside_experts": (dict(add_qkv_bias=True), 0),
    "clip_and_head_norm": (dict(clip_qkv=0.7, qk_layernorm_scope=QKNormScope.HEAD), 0),
    "head_width": (dict(kv_channels=12, num_query_groups=2), 0),
    "dense_full_qk_norm": (dict(num_experts=0, ffn_hidden_size=28), 0),
    "dense_epsilon": (
        dict(
            num_experts=0,
            ffn_hidden_size=28,
            qk_layernorm=False,
            normalization=Normalization.LAYERNORM_NONPARAMETRIC,
            norm_epsilon=0.03,
        ),
        0,
    ),
    "everything": (
        _SIGMOID
        | _BIAS
        | _SHARED
        | _DENSE_FIRST
        | dict(moe_router_norm_topk_prob=True, moe_shared_expert_gate=True, clip_qkv=0.9, add_qkv_bias=True)
        | dict(kv_channels=12, num_query_groups=2, untie_embeddings_and_output_weights=False, norm_epsilon=1e-3)
        | dict(rotary_scaling=RotaryScaling.LLAMA3, rotary_scaling_factor=4.0, rotary_original_positions=8),
        "random",
    ),
}


@pytest.fixture(autouse=True)
def _own_module_cache(tmp_path, monkeypatch):
    """transformers copies the code that it loads into a folder of the user's."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def our_model(changes, bias):
    torch.manual_seed(7)
    model = Decoder(our_config(**changes).model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1 if bias == "random" else torch.arange(4.0) * bias)
    return model.eval()


def our_checkpoint(folder, model):
    run = RunConfig(model=model.config)
    run.training.params_dtype = Precision.FP32  # no tokenizer: an export would compare the ids of thousands of texts
    slices = model_slices(model, dense=True, experts=True)
    save(folder, 1, slices, kind="model", consumed_samples=0, config=to_dict(run), metadata={})


def our_text_model(folder):
    ranks = Ranks(None, torch.device("cpu"))
    return load_text_model(folder, ParallelConfig(), ranks, tokenizer_type=TokenizerType.BYTE)


def loaded(folder, **options):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    return model.eval()


def assert_close(found, expected, limit=1e-5, least=0.01):
    assert expected.abs().max() > least
    assert (found - expected).abs().max() <= limit * expected.abs().max()


def assert_same_checkpoint(left, right):
    left, right = open_source(left), open_source(right)
    assert left.dtypes.keys() == right.dtypes.keys() and left.buffers.keys() == right.buffers.keys()
    for name, kind in left.dtypes:
        size = math.prod(parameter_shapes(left.model)[name])
        assert torch.equal(left.read(name, kind, 0, size), right.read(name, kind, 0, size)), name
    for name, buffer in left.buffers.items():
        assert torch.equal(buffer, right.buffers[name]), name
    changes = changed_options(to_dict(RunConfig(model=left.model)), to_dict(RunConfig(model=right.model)))
    assert not [text for text in changes if left.model.is_moe or not text.startswith("model.moe_")]


@pytest.mark.parametrize("case", CASES)
def test_an_export_computes_what_we_do_and_comes_back(tmp_path, case, caplog):
    changes, bias = CASES[case]
    ours = our_model(changes, bias)
    our_checkpoint(tmp_path / "run", ours)
    with caplog.at_level(logging.WARNING, "optimus"):
        assert convert(tmp_path / "run", tmp_path / "hf", to="hf", verify=True).compared > 0
    assert "no equivalent in Hugging Face's" in caplog.text and "trust_remote_code" in caplog.text
    theirs = loaded(tmp_path / "hf")

    tokens = torch.randint(0, 256, (2, 24))
    expected, found = ours(tokens).logits_BSV, theirs(tokens).logits
    assert_close(found, expected)
    F.cross_entropy(expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    theirs(tokens, labels=tokens).loss.backward()
    assert_close(theirs.model.embed_tokens.weight.grad, ours.embedding.weight.grad, 1e-4, least=1e-6)
    for mine, other in zip(ours.layers, theirs.model.layers, strict=True):
        assert_close(other.self_attn.q_proj.weight.grad, mine.attention.q_proj.weight.grad, 1e-4, least=1e-6)
        if mine.is_moe:
            assert_close(other.mlp.gate.weight.grad, mine.moe.router.weight.grad, 1e-4, least=1e-6)
            assert_close(other.mlp.experts.gate_up_proj.grad, mine.moe.experts.gate_up_weight.grad, 1e-4, least=1e-6)
    assert not [name for name, parameter in theirs.named_parameters() if parameter.grad is None]

    # greedy tokens: prompts of different lengths, padded on the left, with a cache of keys and values
    prompts = ["Once upon", "A"]
    text_model = our_text_model(tmp_path / "run")
    ids = [text_model.tokenizer.encode(prompt) for prompt in prompts]
    sampling, limits = Sampling(temperature=0.0), Limits(12, (), True)
    mine = [one.token_ids for one in generate(text_model, ids, sampling, limits)]
    longest = max(map(len, ids))
    batch = torch.tensor([[0] * (longest - len(one)) + one for one in ids])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in ids])
    settings = dict(do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)
    assert theirs.generate(batch, attention_mask=mask, **settings)[:, longest:].tolist() == mine

    theirs.save_pretrained(tmp_path / "saved", max_shard_size=20_000)
    assert torch.equal(loaded(tmp_path / "saved")(tokens).logits, found)
    for folder in ("hf", "saved"):
        convert(tmp_path / folder, tmp_path / f"{folder} back", to="optimus", verify=True)
        assert_same_checkpoint(tmp_path / f"{folder} back", tmp_path / "run")


def test_the_harness_gives_our_log_likelihoods(tmp_path):
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    from megatron.optimus.inference.harness import HarnessModel

    ours = our_model(*CASES["everything"])
    our_checkpoint(tmp_path / "run", ours)
    convert(tmp_path / "run", tmp_path / "hf", to="hf", options=Options(tokenizer_type=TokenizerType.BYTE))
    harness = huggingface.HFLM(
        pretrained=str(tmp_path / "hf"), trust_remote_code=True, dtype="float32", device="cpu", batch_size=2
    )
    requests = [Instance("loglikelihood", {}, ("2 + 3 =", f" {answer}"), 0) for answer in (5, 7, 11)]
    found = [value for value, _ in harness.loglikelihood(requests, disable_tqdm=True)]
    expected = [value for value, _ in HarnessModel(our_text_model(tmp_path / "run"), 2).loglikelihood(requests)]
    assert found == pytest.approx(expected, abs=1e-4)


def test_bf16_keeps_the_bias_and_chooses_the_same_experts(tmp_path):
    ours = our_model(*CASES["everything"])
    our_checkpoint(tmp_path / "run", ours)
    convert(tmp_path / "run", tmp_path / "hf", to="hf", options=Options("bf16"))
    theirs = loaded(tmp_path / "hf", dtype="auto")
    gate = theirs.model.layers[1].mlp.gate
    assert theirs.dtype == torch.bfloat16 and gate.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(gate.e_score_correction_bias, ours.layers[1].moe.router.expert_bias)
    with torch.no_grad():
        ours = ours.bfloat16()
        tokens = torch.randint(0, 256, (2, 24))
        assert_close(theirs(tokens).logits.float(), ours(tokens).logits_BSV.float(), 3e-2)


def test_what_is_no_model_to_share_is_refused():
    forced = our_config(moe_router_force_load_balancing=True).model
    with pytest.raises(ConfigError, match="moe_router_force_load_balancing=True has no equivalent"):
        exported_architecture(forced, biased=False)
    olmoe = our_config(moe_router_enable_expert_bias=True).model
    assert exported_architecture(olmoe, biased=False) == (ARCHITECTURES["olmoe"], "")
    assert exported_architecture(olmoe, biased=True)[0] is OPTIMUS


def test_how_a_model_will_leave_is_said_before_the_training():
    plain = our_config(vocab_size=320)
    assert "export" not in describe(plain, 1) and export_notice(plain.model) == ""
    biased = our_config(moe_router_enable_expert_bias=True)
    assert "code of its own (trust_remote_code=True)" in describe(biased, 1)
    assert "moe_router_enable_expert_bias=True has no equivalent in Hugging Face's OLMoE" in describe(biased, 1)
    assert "export to Hugging Face: not possible, moe_router_force" in export_notice(
        our_config(moe_router_force_load_balancing=True).model
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"normalization": "batchnorm"}, "config.json: model.normalization='batchnorm' is not one of rmsnorm"),
        ({"moe_shared_expert_gate": "yes"}, "model.moe_shared_expert_gate='yes': expected true or false"),
        ({"sliding_window": 4}, "sliding_window=4 is not supported for model_type 'optimus'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; only 'silu' is"),
    ],
)
def test_a_changed_config_is_refused_by_name(changes, message):
    model = our_config(**CASES["everything"][0]).model
    fields = hf_config(model, "float32", OPTIMUS)
    read = model_config_from_hf(fields)
    assert changed_options(to_dict(RunConfig(model=read)), to_dict(RunConfig(model=model))) == []
    with pytest.raises(ConfigError, match=re.escape(message)):
        model_config_from_hf(fields | changes)
