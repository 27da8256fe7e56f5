"""What users get wrong: one clear error, exit code 2, nothing lost, nobody left waiting."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

from megatron.optimus.checkpoint import store
from megatron.optimus.data.dataset import InstanceSet, Split, check_contents
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.order import samples_at
from megatron.optimus.platform.environment import free_port
from megatron.optimus.platform.exit_codes import NUMERIC_ERROR, STORAGE_ERROR
from tests.helpers import start_program
from tests.integration.conftest import TINY, Program, command_of, environment


def fail(result: subprocess.CompletedProcess[str], *expected: str) -> None:
    assert result.returncode != 0
    errors = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert errors, result.stderr[-3000:]
    for text in expected:
        assert text in errors[0], errors[0]
    assert len(errors) == 1, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "options, expected",
    [
        (["--nun-layers", "3"], ["--nun-layers", "--num-layers"]),
        (["--num-layers", "two"], ["--num-layers", "two", "int"]),
        (["--global-batch-size", "7"], ["global_batch_size=7", "6 or 8"]),
        (["--expert-model-parallel-size", "3"], ["expert_model_parallel_size=3"]),
        (["--tensor-model-parallel-size", "2"], ["tensor_model_parallel_size"]),
        (["--moe-router-topk", "9"], ["moe_router_topk=9", "num_experts=4"]),
        (["--vocab-size", "50"], ["vocab_size", "50"]),
        (["--seq-length", "64"], ["seq_length=64", "32"]),
        (["--data-path", "nowhere"], ["nowhere.idx"]),
        (["--valid-data-path", "web=elsewhere"], ["elsewhere.idx"]),
        (["--tokenizer-model", "nowhere"], ["tokenizer_model='nowhere' does not exist"]),
        (["--load", "nowhere"], ["nowhere"]),
        (["--split", "100,0,0"], ["split"]),
        (["--seed", str(2**63)], ["seed=9223372036854775808", "9223372036854775807"]),
        (["--save-local-dir", "/dev/null/x"], ["save_local_dir='/dev/null/x': Not a directory"]),
        (["--tensorboard-dir", "/dev/null/x"], ["tensorboard_dir='/dev/null/x'", "Not a directory"]),
    ],
)
def test_one_line_says_what_is_wrong(tmp_path: Path, train: Program, options: list[str], expected: list[str]) -> None:
    fail(train(tmp_path, *options), *expected)


def test_no_rank_waits_for_one_that_failed(tmp_path: Path, pretrain: Program) -> None:
    """A vocabulary error is found after the ranks have met; both must end."""
    fail(pretrain(tmp_path, "--vocab-size", "50", ranks=2), "vocab_size")


def test_ranks_with_other_options_end_with_the_difference(tmp_path: Path, tokens: Path) -> None:
    ranks, port = [], free_port()
    for rank, lr in enumerate(("1e-3", "2e-3")):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        env = environment() | {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        words = [*command_of(1), *TINY, "--run-dir", str(tmp_path), "--data-path", str(tokens), "--lr", lr]
        ranks.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], errors
    assert "optimizer.lr=0.002, rank 0 has 0.001" in errors[1] and "Traceback" not in "".join(errors)
    assert not list(tmp_path.iterdir())


def test_truncated_tokens(tmp_path: Path, tokens: Path, train: Program) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{tokens}{suffix}", tmp_path / f"cut{suffix}")
    whole = (tmp_path / "cut.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(whole[:-100])
    fail(train(tmp_path, "--data-path", tmp_path / "cut"), "cut.bin")


def large_corpus(tmp_path: Path) -> Path:
    """The prefix of a corpus of zeros in one document, too large to be looked at whole; takes no room."""
    tokens, prefix = 1 << 27, tmp_path / "large"
    with open(f"{prefix}.bin", "wb") as stream:
        stream.truncate(2 * tokens)
    with IndexedDatasetWriter(tmp_path / "one", np.uint16) as writer:
        writer.add_document([1])
    index = bytearray((tmp_path / "one.idx").read_bytes())
    index[34:38] = tokens.to_bytes(4, "little")  # its only sequence is as long as the file
    prefix.with_suffix(".idx").write_bytes(index)
    return prefix


def damage(prefix: Path, place: int) -> str:
    """Writes an id beyond the vocabulary where no check before the run looks; what is said about it."""
    with open(f"{prefix}.bin", "r+b") as stream:
        stream.seek(2 * place)
        stream.write((60_000).to_bytes(2, "little"))
    check_contents([str(prefix)], 64)
    return f"{prefix}.bin: token {place} has id 60000, outside the vocabulary of 64"


def test_validation_data_that_cannot_be_read(tmp_path: Path, train: Program) -> None:
    """Of one rank, after the third step: both save that step, which has its line, and end; both go on from there."""
    prefix = large_corpus(tmp_path)
    valid = InstanceSet([str(prefix)], 32, split="969,30,1", part=Split.VALID)
    place = valid.locate(2)[1][0][0] + 7  # samples 2 and 3 of a step are rank 1's
    reason = damage(prefix, place)
    options = ["--data-path", prefix, "--eval-interval", 3, "--save-interval", 100]
    result = train(tmp_path / "run", *options, ranks=2)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr[-2000:]
    errors = sorted(line for line in result.stderr.splitlines() if line.startswith("error"))
    assert len(errors) == 2 and f"error on rank 1: reading validation data failed on rank 1: {reason}" in errors[0]
    assert "validation data cannot be read: saving step 3" in result.stdout
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[-1].get("valid_loss") is None
    kept = store.load_manifest(tmp_path / "run/checkpoints/step-00000003").metadata["recent_grad_norms"]
    assert kept == [[line["step"], line["grad_norm"]] for line in lines], "those that later steps are compared with"
    with open(f"{prefix}.bin", "r+b") as stream:
        stream.seek(2 * place)
        stream.write(bytes(2))
    result = train(tmp_path / "run", *options, "--train-iters", 6)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "step 3, 24 samples consumed" in result.stdout


def test_an_id_that_no_check_before_the_run_could_see(tmp_path: Path, train: Program) -> None:
    """One token of 134 million, in a sample of one rank's sixth step: both ranks save and end before it is needed."""
    prefix = large_corpus(tmp_path)
    instances = InstanceSet([str(prefix)], 32, split="969,30,1")
    sixth = samples_at(5 * 8, 8, len(instances), 1234)
    place = instances.locate(int(sixth[2]))[1][0][0] + 7  # samples 2 and 3 of a step are rank 1's
    reason = damage(prefix, place)

    result = train(tmp_path / "run", "--data-path", prefix, ranks=2)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr[-2000:]
    errors = sorted(line for line in result.stderr.splitlines() if line.startswith("error"))
    assert len(errors) == 2 and errors[0].startswith(
        f"error on rank 1: reading beyond step 4 failed on rank 1: {reason}"
    )
    assert errors[1] == "error: reading beyond step 4 failed on rank 1: see the message of that rank"
    assert "saving step 4" in result.stdout and (tmp_path / "run/checkpoints/step-00000004").is_dir()
    # as it still is there, a run that resumes ends before its first step
    result = train(tmp_path / "run", "--data-path", prefix, "--micro-batch-size", 8)
    fail(result, f"error: reading the first batches failed on rank 0: {reason}")
    assert "step 4, 32 samples consumed" in result.stdout and "step=5" not in result.stdout


def test_corrupted_checkpoint_falls_back_to_the_one_before(tmp_path: Path, train: Program) -> None:
    assert train(tmp_path, "--train-iters", "4").returncode == 0
    shard = next((tmp_path / "checkpoints/step-00000004").glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-5] ^= 1
    shard.write_bytes(damaged)
    result = train(tmp_path, "--train-iters", "6")
    assert result.returncode == 0, result.stderr[-2000:]
    assert "step-00000004 is damaged" in result.stdout
    assert "resumed from" in result.stdout and "step 2," in result.stdout


def test_a_checkpoint_of_another_shape_names_the_options(tmp_path: Path, train: Program) -> None:
    assert train(tmp_path, "--train-iters", "2").returncode == 0
    fail(train(tmp_path, "--num-layers", "3"), "not in the checkpoint", "model.num_layers 2 -> 3", "another folder")
    remedy = ("--save and --run-dir", "--load with --no-load-optim")
    told = "holds the states of optimizer=adam, this run has optimizer=lion"
    fail(train(tmp_path, "--optimizer", "lion"), told, *remedy)  # lion's only state has the name of one of adam's
    assert train(tmp_path / "lion", "--train-iters", "2", "--optimizer", "lion").returncode == 0
    told = "holds the states of optimizer=lion, this run has optimizer=adam"
    fail(train(tmp_path / "lion"), told, "optimizer.optimizer lion -> adam", *remedy)
    assert (tmp_path / "checkpoints" / "step-00000002").is_dir()


def test_full_disk_while_saving_loses_nothing(tmp_path: Path, train: Program, pretrain: Program) -> None:
    """The disk takes no more bytes than a file-size limit allows: an error, no debris, the earlier checkpoint good."""
    assert train(tmp_path, "--train-iters", "2").returncode == 0
    before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    full = pretrain(tmp_path, "--train-iters", "4", "--max-unsaved-minutes", "0", max_file_bytes=60_000)
    fail(full, "saving step 4", "File too large")
    assert full.returncode == STORAGE_ERROR  # the launcher starts it again, where it was not the user's mistake
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == before
    result = train(tmp_path, "--train-iters", "4")
    assert result.returncode == 0 and "step 2," in result.stdout


def test_diverged_run_ends_with_the_reason(tmp_path: Path, train: Program) -> None:
    result = train(tmp_path, "--lr", "1e30", "--min-lr", "1e30", "--lr-warmup-iters", "0")
    fail(result, "gradients were not finite in 5 steps in a row")
    assert result.returncode == NUMERIC_ERROR


def test_values_that_are_not_finite_are_traced_to_their_rank(tmp_path: Path, tokens: Path) -> None:
    """Rank 1 has a bad layer; experts' all-gathers spread what it makes to rank 0 in the same forward pass."""
    words = [*TINY, "--expert-model-parallel-size", "2", "--train-iters", "20", "--eval-interval", "0"]
    words += ["--run-dir", str(tmp_path), "--data-path", str(tokens)]
    result = start_program("tests.integration.nonfinite_program", words, 2, timeout=200)
    assert result.returncode == NUMERIC_ERROR, result.stderr[-3000:]
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert "gradients were not finite in 5 steps in a row, up to step 8" in line
    found = f"They came first on rank 1 of node {socket.gethostname()}, in the output of layers.1.attention.o_proj, in "
    assert f"{found}each of 4 steps looked at (at first in micro-batch 0: samples 34, 35 of the order" in line
    assert "): suspect that device before the rate and the data" in line


def test_all_checkpoints_corrupted_is_an_error_not_a_fresh_start(tmp_path: Path, train: Program) -> None:
    assert train(tmp_path, "--train-iters", "2").returncode == 0
    for shard in (tmp_path / "checkpoints").rglob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-1])
    fail(train(tmp_path, "--train-iters", "4"), "checkpoints", "none of its")
