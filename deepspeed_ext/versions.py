"""The versions of DeepSpeed that the engine works with: its subclass and its optimizer use names that are not public.

One rule: a version is in the range when the tests that build an engine beside stock's pass with it
(``make test-deepspeed VERSION=0.19.7``).
"""

import logging

import deepspeed

OLDEST, NEWEST = (0, 19, 7), (0, 19, 8)


def problem_with(version: str) -> str | None:
    """Returns one line that names the range if the version is outside of it.

    Args:
        version: as ``deepspeed.__version__`` has it.

    Returns:
        None for a version of the range.
    """
    if OLDEST <= _numbers(version) <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
    return f"deepspeed {version}: deepspeed_ext works with {oldest} to {newest}; pip install deepspeed=={newest}"


def check(version: str) -> None:
    """Logs a warning for a version after the range, and raises ImportError for one before: it lacks what ours needs."""
    problem = problem_with(version)
    if problem is not None and _numbers(version) < OLDEST:
        raise ImportError(problem)
    if problem is not None:
        logging.getLogger("deepspeed_ext").warning("%s", problem)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:3] if part.isdigit())


check(deepspeed.__version__)
