"""What becomes of each key of a DeepSpeed configuration, and that README.md says the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

import deepspeed_ext
from deepspeed_ext import config_keys
from deepspeed_ext.config_keys import WITHOUT_EFFECT, keys_without_effect, refuse_unsupported
from deepspeed_ext.ds_config import zero_options

README = Path(deepspeed_ext.__file__).with_name("README.md").read_text()


def _listed(row: str) -> set[str]:
    """The keys in the table's row that begins so; of "zero_optimization: stage 3" rows, what follows the prefix."""
    [line] = [line for line in README.splitlines() if line.startswith(f"| {row}")]
    return set(re.findall(r"`([\w.]+)`", line.rsplit("|", 2)[1]))


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ("supported, read by us", config_keys.OURS),
        ("supported, by DeepSpeed's engine", config_keys.ENGINES),
        ("of DeepSpeed's own paths", config_keys.DELEGATING),
        ("without effect; another value", set(WITHOUT_EFFECT)),
        ("without effect as in DeepSpeed", config_keys.ZERO_STAGE_3),
        ("removed from DeepSpeed", config_keys.REMOVED),
    ],
)
def test_the_table_is_what_the_code_says(row: str, keys: set[str]) -> None:
    assert _listed(row) == keys


def test_each_key_is_in_one_list() -> None:
    lists = [config_keys.OURS, config_keys.ENGINES, config_keys.DELEGATING, config_keys.REMOVED]
    assert sum(map(len, lists)) == len(set().union(*lists))
    of_zero = {name.split(".")[1] for name in WITHOUT_EFFECT if name.startswith("zero_optimization.")}
    known = [of_zero, config_keys.ZERO_OURS, config_keys.ZERO_STAGE_3]
    assert set().union(*known) == set(DeepSpeedZeroConfig.model_fields), "a key of ZeRO that nobody has thought of"
    assert sum(map(len, known)) == len(DeepSpeedZeroConfig.model_fields)


def test_removed_keys_are_refused_by_deepspeed() -> None:
    values: dict[str, Any] = {"sparse_gradients": True, "graph_harvesting": True}
    for key in config_keys.REMOVED:
        config = {"train_micro_batch_size_per_gpu": 1, key: values.get(key, {"enabled": True})}
        with pytest.raises(Exception, match="removed"):
            DeepSpeedConfig(config)


def _at(name: str, value: Any) -> dict[str, Any]:
    *section, key = name.split(".")
    return {section[0]: {key: value}} if section else {key: value}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_key_without_effect_is_named_unless_it_has_its_default(name: str) -> None:
    default, instead = WITHOUT_EFFECT[name]
    other = not default if isinstance(default, bool) else default * 2
    line = keys_without_effect(_at(name, other))
    assert line is not None and f"{name}={other!r} ({instead})" in line and "\n" not in line
    assert keys_without_effect(_at(name, default)) is None
    if name.startswith("zero_optimization."):
        assert getattr(DeepSpeedZeroConfig(), name.split(".")[1]) == default


def test_a_usual_configuration_gives_no_warning() -> None:
    zero = {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "reduce_scatter": True}
    zero |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 5e8}
    config = {
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
    }
    assert keys_without_effect(config) is None


def test_what_the_table_calls_refused_is() -> None:
    refuse_unsupported({"compile": {"deepcompile": False}})
    names = sorted(name for name in _listed("refused") if name.count(".") == 1 and name != "optimizer.params")
    assert len(names) == 4
    for name in names:
        with pytest.raises(ValueError, match=rf"{name}.* is not supported"):
            refuse_unsupported(_at(name, True))
            zero_options(_at(name, True))
