"""The exit codes of the training program that the launcher acts on."""

from __future__ import annotations

USER_ERROR = 2  # the command line or the data are wrong: the same command would fail again
STORAGE_ERROR = 3  # a disk was full, broken or read-only, mostly in a save: a restart may help
NUMERIC_ERROR = 4  # gradients were not finite, or far too large, for several steps: once more, from the checkpoint
INTEGRITY_ERROR = 5  # bits flipped or a device computes wrongly: again, from a checkpoint from before that
STALLED = 124  # as GNU timeout: a rank hung

# One line of the rank has told what is wrong.
EXPLAINED = frozenset((USER_ERROR, STORAGE_ERROR, NUMERIC_ERROR, INTEGRITY_ERROR))
