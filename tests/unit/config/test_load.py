"""The command line and files, through load(argv): precedence, spellings, and one clear error for each mistake."""

import json
from pathlib import Path

import pytest

from megatron.optimus.config.load import Parser, load
from megatron.optimus.config.options import OPTIONS
from megatron.optimus.config.schema import ConfigError, Precision


def write(folder: Path, text: str, name: str = "run.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def error_of(*argv: str) -> str:
    with pytest.raises(ConfigError) as info:
        load(list(argv))
    return str(info.value)


def test_nothing_given_is_the_defaults() -> None:
    run = load([])
    assert (run.preset, run.dry_run, run.given) == (None, False, frozenset())
    assert run.config.model.num_layers == OPTIONS["num_layers"].default


def test_an_option_of_an_enumeration_is_named_by_value_and_arrives_as_the_member() -> None:
    parser = Parser(prog="x")
    parser.add_enum("--precision", members=(Precision.BF16, Precision.FP32), default=Precision.FP32)
    assert parser.parse([]).precision is Precision.FP32
    assert parser.parse(["--precision", "bf16"]).precision is Precision.BF16
    for unknown in ("bf61", "BF16", "fp16"):
        with pytest.raises(ConfigError, match=f"{unknown}' is not one of bf16, fp32"):
            parser.parse(["--precision", unknown])


def test_argv_defaults_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain", "--num-layers", "3"])
    assert load().config.model.num_layers == 3


def test_flags_override_the_file_and_the_file_the_preset(tmp_path: Path) -> None:
    file = write(tmp_path, "model: {num_layers: 5, hidden_size: 64, num_attention_heads: 4}\ntraining: {seed: 7}\n")
    run = load(["--num-layers", "6", "--config", file, "--preset", "mula-7b-a1b", "--dry-run"])
    assert run.preset == "mula-7b-a1b" and run.dry_run and run.given == {"num_layers"}
    model = run.config.model
    assert model.num_layers == 6  # flag, although it stands before --config
    assert model.hidden_size == 64 and run.config.training.seed == 7  # file
    assert model.num_experts == 64 and run.config.optimizer.adam_beta2 == 0.99  # preset


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("modle: {num_layers: 4}", ["modle", "num_layers", "did you mean model?"]),
        ("num_layers: 4", ["num_layers=4", "section model"]),
        ("model: {lr: 0.1}", ["model.lr=0.1", "section optimizer"]),
        ("model: {num_layer: 4}", ["model.num_layer=4", "did you mean model.num_layers?"]),
        ("model: {num-layers: 4}", ["model.num-layers=4", "did you mean model.num_layers?"]),
        ("model: {max_lr: 4}", ["model.max_lr=4", "optimus pretrain --help lists all options"]),
        ("model: {num_layers: abc}", ["model.num_layers='abc'", "an integer"]),
        ("model: {num_layers: '4'}", ["model.num_layers='4'", "an integer"]),
        ("model: {num_layers: 1.5}", ["model.num_layers=1.5", "an integer"]),
        ("model: {num_layers: true}", ["model.num_layers=True", "an integer"]),
        ("model: {num_layers: null}", ["model.num_layers=None", "an integer"]),
        ("model: {num_query_groups: [1]}", ["model.num_query_groups=[1]", "an integer or none"]),
        ("model: {qk_layernorm: 1}", ["model.qk_layernorm=1", "true or false"]),
        ("model: {qk_layernorm: 'true'}", ["model.qk_layernorm='true'", "true or false"]),
        ("optimizer: {lr: true}", ["optimizer.lr=True", "a number"]),
        ("optimizer: {lr: .nan}", ["optimizer.lr=nan", "a number"]),
        ("optimizer: {lr: -.inf}", ["optimizer.lr=-inf", "a number"]),
        ("model: {normalization: [1]}", ["model.normalization=[1]", "rmsnorm"]),
        ("data: {data_path: corpus}", ["data.data_path='corpus'", "a list of text"]),
        ("data: {data_path: [1]}", ["data.data_path=1", "a list of text"]),
        ("data: {split: 90}", ["data.split=90", "text"]),
        ("model: {num_layers: 1, num_layers: 2}", ["num_layers", "twice"]),
        ("model: {num_layers: 1}\nmodel: {}\n", ["model", "twice", "lines 1 and 2"]),
        ("model: 3", ["model", "3"]),
        ("[1, 2]", ["sections", "[1, 2]"]),
        ("model: {num_layers: 4", ["not valid YAML", "line"]),
        ("model: {num_layers: !!python/object/apply:os.getcwd []}", ["not valid YAML", "python/object"]),
        ("model: {seed_: 0b_}", ["run.yaml"]),
        ("1: {num_layers: 4}", ["unknown section 1"]),
    ],
)
def test_file_errors(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = write(tmp_path, text)
    message = error_of("--config", file)
    assert "\n" not in message
    for part in ["run.yaml", *parts]:
        assert part in message, message


def test_yaml_floats_dates_and_empty_parts_are_read_as_meant(tmp_path: Path) -> None:
    text = "optimizer: {lr: 1e-4, min_lr: 0}\nlogging: {run_dir: 2026-01-05}\nmodel:\ncheckpoint: {load: none}\n"
    config = load(["--config", write(tmp_path, text)]).config
    assert config.optimizer.lr == 1e-4 and isinstance(config.optimizer.min_lr, float)
    assert config.logging.run_dir == "2026-01-05" and config.checkpoint.load is None
    assert load(["--config", write(tmp_path, "")]).config == load([]).config


def test_json_files(tmp_path: Path) -> None:
    good = write(tmp_path, json.dumps({"model": {"num_layers": 3}}), "run.json")
    assert load(["--config", good]).config.model.num_layers == 3
    assert "num_layers is given twice" in error_of(
        "--config", write(tmp_path, '{"model": {"num_layers": 3, "num_layers": 4}}', "twice.json")
    )
    assert "line 1, column" in error_of("--config", write(tmp_path, '{"model": }', "bad.json"))


def test_unreadable_files(tmp_path: Path) -> None:
    assert ".yaml, .yml or .json" in error_of("--config", write(tmp_path, "", "run.toml"))
    assert "Is a directory" in error_of("--config", str((tmp_path / "d.yaml").mkdir() or tmp_path / "d.yaml"))
    (tmp_path / "latin.yaml").write_bytes(b"model: {a: \xff}")
    assert "UTF-8" in error_of("--config", str(tmp_path / "latin.yaml"))


def test_help_shows_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        load(["--num-layers", "--help"])
    assert info.value.code == 0
    text = capsys.readouterr().out
    for option in OPTIONS.values():
        assert f"  {option.flag} " in text and option.help in text
    assert "--num-layers INT" in text and "[50304]" in text and "{rmsnorm,layernorm-nonparametric}" in text
    assert text.index("\nmodel:\n") < text.index("--num-layers") < text.index("\nparallel:\n")
    assert "mula-220b-a10b" in text
