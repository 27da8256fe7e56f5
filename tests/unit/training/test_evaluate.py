"""Losses of held-out sets, in nats per label and in bits per byte."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.optimus.config.schema import RunConfig, TokenizerType
from megatron.optimus.context import RunContext
from megatron.optimus.data.loader import Batch
from megatron.optimus.layers import NO_LABEL
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.training import evaluate
from megatron.optimus.training.evaluate import bytes_of_tokens, set_loss


def run_of(**options: Any) -> RunContext:
    config = RunConfig()
    config.model.vocab_size = 300
    for name, value in options.items():
        setattr(config.data, name, value)
    return RunContext.of(config, Mesh(config.parallel, rank=0, world_size=1), torch.device("cpu"))


def test_bits_are_divided_by_the_bytes_of_the_labels_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(averaged_parameters=nullcontext)
    monkeypatch.setattr(evaluate, "training_state", lambda engine: state)
    labels_BS = torch.tensor([[0, 2, 1, NO_LABEL]])
    batches = [Batch(labels_BS, labels_BS, None, None, 3), Batch(labels_BS, labels_BS, None, None, 3)]
    losses = itertools.cycle([torch.tensor(6.0), torch.tensor(3.0)])
    schedule: Any = SimpleNamespace(engine=None, evaluate=lambda own: [next(losses) for _ in own])
    bytes_V = torch.tensor([1.0, 4.0, 0.0], dtype=torch.float64)  # the last one ends documents
    found = set_loss(run_of(), schedule, [batches[:1], batches[1:]], bytes_V)
    assert found == (pytest.approx(9 / 6), pytest.approx(9 / math.log(2) / 10))
    assert set_loss(run_of(), schedule, [batches]).bits_per_byte is None


def test_bytes_are_known_where_a_tokenizer_is() -> None:
    bytes_V = bytes_of_tokens(run_of(tokenizer_type=TokenizerType.BYTE))
    assert bytes_V is not None and bytes_V.tolist() == [1] * 256 + [0] * 44
    assert bytes_of_tokens(run_of()) is None
