"""Autotune the tile sizes of the Triton expert kernels on this GPU, for later runs.

    optimus tune-kernels --preset mula-7b-a1b --micro-batch-size 4 --seq-length 4096
    optimus tune-kernels --preset mula-7b-a1b --tokens 16384 --expert-model-parallel-size 4 --explain

All options of `optimus pretrain` can follow; the shapes are those of one rank of that run. Runs whose expert layers use
the Triton backend read the tile sizes from the file that is written (docs/expert_kernels.md).

Exit code: 0, or 2 after one line that says what is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from megatron.optimus import ops
from megatron.optimus.config.load import Parser, add_run_options, read_run, whole_number
from megatron.optimus.config.schema import ConfigError, Precision, RunConfig
from megatron.optimus.models.huggingface.config import take_from_hf
from megatron.optimus.ops.triton import tile_cache, tiles
from megatron.optimus.ops.triton.tiles import Problem
from megatron.optimus.platform import device as devices
from megatron.optimus.platform import environment
from megatron.optimus.platform.files import naming_write_errors
from megatron.optimus.platform.log import prints_errors


@prints_errors(ConfigError, ops.BackendUnavailableError)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus tune-kernels``; returns the exit code."""
    parser = Parser("tune-kernels", __doc__ or "")
    tokens = "tokens of a rank [micro_batch_size * seq_length, divided by context and sequence parallelism]"
    parser.add_argument("--tokens", type=whole_number(), metavar="N", help=tokens)
    parser.add_argument("--again", action="store_true", help="also tune shapes that have been tuned")
    parser.add_argument(
        "--explain", action="store_true", help="print every candidate with its time, or why it was not timed"
    )
    add_run_options(parser)
    args = parser.parse(argv)
    config = read_run(args, take_from_hf).config
    with naming_write_errors(environment.tiles_file(), "name another file in OPTIMUS_TILES"):
        tune(config, args.tokens, again=args.again, explain=args.explain)
    return 0


def tune(config: RunConfig, tokens: int | None, *, again: bool, explain: bool) -> None:
    """Times the candidates of every shape of the run and saves the fastest.

    Raises:
        ConfigError: for a run without kernels to tune.
        BackendUnavailableError: where Triton does not run on this device.
        OSError: before anything is timed, where the result cannot be saved.
    """
    from megatron.optimus.training.kernel_tuning import problems_of

    if not config.model.is_moe:
        raise ConfigError(f"num_experts={config.model.num_experts}: a model without experts has no expert kernels")
    if config.training.params_dtype is Precision.FP32:
        raise ConfigError("params_dtype=fp32: the Triton kernels support bf16 only; use bf16")
    device = devices.device_for_rank(config.parallel.device, 0)
    devices.set_device(device)
    ops.set_backend("triton")  # on Hopper auto selects the CUDA backend
    ops.resolve(device, torch.bfloat16)
    key = tiles.hardware(device).key
    tile_cache.save(key, {})
    problems, share = problems_of(config, torch.bfloat16, tokens)
    sys.stdout.write(f"{key}; saved in {environment.tiles_file()}\n")
    tune_problems(problems, share, device, exact_only=config.training.deterministic, again=again, explain=explain)


def tune_problems(
    problems: list[Problem], share: float, device: torch.device, *, exact_only: bool, again: bool, explain: bool
) -> None:
    """Tunes each problem and prints the outcome; ``share``: fraction of its rows whose expert is on this rank."""
    from megatron.optimus.ops.triton.autotune import line, tune_missing

    for problem in dict.fromkeys(problems):
        known = (
            {} if again else {k: e for k, e in tiles.table(device).items() if e.matches_default_bits or not exact_only}
        )
        _, outcomes = tune_missing([problem], device, known, local_share=share, exact_only=exact_only)
        if not outcomes:
            entry = known[str(problem)]
            sys.stdout.write(f"{problem}: {entry.tiles}: {entry.microseconds:.1f} us (tuned before)\n")
        for outcome in outcomes:
            sys.stdout.write(line(outcome) + "\n")
            if explain:
                for candidate, microseconds in outcome.microseconds.items():
                    sys.stdout.write(f"    {microseconds:10.1f} us  {candidate}\n")
                for candidate, reason in outcome.left_out.items():
                    sys.stdout.write(f"    {'left out':>13}  {candidate}: {reason}\n")
        sys.stdout.flush()
