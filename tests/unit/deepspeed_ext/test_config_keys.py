"""The lists of DeepSpeed's configuration keys equal what DeepSpeed reads and what README.md shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn

import deepspeed_ext
from deepspeed_ext import config_keys
from deepspeed_ext.config_keys import (
    DELEGATING,
    TOP_LEVEL_KEYS,
    WITHOUT_EFFECT,
    keys_without_effect,
    refuse_unsupported,
    unknown_keys,
)
from deepspeed_ext.ds_config import reason_for_deepspeed, zero_options

# Of "zero_optimization": what deepspeed_ext reads or what selects the engine, and what only stage 3 reads.
ZERO_READ = {
    *("stage", "reduce_bucket_size", "overlap_comm", "offload_param", "offload_optimizer", "zenflow"),
    *("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"),
}
ZERO_STAGE_3 = {
    *("gather_16bit_weights_on_model_save", "leaf_module", "log_trace_cache_warnings", "max_live_parameters"),
    *("max_reuse_distance", "memory_efficient_linear", "model_persistence_threshold", "module_granularity_threshold"),
    *("override_module_apply", "param_persistence_threshold", "pipeline_loading_checkpoint", "prefetch_bucket_size"),
    *("stage3_gather_fp16_weights_on_model_save", "sub_group_size", "use_all_reduce_for_fetch_params"),
    "allgather_sequential",
}
SECTION_NAMES = {
    f"{section}.{key}" for section, (ours, engines) in config_keys.SECTION_KEYS.items() for key in ours | engines
}
README = Path(deepspeed_ext.__file__).with_name("README.md").read_text()


def _listed(row: str) -> set[str]:
    """The keys in the table's row that begins with ``row``."""
    [line] = [line for line in README.splitlines() if line.startswith(f"| {row}")]
    return set(re.findall(r"`([\w.]+)`", line.rsplit("|", 2)[1]))


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ("supported, read by us", config_keys.READ_HERE),
        ("supported, by DeepSpeed's engine", config_keys.READ_BY_DEEPSPEED),
        ("supported in these sections", SECTION_NAMES),
        ("of DeepSpeed's own paths", config_keys.DELEGATING),
        ("without effect; another value", set(WITHOUT_EFFECT)),
        ("without effect as in DeepSpeed", ZERO_STAGE_3),
        ("removed from DeepSpeed", config_keys.REMOVED),
    ],
)
def test_the_table_is_what_the_code_says(row: str, keys: set[str]) -> None:
    assert _listed(row) == keys


def test_each_key_is_in_one_list() -> None:
    lists = [config_keys.READ_HERE, config_keys.READ_BY_DEEPSPEED, config_keys.DELEGATING, config_keys.REMOVED]
    assert sum(map(len, lists)) == len(set().union(*lists))
    of_zero = {name.split(".")[1] for name in WITHOUT_EFFECT if name.startswith("zero_optimization.")}
    known = [of_zero, ZERO_READ, ZERO_STAGE_3]
    assert set().union(*known) == set(DeepSpeedZeroConfig.model_fields), "a key of ZeRO that is in no list"
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
    other = not default if isinstance(default, bool) else default * 2 if default is not None else ["torch.nn.Linear"]
    line = keys_without_effect(_at(name, other))
    assert line is not None and f"{name}={other!r} ({instead})" in line and "\n" not in line
    assert keys_without_effect(_at(name, default)) is None
    parsed = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "comms_logger": {}})
    sections = {"zero_optimization": parsed.zero_config, "bf16": parsed.bfloat16_config}
    sections["comms_logger"] = parsed.comms_config.comms_logger
    section, _, key = name.rpartition(".")
    stock = getattr(sections[section], key) if section in sections else getattr(parsed, name.replace(".", "_"))
    assert stock == default, "not DeepSpeed's default"


def test_the_old_name_of_the_bf16_section_counts() -> None:
    line = keys_without_effect({"bfloat16": {"enabled": True, "immediate_grad_update": True}})
    assert line is not None and "bf16.immediate_grad_update=True" in line
    narrow = {"zero_optimization": {"stage": 1}, "bfloat16": {"enabled": True, "bf16_optimizer_states": True}}
    assert reason_for_deepspeed(narrow, nn.Linear(2, 2), None) == "masters in 16 bits"
    assert (
        reason_for_deepspeed({**narrow, "bfloat16": {"bf16_optimizer_states": "auto"}}, nn.Linear(2, 2), None) is None
    )
    assert not zero_options({"bfloat16": {"enabled": True, "check_grad_overflow": False}}).check_grad_overflow


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
    assert len(names) == 1
    for name in names:
        with pytest.raises(ValueError, match=rf"{name}.* is not supported"):
            refuse_unsupported(_at(name, True))


class _Asked(dict[str, Any]):
    """Notes the keys that its reader looks for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # "key in config.keys()" asks too

    def __copy__(self) -> _Asked:
        return self


def test_each_key_of_a_section_is_in_a_list() -> None:
    """bf16 and fp16 are DeepSpeed's models; of the other sections its reader is asked."""
    names = {"checkpoint": {}, "data_types": {}, "torch_autocast": {"enabled": False, "dtype": "bf16"}}
    sections = {name: _Asked(section) for name, section in names.items()}
    sections["optimizer"] = _Asked({"type": "AdamW", "params": {}})
    DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **sections})
    read = {name: section.asked for name, section in sections.items()}
    read["bf16"], read["fp16"] = set(DeepSpeedBF16Config.model_fields), set(DeepSpeedFP16Config.model_fields)
    found = {f"{section}.{key}" for section, keys in read.items() for key in keys}
    known = SECTION_NAMES | {
        name for name in (*WITHOUT_EFFECT, *DELEGATING) if "." in name and name.split(".")[0] in read
    }
    assert found == known


def test_the_known_keys_are_those_that_deepspeed_reads() -> None:
    config = _Asked({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}})
    DeepSpeedConfig(config)
    assert len(config.asked) > 50
    assert config.asked - TOP_LEVEL_KEYS - {"allgather_size"} == set()  # the last only within an old form of a section
    assert TOP_LEVEL_KEYS - config.asked - {"deepspeed_ext", "sequence_parallel_size"} == set()


def test_keys_that_nothing_reads_are_named_with_the_nearest() -> None:
    assert unknown_keys(dict.fromkeys(TOP_LEVEL_KEYS)) is None
    line = unknown_keys({"gradient_acumulation_steps": 4, "bf16": {}, "colour": 1})
    assert line is not None and "\n" not in line and "bf16" not in line
    assert line.endswith("'colour', 'gradient_acumulation_steps' (did you mean 'gradient_accumulation_steps'?)")


def test_keys_of_a_section_that_nothing_reads_are_named() -> None:
    known = {section: dict.fromkeys(ours | engines) for section, (ours, engines) in config_keys.SECTION_KEYS.items()}
    assert unknown_keys(known) is None
    line = unknown_keys({"data_types": {"grad_acum_dtype": "bf16"}, "optimizer": {"type": "SGD", "colour": 1}})
    assert line is not None and "\n" not in line
    assert "'data_types.grad_acum_dtype' (did you mean 'data_types.grad_accum_dtype'?), 'optimizer.colour'" in line
