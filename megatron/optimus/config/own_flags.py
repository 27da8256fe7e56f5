"""Flags of a program besides the options of the training program, which it passes on: launcher, planner, tuner."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .schema import ConfigError


def split_flags(
    words: Sequence[str], with_value: Collection[str], switches: Collection[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """(the program's own flags with their values, "" for a switch; all other words, in their order).

    A flag given twice counts the last time, so that "$@" overrides a script's. Raises ConfigError for a switch with a
    value and for a flag without one.
    """
    own: dict[str, str] = {}
    rest: list[str] = []
    position = 0
    while position < len(words):
        flag, equals, value = words[position].partition("=")
        position += 1
        if flag in switches:
            if equals:
                raise ConfigError(f"{flag} takes no value, got {value!r}")
            own[flag] = ""
        elif flag in with_value:
            if not equals:
                if position == len(words) or words[position].startswith("--"):  # another flag is no value
                    raise ConfigError(f"{flag} needs a value")
                value, position = words[position], position + 1
            own[flag] = value
        else:
            rest.append(words[position - 1])
    return own, rest


def whole_number(own: dict[str, str], flag: str, least: int = 1) -> int | None:
    """The flag's value, None where it is not given. Raises ConfigError below ``least`` and for what is no number."""
    text = own.get(flag)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{flag}={text!r} must be a whole number of {least} or more")
    return int(text)
