"""What users get wrong: one clear error, exit code 2, nothing lost, nobody left waiting."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.optimus.runtime import launch_env
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
        (["--tokenizer-model", "nowhere"], ["tokenizer_model='nowhere' does not exist"]),
        (["--load", "nowhere"], ["nowhere"]),
        (["--split", "100,0,0"], ["split"]),
        (["--seed", str(2**63)], ["seed=9223372036854775808", "9223372036854775807"]),
        (["--tensorboard-dir", "/dev/null/x"], ["opening the outputs failed on rank 0", "Not a directory"]),
    ],
)
def test_one_line_says_what_is_wrong(
    tmp_path: Path, pretrain: Program, options: list[str], expected: list[str]
) -> None:
    fail(pretrain(tmp_path, *options), *expected)


def test_no_rank_waits_for_one_that_failed(tmp_path: Path, pretrain: Program) -> None:
    """A vocabulary error is found after the ranks have met; both must end."""
    fail(pretrain(tmp_path, "--vocab-size", "50", ranks=2), "vocab_size")


def test_ranks_with_other_options_end_with_the_difference(tmp_path: Path, tokens: Path) -> None:
    ranks, port = [], launch_env.free_port()
    for rank, lr in enumerate(("1e-3", "2e-3")):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        env = environment() | {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        words = [*command_of(1), *TINY, "--run-dir", str(tmp_path), "--data-path", str(tokens), "--lr", lr]
        ranks.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], errors
    assert "optimizer.lr=0.002, rank 0 has 0.001" in errors[1] and "Traceback" not in "".join(errors)
    assert not list(tmp_path.iterdir())


def test_truncated_tokens(tmp_path: Path, tokens: Path, pretrain: Program) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{tokens}{suffix}", tmp_path / f"cut{suffix}")
    whole = (tmp_path / "cut.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(whole[:-100])
    fail(pretrain(tmp_path, "--data-path", tmp_path / "cut"), "cut.bin")


def test_corrupted_checkpoint_falls_back_to_the_one_before(tmp_path: Path, pretrain: Program) -> None:
    assert pretrain(tmp_path, "--train-iters", "4").returncode == 0
    shard = next((tmp_path / "checkpoints/step-00000004").glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-5] ^= 1
    shard.write_bytes(damaged)
    result = pretrain(tmp_path, "--train-iters", "6")
    assert result.returncode == 0, result.stderr[-2000:]
    assert "step-00000004 is damaged" in result.stdout
    assert "resumed from" in result.stdout and "step 2," in result.stdout


def test_a_checkpoint_of_another_shape_names_the_options(tmp_path: Path, pretrain: Program) -> None:
    assert pretrain(tmp_path, "--train-iters", "2").returncode == 0
    fail(pretrain(tmp_path, "--num-layers", "3"), "not in the checkpoint", "model.num_layers 2 -> 3", "another folder")
    remedy = ("--save and --run-dir", "--load with --no-load-optim")
    told = "holds the states of optimizer=adam, this run has optimizer=lion"
    fail(pretrain(tmp_path, "--optimizer", "lion"), told, *remedy)  # lion's only state has the name of one of adam's
    assert pretrain(tmp_path / "lion", "--train-iters", "2", "--optimizer", "lion").returncode == 0
    told = "holds the states of optimizer=lion, this run has optimizer=adam"
    fail(pretrain(tmp_path / "lion"), told, "optimizer.optimizer lion -> adam", *remedy)
    assert (tmp_path / "checkpoints" / "step-00000002").is_dir()


def test_full_disk_while_saving_loses_nothing(tmp_path: Path, pretrain: Program) -> None:
    """The disk takes no more bytes than a file-size limit allows: an error, no debris, the earlier checkpoint good."""
    assert pretrain(tmp_path, "--train-iters", "2").returncode == 0
    before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    fail(pretrain(tmp_path, "--train-iters", "4", max_file_bytes=60_000), "saving step 4", "File too large")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == before
    result = pretrain(tmp_path, "--train-iters", "4")
    assert result.returncode == 0 and "step 2," in result.stdout


def test_diverged_run_ends_with_the_reason(tmp_path: Path, pretrain: Program) -> None:
    result = pretrain(tmp_path, "--lr", "1e30", "--min-lr", "1e30", "--lr-warmup-iters", "0")
    fail(result, "gradients were not finite in 5 steps in a row")


def test_all_checkpoints_corrupted_is_an_error_not_a_fresh_start(tmp_path: Path, pretrain: Program) -> None:
    assert pretrain(tmp_path, "--train-iters", "2").returncode == 0
    for shard in (tmp_path / "checkpoints").rglob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-1])
    fail(pretrain(tmp_path, "--train-iters", "4"), "checkpoints", "none of its")
