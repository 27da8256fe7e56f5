"""The error of everything that reads or writes training data."""


class DataError(ValueError):
    """A data file or corpus cannot be used. The message names the file, the place in it, and the remedy."""
