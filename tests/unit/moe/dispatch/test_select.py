"""Which dispatchers there are, and the message sizes at which distributed/moe/dispatch/test_select.py compares them."""

from __future__ import annotations

import torch

from megatron.optimus.config.schema import (
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TokenDispatcherType,
    TrainingConfig,
)
from megatron.optimus.moe.dispatch.base import MessageShape
from megatron.optimus.moe.dispatch.select import dispatcher_classes, message_shape


def test_every_choice_but_auto_is_a_dispatcher_of_its_own() -> None:
    classes = dispatcher_classes()
    assert set(classes) == set(TokenDispatcherType) - {TokenDispatcherType.AUTO}
    assert len(set(classes.values())) == len(classes)


def test_messages_are_those_of_a_micro_batch_on_one_rank() -> None:
    sizes = dict(hidden_size=16, num_attention_heads=2, vocab_size=32, num_experts=8, moe_router_topk=2)
    config = RunConfig(
        model=ModelConfig(num_layers=1, **sizes),  # type: ignore[arg-type]
        parallel=ParallelConfig(expert_model_parallel_size=4),
        training=TrainingConfig(seq_length=8, micro_batch_size=2),
    )
    assert message_shape(config, torch.bfloat16) == MessageShape(16, 16, 8, 2, torch.bfloat16)
    config.parallel.tensor_model_parallel_size = config.parallel.context_parallel_size = 2
    assert message_shape(config, torch.bfloat16).num_tokens == 4
