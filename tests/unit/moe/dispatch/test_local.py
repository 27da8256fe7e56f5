"""One rank has all experts: nothing travels."""

from __future__ import annotations

import pytest

from megatron.optimus.config.schema import (
    ExpertPlacement,
    ParallelConfig,
    TokenDispatcherType,
)
from megatron.optimus.moe.dispatch.local import LocalDispatcher
from megatron.optimus.moe.dispatch.ownership import Ownership
from megatron.optimus.moe.dispatch.select import build_dispatcher
from megatron.optimus.platform.mesh import Mesh


@pytest.mark.parametrize("kind", list(TokenDispatcherType))
def test_nothing_travels_on_one_rank(kind: TokenDispatcherType) -> None:
    config = ParallelConfig(moe_token_dispatcher_type=kind)
    ownership = Ownership.from_placement(4, 1, ExpertPlacement.CONTIGUOUS)
    dispatcher = build_dispatcher(config, Mesh(config, rank=0, world_size=1), ownership)
    assert isinstance(dispatcher, LocalDispatcher)
