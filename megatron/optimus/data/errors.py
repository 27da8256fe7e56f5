"""The error that everything which reads or writes training data raises."""


class DataError(ValueError):
    """Raised when a data file or a corpus cannot be used. The message names the file, the position and the remedy."""
