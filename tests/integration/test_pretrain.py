"""The training program as a whole: real processes, real files, compared with itself under other circumstances."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from megatron.optimus import pretrain
from megatron.optimus.checkpoint import CheckpointError, store
from megatron.optimus.checkpoint.run_lock import RunLock
from megatron.optimus.config.choices import PipelineSchedule
from megatron.optimus.config.load import load as load_run
from megatron.optimus.config.placement import to_json
from megatron.optimus.platform.ranks import Ranks
from megatron.optimus.training.expert_load import report
from megatron.optimus.training.metrics import read_metrics
from tests.distributed.layouts import refusal
from tests.integration.conftest import TINY, Program, command_of, environment
from tests.unit.training.test_metrics import KEYS


def succeed(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    return result.stdout


def numbers(run_dir: Path) -> list[dict[str, float]]:
    """What training computed in each step, without the clock."""
    keys = ("step", "consumed_tokens", "loss", "aux_loss", "z_loss", "grad_norm", "lr", "valid_loss")
    return [{key: line[key] for key in keys if key in line} for line in read_metrics(run_dir / "metrics.jsonl")]


def tensors(checkpoint: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    requests = store.everything(store.load_manifest(checkpoint))
    store.load(checkpoint, requests)
    return {(request.name, request.kind): request.tensor for request in requests}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, train: Program, tokens: Path) -> Path:
    """Two ranks, expert parallelism 2, eight steps without interruption, then a test set."""
    run_dir = tmp_path_factory.mktemp("unbroken")
    out = succeed(train(run_dir, "--expert-model-parallel-size", 2, "--test-data-path", f"held={tokens}", ranks=2))
    assert "step=8 loss=" in out and out.index("step=8 loss=") < out.index("held: loss ")
    return run_dir


def test_every_step_is_reported_and_the_loss_falls(unbroken: Path) -> None:
    lines = read_metrics(unbroken / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    for line in lines:
        keys = {key for key in line if not key.startswith("startup_s/")}
        assert keys - {"valid_loss", "pause_s", "save_stall_s", "save_drain_s"} == set(KEYS)
        assert line["dropped_tokens"] == 0
        assert line["consumed_tokens"] == line["step"] * 8 * 32
    assert [line["step"] for line in lines if "valid_loss" in line] == [4, 8]
    assert lines[4]["pause_s"] > 0, "the validation before it"
    assert lines[-1]["valid_loss"] < lines[3]["valid_loss"] < lines[0]["loss"] + 0.05
    assert any(line["save_stall_s"] > 0 for line in lines if "save_stall_s" in line)
    assert any(line["save_drain_s"] > 0 for line in lines if "save_drain_s" in line)
    phases = "imports process_group data model kernels weights optimizer checkpoint first_step other".split()
    start = {key.removeprefix("startup_s/"): value for key, value in lines[0].items() if key.startswith("startup_s/")}
    assert start.pop("total") == pytest.approx(sum(start.values())) and set(start) == set(phases)
    assert start["imports"] > 0 and start["first_step"] >= lines[0]["step_time_s"] / 2
    assert not [key for line in lines[1:] for key in line if key.startswith("startup_s/")]
    again = load_run(["--config", str(unbroken / "config.yaml")]).config
    assert (again.training.train_iters, again.parallel.expert_model_parallel_size) == (8, 2)
    load = json.loads((unbroken / "expert_load.json").read_text())
    assert [sum(layer) for layer in load["slots_per_layer_and_expert"]] == [8 * 32 * 2] * 2


def test_resumed_run_equals_the_unbroken_one_bit_for_bit(
    tmp_path: Path, train: Program, unbroken: Path, tokens: Path
) -> None:
    """Its test set, too, which is evaluated after the last step and by a run that finds nothing left to train."""
    options, tested = ("--expert-model-parallel-size", 2, "--test-data-path", f"held={tokens}"), "evaluation.json"
    out = succeed(train(tmp_path, *options, "--exit-interval", 3, "--log-interval", 100, ranks=2))
    assert re.search(r"step=3 .* eta=0:00\n", out), "its line and the time left are those of this process's last step"
    assert re.search(r"trained steps 1 to 3 of 8 in \d:\d\d: loss \d\.\d{4}\n", out)
    assert f"checkpoint: {tmp_path}/checkpoints/step-00000003\n" in out and "the same command continues from it" in out
    assert [line["step"] for line in numbers(tmp_path)] == [1, 2, 3] and not (tmp_path / tested).exists()
    out = succeed(train(tmp_path, *options, ranks=2))
    assert "resumed from" in out and "step 3, 24 samples" in out
    assert re.search(r"trained steps 4 to 8 of 8 in .*: loss \S+, validation loss \d\.\d{4} at step 8\n", out)
    export = f"optimus convert {tmp_path}/checkpoints {tmp_path}/hf --to hf\n"
    assert export in out and f"report: {tmp_path}/report.html\n" in out
    made = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '"evaluation":{"held":{"loss":' in made and made.count('"stopped_s":') == 2, "two processes and the test set"
    assert numbers(tmp_path) == numbers(unbroken)
    told = (unbroken / tested).read_text()
    assert (tmp_path / tested).read_text() == told and json.loads(told)["step"] == 8
    (tmp_path / tested).unlink()
    out = succeed(train(tmp_path, *options, ranks=2))
    assert "nothing left to train: step 8 of 8\n" in out and "a larger --train-iters continues" in out and export in out
    assert "step=" not in out
    assert (tmp_path / tested).read_text() == told and numbers(tmp_path) == numbers(unbroken)
    resumed, reference = (tensors(run / "checkpoints/step-00000008") for run in (tmp_path, unbroken))
    assert resumed.keys() == reference.keys()
    for key, tensor in reference.items():
        assert torch.equal(resumed[key], tensor), key


def test_killed_run_resumes_from_the_last_checkpoint(
    tmp_path: Path, tokens: Path, pretrain: Program, train: Program
) -> None:
    """SIGKILL of launcher and ranks after the first checkpoint; the same command then finishes the same run."""
    options = ["--expert-model-parallel-size", "2", "--train-iters", "40", "--eval-interval", "0"]
    succeed(train(tmp_path / "unbroken", *options, ranks=2))
    killed = tmp_path / "killed"
    words = [*command_of(2), *TINY, *options, "--run-dir", str(killed), "--data-path", str(tokens)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(words, env=environment(), start_new_session=True, **quiet)
    deadline = time.monotonic() + 120
    while not list(killed.glob("checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    newest = store.latest(killed / "checkpoints")
    assert newest is not None and newest.name < "step-00000040"  # else the kill came too late to prove anything
    assert f"resumed from {newest}" in succeed(pretrain(killed, *options, ranks=2))
    assert numbers(killed) == numbers(tmp_path / "unbroken")


def test_a_killed_rank_leaves_lines_not_tracebacks(tmp_path: Path, tokens: Path) -> None:
    """The others may notice before the launcher has stopped them."""
    command = [*command_of(2), *TINY, "--run-dir", str(tmp_path), "--data-path", str(tokens), "--train-iters", "100000"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        next(line for line in run.stdout if line.startswith("step=4 "))
        ranks = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        said = run.stderr.read().splitlines()
    assert run.returncode == 128 + signal.SIGKILL
    assert not [line for line in said if "Traceback" in line], said[-30:]
    assert re.match("error: rank [01] ended with signal SIGKILL and the other ranks were stopped", said[-1])


@pytest.mark.parametrize(
    "ranks, options",
    [
        (1, []),
        (
            4,
            ["--expert-model-parallel-size", "2", "--micro-batch-size", "1", "--moe-token-dispatcher-type", "alltoall"],
        ),
        (4, ["--expert-model-parallel-size", "4", "--moe-expert-placement", "interleaved"]),
        (
            4,
            "--tensor-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type p2p "
            "--expert-model-parallel-size 4 --cpu-offloading-num-layers 1 "
            "--recompute-modules moe attention norm".split(),
        ),
        (
            4,
            "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 2 "
            "--moe-token-dispatcher-type alltoall --micro-batch-size 1".split(),
        ),
        (2, "--pipeline-model-parallel-size 2 --expert-model-parallel-size 1".split()),
        (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --expert-model-parallel-size 2".split()),
        (
            4,
            "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
            "--moe-expert-placement interleaved".split(),
        ),
    ],
)
def test_any_layout_trains_the_same_model(
    tmp_path: Path,
    train: Program,
    pretrain: Program,
    ranks: int,
    options: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Losses, gradient norms and final weights of a layout equal those of one process.

    Batch-wide balancing statistics, because those of single micro-batches differ by definition.
    """
    has_stages = "--pipeline-model-parallel-size" in options
    if has_stages and (reason := refusal(PipelineSchedule.ONE_F_ONE_B, num_stages=2)):
        pytest.skip(reason)
    if TorchVersion(torch.__version__) < "2.10" and "--cpu-offloading-num-layers" in options:
        place = options.index("--cpu-offloading-num-layers")  # refused with tensor parallelism: parallel/recompute.py
        options = options[:place] + options[place + 2 :]
    common = ["--moe-router-load-balancing-type", "none", "--moe-z-loss-coeff", "0.01"]
    serial = _serial_run(tmp_path_factory, train, common)
    if ranks == 2:
        succeed(pretrain(tmp_path, *common, *options, ranks=ranks, torchrun=True))
    else:
        succeed(train(tmp_path, *common, *options, ranks=ranks))
    for line, reference in zip(numbers(tmp_path), numbers(serial), strict=True):
        for key, value in reference.items():
            assert line[key] == pytest.approx(value, rel=2e-5), (line["step"], key)
    parallel, reference_tensors = (tensors(run / "checkpoints/step-00000008") for run in (tmp_path, serial))
    for key, tensor in reference_tensors.items():
        if key[1] == "rng":
            continue  # one row per rank
        assert (parallel[key] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), key


def test_deterministic_runs_have_the_same_bits(tmp_path: Path, train: Program) -> None:
    options = (
        "--deterministic --tensor-model-parallel-size 2 --expert-model-parallel-size 2 --train-iters 4 "
        "--moe-token-dispatcher-type alltoall --params-dtype bf16 --recompute-modules moe attention"
    ).split()
    for name in ("first", "second"):
        succeed(train(tmp_path / name, *options, ranks=2))
    assert numbers(tmp_path / "first") == numbers(tmp_path / "second")
    first, second = (tensors(tmp_path / name / "checkpoints/step-00000004") for name in ("first", "second"))
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key


_SERIAL: dict[str, Path] = {}


def _serial_run(factory: pytest.TempPathFactory, train: Program, options: list[str]) -> Path:
    key = " ".join(options)
    if key not in _SERIAL:
        _SERIAL[key] = factory.mktemp("serial")
        succeed(train(_SERIAL[key], *options))
    return _SERIAL[key]


def test_checkpoint_of_one_layout_continues_on_another(tmp_path: Path, train: Program, unbroken: Path) -> None:
    """Two ranks with EP=2 up to step 8, then one process, experts in other places, or everything split over two: the
    loss goes on."""
    load = ["--load", unbroken / "checkpoints", "--train-iters", 9, "--lr-decay-iters", 8]
    out = succeed(train(tmp_path / "one", *load))
    assert "changed since that checkpoint: parallel.expert_model_parallel_size 2 -> 1" in out
    placement = tmp_path / "placement.json"
    placement.write_text(to_json([layer.placement for layer in report(unbroken / "expert_load.json").layers]))
    moved = ["--expert-model-parallel-size", 2, "--moe-expert-placement-file", placement]
    out = succeed(train(tmp_path / "two", *load, *moved, ranks=2))
    assert f"{placement} ownership" in out
    wrong = train(tmp_path / "wrong", *load, "--moe-expert-placement-file", placement)
    assert wrong.returncode == 2 and "must hold 2 layers of 1 ranks" in wrong.stderr
    split = ["--tensor-model-parallel-size", 2, "--expert-tensor-parallel-size", 2]
    succeed(train(tmp_path / "split", *load, *split, ranks=2))
    one, two, three = (numbers(tmp_path / name)[-1] for name in ("one", "two", "split"))
    assert one["step"] == two["step"] == three["step"] == 9
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)
    assert one["loss"] == pytest.approx(three["loss"], rel=1e-6)
    assert one["grad_norm"] == pytest.approx(three["grad_norm"], rel=1e-5)
    first, *others = (tensors(tmp_path / name / "checkpoints/step-00000009") for name in ("one", "two", "split"))
    for key, tensor in first.items():
        for other in others if key[1] != "rng" else []:
            assert (other[key] - tensor).abs().max() <= 1e-5 * tensor.abs().max(), key


def test_tied_embedding_and_shared_experts_of_another_layout(tmp_path: Path, train: Program) -> None:
    """Two stages hold the embedding, two ranks of each a part of the shared experts; a checkpoint holds them once and
    whole, from which one process goes on as the four ranks did."""
    if reason := refusal(PipelineSchedule.ONE_F_ONE_B, num_stages=2):
        pytest.skip(reason)
    tied = ["--no-untie-embeddings-and-output-weights", "--train-iters", 3, "--save-interval", 2]
    tied += ["--moe-shared-expert-intermediate-size", 20, "--moe-shared-expert-gate", "--add-qkv-bias"]
    layout = ["--pipeline-model-parallel-size", 2, "--tensor-model-parallel-size", 2, "--expert-model-parallel-size", 2]
    succeed(train(tmp_path / "stages", *tied, *layout, ranks=4))
    checkpoints = tmp_path / "stages" / "checkpoints"
    succeed(train(tmp_path / "one", *tied, "--load", checkpoints / "step-00000002"))
    one, stages = (tensors(folder / "step-00000003") for folder in (tmp_path / "one" / "checkpoints", checkpoints))
    assert {key for key in one if key[1] != "rng"} == {key for key in stages if key[1] != "rng"}
    assert ("embedding.weight", "master") in one and ("lm_head.weight", "master") not in one
    assert one["layers.1.moe.shared_experts.mlp.down_proj.weight", "exp_avg"].numel() == 32 * 20
    assert one["layers.1.attention.k_proj.bias", "master"].numel() == 32
    for key, tensor in one.items():
        if key[1] != "rng":
            assert (stages[key] - tensor).abs().max() <= 1e-5 * tensor.abs().max(), key


def test_resume_with_another_sequence_length_keeps_the_tokens(tmp_path: Path, train: Program, unbroken: Path) -> None:
    options = ["--load", unbroken / "checkpoints", "--train-iters", 9, "--lr-decay-iters", 8, "--seq-length", 16]
    out = succeed(train(tmp_path, *options))
    assert "step 8, 128 samples consumed" in out  # 64 samples of 32 tokens
    assert "training.seq_length 32 -> 16" in out
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["consumed_tokens"] == 8 * 8 * 32 + 8 * 16


def test_finetune_takes_only_the_weights(tmp_path: Path, train: Program, unbroken: Path) -> None:
    succeed(
        train(tmp_path, "--load", unbroken / "checkpoints", "--finetune", "--train-iters", 1, "--lr-warmup-iters", 0)
    )
    [line] = numbers(tmp_path)
    assert line["step"] == 1
    assert line["loss"] < numbers(unbroken)[0]["loss"] - 0.1


def test_a_checkpoint_is_evaluated_at_another_layout_as_its_run_did(
    tmp_path: Path, train: Program, unbroken: Path, tokens: Path
) -> None:
    """The same loss as the run's own validation; a share without a batch is left out by name, a named set is not."""
    options = ["--skip-train", "--load", unbroken / "checkpoints", "--valid-data-path", f"whole={tokens}"]
    options += ["--test-data-path", f"held={tokens}"]
    said = succeed(train(tmp_path, *options))
    found = json.loads((tmp_path / "evaluation.json").read_text())
    expected = numbers(unbroken)[-1]["valid_loss"]
    assert found["step"] == 8 and found["validation"]["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["validation"]["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
    assert abs(found["whole"]["loss"] - expected) < 0.5 and found["whole"]["loss"] != found["validation"]["loss"]
    held = json.loads((unbroken / "evaluation.json").read_text())["held"]
    assert found["held"] == found["whole"] == pytest.approx(held, rel=1e-5) and held["tokens"] == 8 * 32
    assert found["validation"]["tokens"] == 8 * 32 and "test" not in found and "not evaluated: test" in said
    assert not list((tmp_path / "checkpoints").glob("step-*")) and not (tmp_path / "metrics.jsonl").exists()


def test_evaluation_without_a_checkpoint_is_an_error(tmp_path: Path, train: Program) -> None:
    result = train(tmp_path, "--skip-train", "--split", "0,1,1")
    assert result.returncode == 2 and "there is no checkpoint to evaluate" in result.stderr


def test_bf16_follows_fp32(tmp_path: Path, train: Program) -> None:
    succeed(train(tmp_path / "bf16", "--params-dtype", "bf16"))
    succeed(train(tmp_path / "fp32"))
    low, full = numbers(tmp_path / "bf16"), numbers(tmp_path / "fp32")
    for line, reference in zip(low, full, strict=True):
        assert line["loss"] == pytest.approx(reference["loss"], rel=0.02)


def test_expert_bias_and_tensorboard(tmp_path: Path, train: Program) -> None:
    """Aux-loss-free balancing on two ranks; its bias is part of the checkpoint."""
    options = ["--moe-router-enable-expert-bias", "--moe-router-load-balancing-type", "none", "--train-iters", 3]
    options += ["--expert-model-parallel-size", 2, "--tensorboard-dir", tmp_path / "tb"]
    succeed(train(tmp_path, *options, ranks=2))
    stored = tensors(tmp_path / "checkpoints/step-00000003")
    biases = [tensor for (name, kind), tensor in stored.items() if kind == "buffer"]
    assert len(biases) == 2
    for bias in biases:
        assert (bias != 0).any() and bias.abs().max() <= 3 * 1e-3 * 1.01  # an odd number of steps of 1e-3 up or down
    assert list((tmp_path / "tb").glob("events.*"))


def test_a_folder_that_a_restart_cannot_use_is_the_disks_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    with pytest.raises(CheckpointError, match="Not a directory") as raised:
        Ranks(None, torch.device("cpu")).run_on_all_ranks(
            lambda: RunLock(tmp_path / "checkpoints"), "locking", CheckpointError
        )
    codes = {}
    for attempt in ("", "launch:1", "launch:2"):
        monkeypatch.setenv("OPTIMUS_ATTEMPT", attempt)
        codes[attempt] = pretrain._exit_code(raised.value)
    assert codes == {"": 2, "launch:1": 2, "launch:2": 3}
    assert pretrain._exit_code(CheckpointError("damaged")) == 2  # no error of the file system
