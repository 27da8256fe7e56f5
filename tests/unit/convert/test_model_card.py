"""The model card of an export, as huggingface_hub reads it; and what is said of servers that compute otherwise."""

import getpass
import json
import logging
import socket

import pytest

from megatron.optimus.checkpoint import CheckpointError
from megatron.optimus.convert import Options, convert
from megatron.optimus.convert.formats import CardOptions

hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("transformers")
from .convert_cases import our_config, our_run  # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with a full checkpoint of step 4, metrics and results."""
    folder = tmp_path_factory.mktemp("alice-private") / "run"
    config = our_config(clip_qkv=8.0, norm_epsilon=1e-3, moe_router_norm_topk_prob=True)
    config.logging.run_dir, config.training.global_batch_size = str(folder), 32
    config.data.data_path = ["0.75", "/home/alice/secret/web_text", "0.25", "/home/alice/secret/code_text"]
    config.data.tokenizer_model, config.optimizer.lr = "/home/alice/tok/tokenizer.json", 1.5e-3
    our_run(folder / "checkpoints", config, "full")
    lines = [dict(step=n, loss=5.0 - n, consumed_tokens=n * 65536, step_time_s=0.5) for n in range(1, 7)]
    lines[3]["valid_loss"] = 1.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 7, "lo')
    results = {"checkpoint": str(folder), "num_fewshot": 2, "results": {"sci|ence": {"acc,none": 0.5, "name": "x"}}}
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_the_card_of_an_export(run, tmp_path, caplog):
    evil = 'mine: "x"\n- [y]\n---\n'
    card_options = CardOptions("our | model\n# x", evil, (run / "results.json",))
    with caplog.at_level(logging.WARNING, "optimus"):
        done = convert(run, tmp_path / "hf", to="hf", options=Options(card=card_options))
    card = hub.ModelCard.load(tmp_path / "hf" / "README.md")
    assert {"README.md", "loss.png"} <= set(done.files) == {file.name for file in (tmp_path / "hf").iterdir()}
    assert card.data.license == "other" and card.data.license_name == 'mine: "x" - y ---'
    assert card.data.library_name == "transformers" and card.data.tags == ["optimus", "moe"]
    for text in (
        "# our model # x",
        "| tokens | 262,144 |",  # of step 4, not of the steps that followed it
        "| optimizer steps | 4 |",
        "| sequences of a step | 32 of 2,048 tokens |",
        "| last validation loss | 1.5000 nats a token |",
        "| web_text | 0.7500 |",
        "| code_text | 0.2500 |",
        "| sci ence | acc | 2 | 0.5 |",
        "lr: 0.0015",
        "optimus pretrain --config run.yaml",
        "vLLM and SGLang do not honour clip_qkv=8.0",
        "vLLM and SGLang do not honour norm_epsilon=0.001",
        "vLLM and SGLang do not honour moe_router_norm_topk_prob=True",
    ):
        assert text in card.content, text
    assert "do not honour clip_qkv=8.0: queries, keys and values are not clipped there" in caplog.text
    assert (tmp_path / "hf" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not any(word in card.content for word in ("alice", str(tmp_path), "/home", socket.gethostname() + "."))
    assert getpass.getuser() == "root" or getpass.getuser() not in card.content


def test_a_card_says_what_is_not_known(run, tmp_path):
    convert(run, tmp_path / "hf", to="hf")
    card = hub.ModelCard.load(tmp_path / "hf" / "README.md")
    assert card.data.license == "unknown" and "unknown; set before publishing" in card.text
    assert "Not evaluated." in card.text
    convert(tmp_path / "hf", tmp_path / "ours", to="optimus")
    convert(tmp_path / "ours", tmp_path / "again", to="hf", options=Options(card=CardOptions(license="apache-2.0")))
    card = hub.ModelCard.load(tmp_path / "again" / "README.md")
    assert card.data.license == "apache-2.0" and "| tokens | not recorded |" in card.text
    assert "Not recorded." in card.text and "loss.png" not in card.text and "lr:" not in card.text


@pytest.mark.parametrize(
    "content, message",
    [(None, "No such file"), ("[1]", "not a JSON object|expected|must be"), ('{"a": 1}', "has no results; name what")],
)
def test_results_that_are_none(run, tmp_path, content, message):
    file = tmp_path / "results.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(CheckpointError, match=message):
        convert(run, tmp_path / "hf", to="hf", options=Options(card=CardOptions(evaluations=(file,))))
    assert not (tmp_path / "hf").exists()
