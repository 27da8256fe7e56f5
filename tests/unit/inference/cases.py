"""Small models with a byte-level tokenizer, as checkpoints of ours and in memory."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from megatron.optimus.checkpoint import model_slices, save, training_slices
from megatron.optimus.config.schema import (
    ModelConfig,
    ParallelConfig,
    QKNormScope,
    RunConfig,
    ScoreFunction,
    TokenizerType,
)
from megatron.optimus.config.serialize import to_dict
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.tokenize.identity import TokenizerIdentity, write_identity
from megatron.optimus.data.tokenize.tokenizer import ByteLevelTokenizer
from megatron.optimus.inference.load import TextModel, load_text_model
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.platform.ranks import Ranks
from tests.unit.checkpoint.test_state import FakeOptimizer

DOCUMENTS, WORDS = 60, 20  # words of a document, such as "d7w12"
OPTIONS = ["--words", "8", "--items", "30", "--split", "50,50,0"]
SHAPE: dict[str, Any] = dict(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=48,
    vocab_size=264,
    max_position_embeddings=64,
)
EXPERTS: dict[str, Any] = dict(num_experts=4, moe_ffn_hidden_size=24, moe_router_topk=2)
MODELS: dict[str, dict[str, Any]] = {
    "dense": SHAPE | dict(qk_layernorm=False),
    "head_norm": SHAPE
    | dict(qk_layernorm_scope=QKNormScope.HEAD, clip_qkv=1.0, untie_embeddings_and_output_weights=False),
    "moe": SHAPE | EXPERTS,
    "shared": SHAPE
    | EXPERTS
    | dict(
        qk_layernorm_scope=QKNormScope.HEAD,
        clip_qkv=1.0,
        untie_embeddings_and_output_weights=False,
        moe_router_score_function=ScoreFunction.SIGMOID,
        moe_router_enable_expert_bias=True,
        moe_shared_expert_intermediate_size=16,
        moe_layer_freq=[0, 1],
    ),
}


def decoder(name: str) -> Decoder:
    torch.manual_seed(7)
    model = Decoder(ModelConfig(**MODELS[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("expert_bias"):
                buffer.copy_(torch.randn_like(buffer))
    return model.eval().requires_grad_(False)


def checkpoint(folder: Path, name: str, kind: str = "full") -> Path:
    """A checkpoint of the model, of a run in fp32."""
    model = decoder(name)
    run = RunConfig(model=model.config)
    run.data.tokenizer_type, run.training.params_dtype = TokenizerType.BYTE, "fp32"
    slices = (
        training_slices(model, FakeOptimizer(model), buffers=True)
        if kind == "full"
        else model_slices(model, dense=True, experts=True)
    )
    return save(folder, 4, slices, kind=kind, consumed_samples=0, config=to_dict(run), metadata={})


def loaded(path: Path, ranks: Ranks | None = None, **parallel: int) -> TextModel:
    kind = None if (path / "manifest.json").exists() else TokenizerType.BYTE
    return load_text_model(path, ParallelConfig(**parallel), ranks or Ranks(None, "cpu"), tokenizer_type=kind)


def prompts(count: int, longest: int = 20, seed: int = 1) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(256) for _ in range(generator.randint(1, longest))] for _ in range(count)]


def text_of(document: int) -> str:
    return " ".join(f"d{document}w{word}" for word in range(WORDS)) + "\n"


def pair_of_documents(folder: Path) -> Path:
    """A pair with its tokenizer's identity; documents from 30 on and a part of one before are its second half."""
    prefix, tokenizer = folder / "corpus", ByteLevelTokenizer()
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for document in range(DOCUMENTS):
            writer.add_document([*tokenizer.encode(text_of(document)), tokenizer.eod_id])
    write_identity(str(prefix), TokenizerIdentity.of(TokenizerType.BYTE, None))
    return prefix


def read_questions(folder: Path, task: str, name: str = "test") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{task}.{name}.jsonl").read_text().splitlines()]
