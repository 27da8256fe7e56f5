"""Models of transformers and runs of ours that the converters' tests read and write. Needs transformers."""

from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from megatron.optimus.checkpoint import model_slices, save, training_slices
from megatron.optimus.checkpoint.tokenizer_files import HASHES_FIELD, hash_files
from megatron.optimus.config.schema import ModelConfig, RunConfig
from megatron.optimus.config.serialize import to_dict
from megatron.optimus.models.decoder import Decoder
from tests.unit.checkpoint.test_state import FakeOptimizer

VOCAB = 300


MOE = dict(
    vocab_size=VOCAB,
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


DENSE = {k: v for k, v in MOE.items() if "expert" not in k}


LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)


GRANITE = {k: v for k, v in MOE.items() if k != "num_experts"}
GRANITE |= dict(num_local_experts=4, shared_intermediate_size=12, attention_multiplier=8**-0.5)
FAMILIES = {
    "olmoe": ("Olmoe", MOE),
    "olmo": ("Olmo", DENSE),
    "llama": ("Llama", DENSE | dict(head_dim=12)),
    "qwen3": ("Qwen3", DENSE | dict(head_dim=12)),
    "mixtral": ("Mixtral", MOE | dict(head_dim=12)),
    "qwen2": ("Qwen2", DENSE),
    "qwen2_moe": ("Qwen2Moe", MOE | dict(moe_intermediate_size=20, shared_expert_intermediate_size=12)),
    "granitemoeshared": ("GraniteMoeShared", GRANITE),
    "qwen3_moe": ("Qwen3Moe", MOE | dict(head_dim=12, moe_intermediate_size=20)),
}


def hf_model(kind, dtype=torch.float32, seed=3, **changes):
    torch.manual_seed(seed)
    title, shape = FAMILIES[kind]
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


def our_config(**changes):
    shape = dict(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=VOCAB,
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
    metadata = {HASHES_FIELD: hash_files(run.data.tokenizer_model)}
    save(folder, 4, slices, kind=kind, consumed_samples=0, config=to_dict(run), metadata=metadata)
    return model
