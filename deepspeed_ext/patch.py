"""Replaces ``deepspeed.initialize`` by ``deepspeed_ext.initialize`` when this module is imported.

For programs that cannot be edited: the Trainer of transformers and accelerate look the function up when they call it.
A name that a program has bound before (``from deepspeed import initialize``) stays DeepSpeed's, so import this first.
"""

import deepspeed

import deepspeed_ext
from deepspeed_ext.initialize import _deepspeed_initialize


def apply() -> None:
    """Replaces ``deepspeed.initialize``; a second call changes nothing."""
    deepspeed.initialize = deepspeed_ext.initialize


def undo() -> None:
    """Restores DeepSpeed's own ``initialize``; engines that exist already stay as they are."""
    deepspeed.initialize = _deepspeed_initialize


apply()
