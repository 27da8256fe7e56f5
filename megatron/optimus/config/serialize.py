"""Converts a run to and from plain data and YAML without loss, and reads configuration files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from megatron.optimus.config.choices import OptimizerName
from megatron.optimus.config.optimizer_options import is_of_another
from megatron.optimus.config.options import build, read_sections
from megatron.optimus.config.schema import ConfigError, RunConfig


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Returns ``{section: {option: value}}`` with JSON types only; enums become their values."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(element) for element in value]
        return value.value if isinstance(value, Enum) else value

    return {
        section.name: {
            field.name: plain(getattr(getattr(config, section.name), field.name))
            for field in dataclasses.fields(getattr(config, section.name))
        }
        for section in dataclasses.fields(config)
    }


def from_dict(data: Mapping[str, Any], source: str = "configuration") -> RunConfig:
    """Inverts ``to_dict``; missing options have their defaults. Raises ConfigError, with ``source`` in front.

    Options of another optimizer, which the run did not read and earlier versions let stand, are left out.
    """
    values = read_sections(data, source)
    chosen = values.get("optimizer", OptimizerName.ADAM)
    values = {name: value for name, value in values.items() if not is_of_another(name, chosen)}
    try:
        return build(values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def to_yaml(config: RunConfig) -> str:
    """Returns YAML from which ``--config`` reads the same run."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


_BEFORE_THE_OPTION = {"split_by": "position"}  # what a run without it did, where that is not its default


def changed_options(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Lists the options that differ between two ``to_dict`` results, as "training.global_batch_size 8 -> 16".

    Options that do not affect training, such as intervals of logging, evaluation and saving, are left out; so are those
    of the tokenizer, which is compared by its content. An option that ``before`` lacks, because it did not exist yet,
    had its default, a section that it lacks was not saved. A value is equal to the one that None stands for.
    """
    free = {"exit_interval", "eval_interval", "eval_iters", "skip_train", "iterations_to_skip"}
    free |= {"valid_data_path", "test_data_path", "tokenizer_type", "tokenizer_model"}
    changes, all_defaults = [], to_dict(RunConfig())
    for section in ("model", "parallel", "optimizer", "training", "data"):
        old, new = before.get(section), after.get(section)
        if old is None or new is None:
            continue
        defaults = all_defaults[section]
        old, new = {**defaults, **_BEFORE_THE_OPTION, **old}, {**defaults, **new}
        for name in sorted(defaults.keys() | old.keys() | new.keys()):
            if name in defaults and name not in free and _resolved(name, old) != _resolved(name, new):
                changes.append(f"{section}.{name} {old.get(name)} -> {new.get(name)}")
    return changes


_MAX_VALUES = 100_000  # of a file, where each alias counts as what it stands for
_MAX_DIGITS = 100


def _resolved(name: str, options: Mapping[str, Any]) -> Any:
    """The value of an option of a section, or the one that it has where it is None."""
    if options.get(name) is None:
        if name == "num_query_groups":
            return options["num_attention_heads"]
        if name == "kv_channels":
            return options["hidden_size"] // options["num_attention_heads"]
    return options.get(name)


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that refuses a key given twice in a mapping and keeps dates as text (run_dir: 2026-01-05).

    It also refuses numbers and merged mappings that grow without bound.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - the name and shape are the parent's
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":  # a merge may repeat keys
                continue
            line = key_node.start_mark.line + 1
            if key_node.value in seen:
                raise ConfigError(f"{key_node.value} is given twice, in lines {seen[key_node.value]} and {line}")
            seen[key_node.value] = line
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _MAX_DIGITS:
            raise ConfigError(
                f"line {node.start_mark.line + 1}: a whole number of {len(node.value)} characters; at most "
                f"{_MAX_DIGITS} are read"
            )
        return int(super().construct_yaml_int(node))

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MAX_VALUES:
            raise ConfigError(f"line {node.start_mark.line + 1}: merges (<<) give more than {_MAX_VALUES} values")


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_yaml_int)


def _check_size(data: Any) -> None:
    """Raises ConfigError for more than ``_MAX_VALUES`` values: a few aliases of aliases can stand for billions."""
    left, count = [data], 0
    while left:
        value = left.pop()
        count += 1
        if count + len(left) > _MAX_VALUES:
            raise ConfigError(f"has more than {_MAX_VALUES} values, where each alias counts as what it stands for")
        if isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list):
            left += value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ConfigError(f"{key} is given twice, as {result[key]!r} and {value!r}")
        result[key] = value
    return result


def read_file(path: str) -> dict[str, Any]:
    """Reads a .yaml, .yml or .json file into ``{option: converted value}``. Raises ConfigError."""
    data = read_plain(path)
    return read_sections({} if data is None else data, path)


def read_plain(path: str) -> Any:
    """Reads a .yaml, .yml or .json file into lists, mappings, text and numbers. Raises ConfigError."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"{path}: the name of a configuration file must end in .yaml, .yml or .json")
    try:
        text = Path(path).read_text(encoding="utf-8")
        if suffix == ".json":
            return json.loads(text, object_pairs_hook=_unique_keys)
        data = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader: builds plain data only
        _check_size(data)
        return data
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}, column {error.colno}: {error.msg}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: lists or mappings are nested too deeply") from error
    except ValueError as error:  # a ConfigError from above, or a scalar that only looks like a YAML number
        raise ConfigError(f"{path}: {error}") from error
