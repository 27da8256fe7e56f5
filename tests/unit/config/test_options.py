"""Words of the command line as values of options: spellings, types, and one clear error for each mistake."""

import pytest

from megatron.optimus.config.load import load
from megatron.optimus.config.schema import LoadBalancing, Normalization, Precision, Recompute
from tests.unit.config.test_load import error_of


def test_spellings_of_flags() -> None:
    flags = (
        "--num_layers=2 --qk-layernorm false --no-untie-embeddings-and-output-weights --deterministic "
        "--data-path a b c --clip-qkv none --normalization layernorm-nonparametric --lr 1e-3 --min-lr=0 "
        "--moe-router-load-balancing-type none --params-dtype fp32 --tokenizer-model none --num-query-groups 4"
    )
    config = load(flags.split()).config
    assert config.model.num_layers == 2
    assert config.model.qk_layernorm is False
    assert config.model.untie_embeddings_and_output_weights is False
    assert config.training.deterministic is True
    assert config.data.data_path == ["a", "b", "c"]
    assert config.model.clip_qkv is None and config.model.num_query_groups == 4
    assert config.model.normalization is Normalization.LAYERNORM_NONPARAMETRIC
    assert config.model.moe_router_load_balancing_type is LoadBalancing.NONE
    assert config.training.params_dtype is Precision.FP32
    assert config.optimizer.lr == 1e-3 and config.optimizer.min_lr == 0.0


def test_a_boolean_flag_does_not_swallow_the_next_option() -> None:
    config = load(["--deterministic", "--num-layers", "2", "--qk-layernorm", "true", "--no-finetune"]).config
    assert config.training.deterministic and config.model.num_layers == 2 and config.model.qk_layernorm


def test_words_of_a_list_have_its_type() -> None:
    config = load("--recompute-modules moe norm --iterations-to-skip 3 5".split()).config
    assert [type(part) for part in config.parallel.recompute_modules] == [Recompute, Recompute]
    assert config.training.iterations_to_skip == [3, 5]
    assert load(["--recompute-modules"]).config.parallel.recompute_modules == []


def test_the_last_of_two_equal_flags_counts() -> None:
    assert load(["--num-layers", "2", "--num-layers", "4"]).config.model.num_layers == 4


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--num-layer", "4"], ["--num-layer", "'4'", "--num-layers"]),
        (["--qk-layernrm"], ["--qk-layernrm", "--qk-layernorm"]),
        (["--no-qk-layernor"], ["--no-qk-layernor", "--no-qk-layernorm"]),
        (["--no-num-layers", "3"], ["unknown option --no-num-layers", "--num-layers"]),
        (["--topk", "4"], ["--topk", "'4'", "did you mean --moe-router-topk?"]),
        (["--moe-expert-parallel-size", "4"], ["did you mean --expert-model-parallel-size?"]),
        (["--zzzzzz"], ["--zzzzzz", "; --help lists all options"]),
        (["--tp", "2"], ["unknown option --tp (value '2'); --help lists all options"]),
        (["--a"], ["unknown option --a; --help lists all options"]),
        (["--steps", "2"], ["; --help lists all options"]),
        (["--output", "x"], ["; --help lists all options"]),
        (["--learning-rate", "2"], ["; --help lists all options"]),
        (["--lrr", "2"], ["did you mean --lr?"]),
        (["--tensor-parallel", "2"], ["did you mean --tensor-model-parallel-size?"]),
        (["num-layers", "4"], ["'num-layers'", "--num-layers"]),
        (["--num-layers", "4", "5"], ["'5'"]),
        (["--num-layers"], ["--num-layers", "value"]),
        (["--num-layers", "--seed", "1"], ["--num-layers", "value"]),
        (["--num-layers", "abc"], ["--num-layers", "'abc'", "an integer"]),
        (["--num-layers", "1.5"], ["--num-layers", "'1.5'", "an integer"]),
        (["--num-layers", "true"], ["--num-layers", "'true'", "an integer"]),
        (["--num-layers", "none"], ["--num-layers", "'none'", "an integer"]),
        (["--lr", "fast"], ["--lr", "'fast'", "a number"]),
        (["--lr", "nan"], ["--lr", "'nan'", "a number"]),
        (["--lr", "inf"], ["--lr", "'inf'", "a number"]),
        (["--qk-layernorm", "maybe"], ["--qk-layernorm", "'maybe'", "true or false"]),
        (["--recompute-modules", "moe", "atention"], ["--recompute-modules='atention'", "did you mean attention?"]),
        (["--iterations-to-skip", "3", "none"], ["--iterations-to-skip", "'none'", "a list of an integer"]),
        (["--no-qk-layernorm=true"], ["--no-qk-layernorm", "'true'"]),
        (["--dry-run=yes"], ["--dry-run", "'yes'"]),
        (["--normalization", "rmsnrm"], ["'rmsnrm'", "layernorm-nonparametric", "did you mean rmsnorm"]),
        (["--preset", "mula-7b"], ["'mula-7b'", "olmoe-1b-7b", "did you mean mula-7b-a1b"]),
        (["--config", "no/such.yaml"], ["no/such.yaml", "No such file"]),
        (["--moe-router-topk", "9", "--num-experts", "8"], ["moe_router_topk=9", "num_experts=8", "at most 8"]),
    ],
)
def test_command_line_errors(argv: list[str], parts: list[str]) -> None:
    message = error_of(*argv)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
