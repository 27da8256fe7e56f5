"""Parts of schema.py: fields with help texts, checks on single values, and ConfigError."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import field
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any


class ConfigError(ValueError):
    """A value from the user cannot be used. The message has the option, the value and the remedy."""


def one_of(values: Iterable[object]) -> str:
    """Joins values for a message: "1, 2, 4 or 8"."""
    words = [str(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def divisors(number: int) -> list[int]:
    """Returns the divisors in ascending order; of a number above 10^12 only those up to 10^6 and their cofactors."""
    if number < 1:
        return []
    small = [candidate for candidate in range(1, math.isqrt(min(number, 10**12)) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


MODEL_FAMILIES, MODEL_CONVERTERS = "models/families", "parallel/converters"  # folders whose modules options name


@cache
def modules_of(folder: str) -> list[str]:
    """Lists the modules of a folder of the package, of which none is imported."""
    return [module.name for module in pkgutil.iter_modules([str(Path(__file__).parents[1] / folder)])]


def check_modules(option: str, names: Iterable[str], folder: str) -> None:
    """Raises ConfigError for a name in an option that is no module of ``folder``."""
    known = modules_of(folder)
    for name in names:
        require(
            name in known,
            f"{option}={name!r} is none of those there are ({', '.join(known) or 'none'}); "
            f"name a file of megatron/optimus/{folder}",
        )


def option(default: Any, help: str, words: Mapping[str, int] = MappingProxyType({})) -> Any:
    """Returns a dataclass field with a help text; a list default is copied for each instance.

    ``words``: numbers that a user may write as a word.
    """
    metadata = {"help": help, "words": words}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def parse_split(text: str) -> tuple[Fraction, Fraction, Fraction]:
    """Parses ``split`` ("969,30,1") into the fractions of training, validation and test, which sum to one.

    Fractions are exact, so that every rank splits at the same token; missing numbers are 0. Raises ConfigError.
    """
    try:
        numbers = [Fraction(part.strip()) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        numbers = []
    require(
        1 <= len(numbers) <= 3 and min(numbers) >= 0 and sum(numbers) > 0,
        f"split={text!r} is not one to three shares of 0 or more, training first; use for example '969,30,1'",
    )
    numbers += [Fraction(0)] * (3 - len(numbers))
    total = sum(numbers)
    return numbers[0] / total, numbers[1] / total, numbers[2] / total


def parse_named_prefixes(words: Iterable[str], option: str) -> dict[str, list[str]]:
    """Parses named sets of token files.

    Args:
        words: "web=data/web", or "data/web" whose name is then "web"; several words may have the same name. What is
            before the first = is a name unless it contains a slash.
        option: the option they belong to, for messages.

    Returns:
        The prefixes of each name, in order.

    Raises:
        ConfigError: for a word that is neither, a reserved name, or a prefix given twice.
    """
    found: dict[str, list[str]] = {}
    for word in words:
        name, equals, prefix = word.partition("=")
        if not equals or "/" in name:
            name, prefix = Path(word).name, word
        for suffix in (".bin", ".idx"):
            name, prefix = name.removesuffix(suffix), prefix.removesuffix(suffix)
        require(
            bool(name and prefix) and not _is_number(word),
            f"{option}: {word!r} is not NAME=PREFIX or a prefix of a .bin/.idx pair; each is a set of its own, "
            "without weights",
        )
        require(
            name not in ("step", "validation", "test"),
            f"{option}: a set cannot have the name {name!r}, which is that of something else; use another name",
        )
        require(
            prefix not in found.get(name, []),
            f"{option}: set {name!r} names {prefix} twice; name each file once",
        )
        found.setdefault(name, []).append(prefix)
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def at_least(section: object, limit: float, *names: str) -> None:
    """Raises ConfigError unless each named field is None or at least ``limit``."""
    for name in names:
        value = getattr(section, name)
        require(value is None or value >= limit, f"{name}={value} is too small; use {limit} or more")


def positive(section: object, *names: str) -> None:
    """Raises ConfigError unless each named field is None or above 0."""
    for name in names:
        value = getattr(section, name)
        require(value is None or value > 0, f"{name}={value} must be above 0")
