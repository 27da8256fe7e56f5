"""The training program with bad data: in some steps the output of the last layer is multiplied by a factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.optimus import pretrain
from megatron.optimus.data.loader import Batch, BatchLoader
from megatron.optimus.training import trainer
from tests.integration import memory_program

BATCH = 8  # global, as in TINY
_factor = [1.0]  # on the output of the last layer


def main(argv: Sequence[str]) -> int:
    """``pretrain.main`` after a word FACTOR:FIRST:LAST,...: the factor, the first and the last bad step.

    Where the next word is no option, it is one for ``memory_program.main``.
    """
    program = pretrain if argv[1].startswith("-") else memory_program
    bad = [word.split(":") for word in argv[0].split(",")]
    read, build = BatchLoader.batch, trainer.build_model

    def batch(self: BatchLoader, consumed: int) -> list[Batch]:
        step = consumed // BATCH + 1
        _factor[0] = next((float(factor) for factor, first, last in bad if int(first) <= step <= int(last)), 1.0)
        return read(self, consumed)

    def build_bad(run: Any, **options: Any) -> Any:
        model = build(run, **options)
        model.get_submodule("lm_head").register_forward_pre_hook(
            lambda _, inputs: (inputs[0] * _factor[0], *inputs[1:])
        )
        return model

    BatchLoader.batch, trainer.build_model = batch, build_bad  # type: ignore[method-assign]
    try:
        return program.main(argv[1:])
    finally:
        BatchLoader.batch, trainer.build_model = read, build  # type: ignore[method-assign]
