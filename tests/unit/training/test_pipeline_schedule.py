"""When a pipeline's gradients are reduced: which backward reduces which buckets, in stage 1 and in stage 2."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.optimus.config.load import load
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.training.pipeline_schedule import GradientReduction, routers_of

# Parameters of each chunk, and of each bucket: "middle" holds some of either chunk.
CHUNKS = {"first": ["a", "b", "c"], "second": ["d", "e"]}
BUCKETS = {"low": ["a", "b"], "middle": ["c", "d"], "high": ["e"]}


class Optimizer:
    """Notes what it is told."""

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        self.names = {param: name for name, param in params.items()}
        self.said: list[Any] = []

    def measure_ranks_only(self) -> None:
        pass

    def buckets_of(self, params: Iterable[nn.Parameter]) -> list[str]:
        names = {self.names[param] for param in params}
        return [bucket for bucket, own in BUCKETS.items() if names & set(own)]

    def set_gradient_accumulation_boundary(self, is_reduced: bool, only: list[str] | None = None) -> None:
        self.said.append((is_reduced, only))

    def reduce_gradients(self) -> None:
        self.said.append("reduce")

    def backward_epilogue(self) -> None:
        self.said.append("end")


class Run:
    def __init__(self, words: str) -> None:
        params = {name: nn.Parameter(torch.zeros(1)) for own in CHUNKS.values() for name in own}
        self.chunks = {chunk: nn.ParameterDict({name: params[name] for name in own}) for chunk, own in CHUNKS.items()}
        self.optimizer = Optimizer(params)
        module = nn.ModuleDict(self.chunks)
        engine: Any = SimpleNamespace(module=module, optimizer=self.optimizer)
        self.reduction = GradientReduction(engine, load(words.split()).config)

    def step(self, order: list[tuple[str, int]], num_micro_batches: int, *, is_whole: bool = True) -> list[Any]:
        """What the optimizer is told in these backwards."""
        self.optimizer.said = []
        self.reduction.begin(num_micro_batches)
        for chunk, number in order:
            self.reduction.before(number, self.chunks[chunk], is_whole=is_whole)  # type: ignore[arg-type]
            self.reduction.after(number, self.chunks[chunk], is_whole=is_whole)  # type: ignore[arg-type]
        return self.optimizer.said


PLAIN = "--pipeline-model-parallel-size 2"
CHUNKED = f"{PLAIN} --pipeline-schedule interleaved-1f1b --virtual-pipeline-model-parallel-size 2 --num-layers 4"


@pytest.mark.parametrize("steps", [1, 2])
def test_stage_1_reduces_in_the_last_backward(steps: int) -> None:
    run = Run(PLAIN)
    for _ in range(steps):
        said = run.step([("first", 0), ("first", 1)], 2)
        assert said == [(False, None), "end", (True, None), "reduce"]


def test_stage_2_reduces_in_every_backward() -> None:
    said = Run(f"{PLAIN} --zero-stage 2").step([("first", 0), ("first", 1)], 2)
    assert said == [(True, None), "reduce"] * 2


def test_a_bucket_of_two_chunks_is_reduced_when_the_later_one_is_done() -> None:
    run = Run(CHUNKED)
    for _ in range(2):  # of a second step nothing is left over
        said = run.step([("second", 0), ("first", 0), ("second", 1), ("first", 1)], 2)
        assert said[::2] == [
            (False, ["middle", "high"]),
            (False, ["low", "middle"]),
            (True, ["high"]),
            (True, ["low", "middle"]),
        ]
        assert said[1::2] == ["end", "end", "reduce", "reduce"]
    # The other chunk finishes last: what lies in it alone comes before what both hold.
    said = run.step([("first", 0), ("second", 0)], 1)
    assert said[::2] == [(True, ["low"]), (True, ["high", "middle"])]


def test_stage_2_reduces_what_a_chunk_reaches() -> None:
    said = Run(f"{CHUNKED} --zero-stage 2").step([("second", 0), ("first", 0)], 1)
    assert said == [(True, ["middle", "high"]), "reduce", (True, ["low", "middle"]), "reduce"]


def test_backwards_of_inputs_alone_reduce_nothing() -> None:
    run = Run(PLAIN)
    assert run.step([("first", 0)], 1, is_whole=False) == [(False, None), "end"]
    assert run.step([("first", 0)], 1) == [(True, None), "reduce"]


def test_routers_are_known_by_their_layers_number() -> None:
    sizes = "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --vocab-size 32 --num-experts 4 "
    model = Decoder(load((sizes + "--moe-router-topk 2 --moe-layer-freq [0,1,0,1]").split()).config.model)
    routers = routers_of(model)
    assert list(routers) == [1, 3] and routers[3] is model.layers[3].moe.router
