"""Times the candidates of the Triton expert kernels on this machine's GPU and keeps the fastest for later runs.

    python tools/tune_kernels.py --preset mula-7b-a1b --micro-batch-size 4 --seq-length 4096
    python tools/tune_kernels.py --preset mula-7b-a1b --tokens 16384 --expert-model-parallel-size 4 --explain

Every option of the training program can follow; the shapes are those of one rank of that run. Runs where expert layers
are Triton's take them from the file that is written (docs/expert_kernels.md).

  --tokens N           tokens of a rank [micro_batch_size * seq_length, its part under context and sequence parallelism]
  --again              shapes that have tuned tiles, too
  --explain            every candidate with its time, or with the reason why it is left out

Exit code: 0, or 2 after one line that says what is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from megatron.optimus.platform import interrupts

if __name__ == "__main__":
    interrupts.end_silently()

import torch

from megatron.optimus import ops
from megatron.optimus.config.load import load
from megatron.optimus.config.own_flags import split_flags, whole_number
from megatron.optimus.config.schema import ConfigError, Precision, RunConfig
from megatron.optimus.ops.triton import tile_cache, tiles
from megatron.optimus.ops.triton.tiles import Problem
from megatron.optimus.platform import device as devices
from megatron.optimus.platform import environment as launch_env

WITH_VALUE = ("--tokens",)
SWITCHES = ("--again", "--explain")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or "--help" in words or "-h" in words:
        sys.stdout.write(__doc__ or "")
        return 0
    try:
        own, rest = split_flags(words, WITH_VALUE, SWITCHES)
        config = load(rest, own_flags=(*WITH_VALUE, *SWITCHES)).config
        tune(config, whole_number(own, "--tokens"), again="--again" in own, explain="--explain" in own)
    except (ConfigError, ops.BackendUnavailableError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"error: {launch_env.tiles_file()}: {error.strerror}; name another file in OPTIMUS_TILES\n")
        return 2
    return 0


def tune(config: RunConfig, tokens: int | None, *, again: bool, explain: bool) -> None:
    """Raises ConfigError or BackendUnavailableError where there is nothing to tune, OSError before anything is timed
    where the result could not be kept."""
    from megatron.optimus.training.kernel_tuning import problems_of

    if not config.model.is_moe:
        raise ConfigError(f"num_experts={config.model.num_experts}: a model without experts has no expert kernels")
    if config.training.params_dtype is Precision.FP32:
        raise ConfigError("params_dtype=fp32: the Triton kernels have 16 bits only; use bf16")
    device = devices.pick(config.parallel.device, 0)
    devices.set_device(device)
    ops.set_backend("triton")  # on Hopper auto takes another
    ops.resolve(device, torch.bfloat16)
    key = tiles.hardware(device).key
    tile_cache.save(key, {})
    problems, share = problems_of(config, torch.bfloat16, tokens)
    sys.stdout.write(f"{key}; kept in {launch_env.tiles_file()}\n")
    report(problems, share, device, exact_only=config.training.deterministic, again=again, explain=explain)


def report(
    problems: list[Problem], share: float, device: torch.device, *, exact_only: bool, again: bool, explain: bool
) -> None:
    from megatron.optimus.ops.triton.tune import line, tune_missing

    for problem in dict.fromkeys(problems):
        known = {} if again else {k: e for k, e in tiles.table(device).items() if e.is_exact or not exact_only}
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


if __name__ == "__main__":
    sys.exit(main())
