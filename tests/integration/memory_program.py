"""The training program with memory checkpoints and no launcher, and SIGKILL for some ranks after some step.

RANKS STEP FOLDER RANKS_PER_NODE options of pretrain ...
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.optimus import pretrain
from megatron.optimus.platform import environment
from megatron.optimus.training.checkpointing import Checkpoints


def main(argv: Sequence[str]) -> int:
    """``pretrain.main``; RANKS ("0,1", "none") are killed when STEP is done and all copies and saves are."""
    killed, last, folder, per_node, *options = argv
    rank = os.environ["RANK"]
    os.environ[environment.MEMORY_FOLDER] = str(Path(folder) / f"node-{int(rank) // int(per_node)}")
    after_step = Checkpoints.after_step

    def then_die(self: Checkpoints, step: int, *words: Any, **named: Any) -> None:
        after_step(self, step, *words, **named)
        if step == int(last) and self._memory is not None:
            self._memory._join()
            self.finish()
            if self._mirror is not None:
                self._mirror.close()
            self._ranks.first_failure(None)  # all ranks have come here
            if rank in killed.split(","):
                os.kill(os.getpid(), signal.SIGKILL)

    Checkpoints.after_step = then_die  # type: ignore[method-assign]
    return pretrain.main(options)
