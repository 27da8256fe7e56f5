"""The one error of this package that a user can meet."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be written, found, read or trusted. The message names the file or field and the remedy."""


class UnknownVersionError(CheckpointError):
    """A checkpoint is whole, and of a format that this program does not read: no other may silently take its place."""


class DamagedError(CheckpointError):
    """A checkpoint's bytes are not what was written, or not there: another checkpoint may do."""
