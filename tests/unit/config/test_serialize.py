"""A run as plain data and back; the hash."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.optimus.config.load import load
from megatron.optimus.config.options import OPTIONS
from megatron.optimus.config.presets import PRESETS
from megatron.optimus.config.schema import ConfigError, RunConfig
from megatron.optimus.config.serialize import changed_options, from_dict, to_dict, to_yaml


@pytest.mark.parametrize("preset", PRESETS)
def test_round_trips_are_exact(preset: str, tmp_path: Path) -> None:
    config = load(["--preset", preset, "--data-path", "a", "b", "--clip-qkv", "0.1"]).config
    assert from_dict(to_dict(config)) == config
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    for name, text in (("run.yaml", to_yaml(config)), ("run.json", json.dumps(to_dict(config)))):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert load(["--config", str(tmp_path / name)]).config == config


@given(
    lr=st.floats(min_value=1e-30, max_value=1e30),
    path=st.lists(st.text(min_size=1), max_size=3),
    model=st.one_of(st.none(), st.text().filter(lambda text: text != "none")),
)
def test_round_trip_of_any_float_and_text(lr: float, path: list[str], model: str | None) -> None:
    config = from_dict({"optimizer": {"lr": lr, "min_lr": 0}, "data": {"data_path": path, "tokenizer_model": model}})
    assert config.optimizer.lr == lr and config.data.data_path == path and config.data.tokenizer_model == model
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_every_field_is_in_the_dict_and_an_option() -> None:
    sections = to_dict(RunConfig())
    assert {name for section in sections.values() for name in section} == set(OPTIONS)
    for section in dataclasses.fields(RunConfig):
        assert {OPTIONS[name].section for name in sections[section.name]} == {section.name}


def test_from_dict_names_its_source() -> None:
    with pytest.raises(ConfigError, match=r"manifest: model.layers=3: unknown option; did you mean model.num_layers"):
        from_dict({"model": {"layers": 3}}, "manifest")


def test_to_dict_is_a_copy() -> None:
    config = RunConfig()
    to_dict(config)["data"]["data_path"].append("x")
    assert config.data.data_path == []


def test_changed_options_name_what_bears_on_training() -> None:
    changed = ["--lr", "1e-3", "--exit-interval", "5", "--valid-data-path", "web=x"]
    before, after = (to_dict(load(words).config) for words in ([], changed))
    assert changed_options(before, after) == ["optimizer.lr 0.0004 -> 0.001"]
    assert changed_options(before, before) == []
    del before["model"]["model_family"]  # written before the option existed
    assert changed_options(before, after) == ["optimizer.lr 0.0004 -> 0.001"]


def nested(levels: int, tie: str) -> str:
    """YAML of ``levels`` anchors, each ten times the one before."""
    first = 'a0: &a0 {"x": 1}' if tie == "<<" else "a0: &a0 [1, 1]"
    rest = []
    for i in range(1, levels):
        aliases = ", ".join([f"*a{i - 1}"] * 10)
        rest.append(f"a{i}: &a{i} {{'<<': [{aliases}], 'x{i}': 1}}" if tie == "<<" else f"a{i}: &a{i} [{aliases}]")
    return "\n".join([first, *rest]).replace("'<<'", "<<")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {num_layers: 0x" + "f" * 5000 + "}", "line 1: a whole number of 5002 characters"),
        ("model:\n  num_layers: 1" + ":59" * 5000, "line 2: a whole number of 15001 characters"),
        ("model: {num_layers: " + "9" * 5000 + "}", "line 1: a whole number of 5000 characters"),
        ("model: {num_layers: 0b" + "1" * 5000 + "}", "line 1: a whole number of 5002 characters"),
        (nested(12, "list"), "more than 100000 values"),
        (nested(12, "<<"), "more than 100000 values"),
        ("a: &a [*a]", "more than 100000 values"),
        ("model: &m {num_layers: *m}", "more than 100000 values"),
    ],
)
def test_files_that_grow_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as found:
        load(["--config", str(tmp_path / "a.yaml")])
    assert len(str(found.value)) < 2000


def test_what_only_looks_changed_is_not_named() -> None:
    """An import has two sections and says what None stands for; an earlier version lacks options."""
    after = to_dict(load(["--hidden-size", "64", "--num-attention-heads", "4", "--tokenizer-model", "b"]).config)
    imported = {"model": after["model"] | {"num_query_groups": 4, "kv_channels": 16}, "data": dict(after["data"])}
    imported["data"]["tokenizer_model"] = "a"
    del imported["model"]["add_qkv_bias"]
    assert changed_options(imported, after) == []
    imported["model"]["num_query_groups"] = 2
    assert changed_options(imported, after) == ["model.num_query_groups 2 -> None"]


def test_a_run_of_an_earlier_version_may_hold_options_of_another_optimizer() -> None:
    stored = to_dict(load(["--hidden-size", "64", "--num-attention-heads", "4"]).config)
    stored["optimizer"]["lion_beta2"] = 0.5
    assert from_dict(stored).optimizer.lion_beta2 != 0.5
    stored["optimizer"]["adam_beta2"] = 7.0
    with pytest.raises(ConfigError, match=r"^old\.json: adam_beta2=7\.0 is out of range"):
        from_dict(stored, "old.json")
