"""The harness gets of a checkpoint what it gets of its export through transformers, on one rank and on two."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from megatron.optimus.config.schema import ParallelConfig, TokenizerType
from megatron.optimus.convert import Options, convert
from megatron.optimus.data.tokenize.tokenizer import train_bpe
from megatron.optimus.inference.load import TextModel, load_text_model
from megatron.optimus.platform.ranks import Ranks
from tests.helpers import run_distributed
from tests.unit.inference.cases import checkpoint

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance

from megatron.optimus.inference.harness import HarnessModel

WORDS = "the cat sat on a mat and looked at naïve birds 🙂 in 12 trees".split()
Answers = tuple[list[tuple[float, bool]], list[float], list[str]]


def text(generator: random.Random, longest: int) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randint(1, longest)))


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, argument, number) for number, argument in enumerate(arguments)]


def answers(model: Any) -> Answers:
    """What a model says of pairs and texts, of which some exceed its 64 positions, and how it continues."""
    generator = random.Random(3)
    pairs = [(text(generator, 30), " " + text(generator, 3)) for _ in range(20)] + [("", "the cat"), ("the ", "mat")]
    texts = [(text(generator, 60),) for _ in range(6)]
    until = {"until": [" the", "\n"], "max_gen_toks": 10, "do_sample": False}
    prompts = [(text(generator, 25), until) for _ in range(6)] + [("a", {"until": ["z"], "max_gen_toks": 5})]
    return (
        model.loglikelihood(instances("loglikelihood", pairs)),
        model.loglikelihood_rolling(instances("loglikelihood_rolling", texts)),
        model.generate_until(instances("generate_until", prompts)),
    )


def load(path: Path, tokenizer: Path, ranks: Ranks, **parallel: int) -> TextModel:
    options = dict(tokenizer_type=TokenizerType.HF, tokenizer_model=str(tokenizer))
    return load_text_model(path, ParallelConfig(**parallel), ranks, **options)


def on_a_rank(rank: int, world_size: int, path: Path, tokenizer: Path) -> Answers:
    return answers(HarnessModel(load(path, tokenizer, Ranks(None, "cpu"), expert_model_parallel_size=2), 4))


def assert_same(found: Answers, expected: Answers) -> None:
    left, right = found[0], expected[0]
    assert [value for value, _ in left] == pytest.approx([value for value, _ in right], rel=1e-6, abs=2e-6)
    assert [greedy for _, greedy in left] == [greedy for _, greedy in right]
    assert found[1] == pytest.approx(expected[1], rel=1e-6)
    assert found[2] == expected[2]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A checkpoint, a tokenizer of 264 tokens, and the export of both."""
    folder = tmp_path_factory.mktemp("harness")
    path = checkpoint(folder / "ours", "moe")
    train_bpe([" ".join(WORDS)] * 20, 264, folder / "tokenizer")
    options = Options(dtype="fp32", tokenizer=folder / "tokenizer")
    convert(path, folder / "hf", to="hf", options=options)
    return path, folder / "tokenizer", folder / "hf"


@pytest.fixture(scope="module")
def own(files: tuple[Path, Path, Path]) -> Answers:
    return answers(HarnessModel(load(*files[:2], Ranks.alone()), 4))


def test_the_same_numbers_as_of_the_export(files: tuple[Path, Path, Path], own: Answers) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    assert_same(own, answers(HFLM(str(files[2]), device="cpu", dtype="float32", batch_size=4)))


def test_the_same_numbers_over_two_ranks(files: tuple[Path, Path, Path], own: Answers) -> None:
    for found in run_distributed(on_a_rank, 2, *files[:2]):
        assert_same(found, own)


def test_the_batch_size_does_not_matter(files: tuple[Path, Path, Path], own: Answers) -> None:
    assert_same(answers(HarnessModel(load(*files[:2], Ranks.alone()), 1)), own)
