"""The errors of this package, of which users see CheckpointError."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be written, found, read or trusted. The message names the file or field and the remedy."""


class SaveError(CheckpointError):
    """A checkpoint could not be written. The state is not wrong: another attempt or another node may write it."""


class UnknownVersionError(CheckpointError):
    """A checkpoint is whole, but of a format that this program does not read. No older one may silently replace it."""


class DamagedError(CheckpointError):
    """Bytes of a checkpoint are missing or are not those that were written. An older checkpoint may be used instead."""
