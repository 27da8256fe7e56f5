"""The training program: ``optimus pretrain --preset mula-tiny --data-path data/corpus_text_document ...``.

It runs as one process, under torchrun, or under mpiexec or srun. ``--help`` lists every option, ``--dry-run`` shows
what would run.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.optimus.platform import missing_packages, signals

if __name__ == "__main__":
    signals.end_on_sigint()
    sys.excepthook = missing_packages.excepthook

from megatron.optimus.checkpoint.errors import CheckpointError, SaveError
from megatron.optimus.config.checks import check, check_trainable
from megatron.optimus.config.choices import KernelLibrary
from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ConfigError, Device, RunConfig, TokenizerType
from megatron.optimus.config.serialize import to_dict
from megatron.optimus.config.tokenizer_files import settle_tokenizer_type
from megatron.optimus.context import DTYPES, RunContext
from megatron.optimus.data.dataset import check_contents
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.sources import read_sources
from megatron.optimus.data.tokenize.identity import TokenizerIdentity, check_same, read_identity
from megatron.optimus.data.tokenize.tokenizer import build_tokenizer
from megatron.optimus.describe import describe
from megatron.optimus.models.huggingface.architectures import export_notice
from megatron.optimus.models.huggingface.config import take_from_hf
from megatron.optimus.platform import device as devices
from megatron.optimus.platform import environment, exit_codes, heartbeat, log, older_stacks, process_groups, seeding
from megatron.optimus.platform.environment import RankEnvironment
from megatron.optimus.platform.hub import local_folder
from megatron.optimus.platform.memory import OutOfMemory, needs_memory
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.process_exit import run_program
from megatron.optimus.platform.ranks import FAILED_ERRNO, REPORTED_BY_ANOTHER_RANK, Ranks
from megatron.optimus.platform.startup import StartupClock
from megatron.optimus.training.health import IntegrityError, NumericError, TrainingError

if TYPE_CHECKING:
    import torch

    from megatron.optimus.inference.in_training import TasksInTraining

logger = logging.getLogger("optimus")
# Of a disk or file system, not of the user: full, broken, gone.
_STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV)
USER_ERRORS = (ConfigError, DataError, CheckpointError, TrainingError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns the exit code: 0; 2 for an error of the user's, which one line explains, as it does 3 for a disk's, 4 for
    one of the numbers and 5 for silent corruption (platform/exit_codes.py); 1 where another rank has ended or the ranks
    could not meet, which one line says too; 128 + n for signal n.
    """
    rank, met_others = 0, False
    try:
        launch = environment.detect()
        rank = launch.rank
        heartbeat.connect(rank)
        run = load(argv, take_from_hf=take_from_hf)
        if run.dry_run:
            if launch.rank == 0:
                sys.stdout.write(describe(run.config, launch.world_size, verbose=run.verbose))
            return 0
        check(run.config, launch.world_size)
        check_trainable(run.config)
        data = run.config.data
        if data.tokenizer_model is not None:
            data.tokenizer_model = str(local_folder(data.tokenizer_model))
        data.tokenizer_type, guess = settle_tokenizer_type(data.tokenizer_type, data.tokenizer_model)
        met_others = True
        return pretrain(run.config, launch, guess, verbose=run.verbose)
    except OutOfMemory as error:
        _report(error, rank, f"{error}{_what_fits(error, run.config, launch.world_size)}")
        return 2
    except USER_ERRORS as error:
        if rank == 0:
            log.print_error(error)
        elif met_others and not getattr(error, REPORTED_BY_ANOTHER_RANK, False):  # else another rank prints it
            log.print_error(error, f"error on rank {rank}")
        return _exit_code(error)
    except RuntimeError as error:
        if (reason := process_groups.lost_peer_reason(error)) is None:
            raise
        sys.stderr.write(f"error on rank {rank}: {reason}; the same command resumes from the newest checkpoint\n")
        return 1
    except KeyboardInterrupt:  # before the first step or after the last; in between the trainer saves and ends the run
        sys.stderr.write("interrupted\n" if rank == 0 else "")
        return 128 + signal.SIGINT


def _exit_code(error: BaseException) -> int:
    """The exit code of an error that one line explains: whether the launcher may start the run again."""
    if isinstance(error, IntegrityError):
        return exit_codes.INTEGRITY_ERROR
    if isinstance(error, NumericError):
        return exit_codes.NUMERIC_ERROR
    if isinstance(error, process_groups.RendezvousError):
        return 1
    number = getattr(error, FAILED_ERRNO, 0)
    # What an attempt before could read or write was no mistake of the user's.
    is_gone = number != 0 and isinstance(error, CheckpointError) and environment.is_restart()
    is_storage = isinstance(error, SaveError) or number in _STORAGE_ERRNOS or is_gone
    return exit_codes.STORAGE_ERROR if is_storage else exit_codes.USER_ERROR


def _report(error: BaseException, rank: int, text: str) -> None:
    """Prints one line on stderr, after the traceback if OPTIMUS_TRACEBACK asks for it."""
    if environment.shows_traceback():
        traceback.print_exception(error)
    sys.stderr.write(f"error: {text}\n" if rank == 0 else f"error on rank {rank}: {text}\n")


def _what_fits(error: OutOfMemory, config: RunConfig, world_size: int) -> str:
    """What would fit, as the planner says; empty where it cannot say anything."""
    from megatron.optimus.planner.hardware import machine_of_device
    from megatron.optimus.planner.what_fits import what_fits, with_memory

    is_host = error.device.type == "cpu"
    if is_host and config.parallel.device is not Device.CPU and devices.default_kind() != "cpu":
        return ""  # the planner counts the accelerator's memory
    try:
        machine = machine_of_device(devices.device_name(error.device), error.device.type)
        text = what_fits(config, world_size, with_memory(machine, error.total, is_host=is_host))
    except Exception:  # also where there is no memory left to plan with
        logger.debug("the planner failed", exc_info=True)
        return ""
    return f"; {text}" if text else ""


@needs_memory("the run")
def pretrain(config: RunConfig, launch: RankEnvironment, notice: str = "", *, verbose: bool = False) -> int:
    """Sets up this rank, trains or evaluates, and leaves the process group. Collective over all ranks.

    Args:
        config: the run.
        launch: this rank's place among the others.
        notice: the first line of the log; none if it is empty.
        verbose: whether details are logged.

    Returns the exit code of ``Trainer.fit``, or 0 after an evaluation.
    """
    log.setup(launch.rank, verbose=verbose)
    if notice:
        logger.info(notice)
    startup = StartupClock()
    if config.training.eval_task_names:
        environment.keep_hugging_face_offline(quiet=True)
    with startup.phase("imports", "importing DeepSpeed"):
        device = devices.device_for_rank(config.parallel.device, launch.local_rank)
        environment.export(launch, device.type)
        # DeepSpeed chooses its accelerator when it is imported, so the device must be known before.
        from megatron.optimus.training.checkpointing import fetch_from_mirror
        from megatron.optimus.training.engine import init_engine, shutdown_engine
        from megatron.optimus.training.evaluate import evaluate
        from megatron.optimus.training.trainer import Trainer

    _set_up_device(config, launch, device)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    with startup.phase("process_group", f"waiting until all {launch.world_size} ranks have joined"):
        process_groups.init(launch, device, config.parallel.distributed_backend, timeout)
        init_engine(timeout)
    try:
        # Each rank checks its share of the token files: an id beyond the vocabulary would fail in the midst of the run.
        ranks = Ranks(None, device)
        _check_same(config, ranks)
        with startup.phase("data", "checking that all token ids are in the vocabulary"):
            tokenizer = _check_tokenizer(config, launch, ranks)
            ranks.run_on_all_ranks(partial(_check_tokens, config, launch, tokenizer), "checking the tokens", DataError)
        ranks.run_on_all_ranks(lambda: _make_folders(config, launch), "making the folders of the run", ConfigError)
        fetch_from_mirror(config, ranks)
        mesh = Mesh(
            config.parallel,
            rank=launch.rank,
            world_size=launch.world_size,
            local_world_size=launch.local_world_size,
        )
        logger.info("%s on %s", mesh.describe(), devices.device_name(device))
        if export := export_notice(config.model):
            logger.info(export)
        identity = None if tokenizer is None else tokenizer.to_json()
        run = RunContext(config, mesh, device, ranks, startup, identity)
        if config.training.skip_train:
            evaluate(run)
            code = 0
        else:
            trainer = Trainer(run, _tasks(run))
            code = trainer.fit()
            trainer.close()
    except BaseException:
        process_groups.leave_after_error(shutdown_engine)
        raise
    shutdown_engine()
    return code


def _set_up_device(config: RunConfig, launch: RankEnvironment, device: torch.device) -> None:
    devices.set_device(device)
    older_stacks.load_ipex()
    devices.check_dtype(device, DTYPES[config.training.params_dtype])
    libraries = {"fused norms": config.training.norm_backend, "FusedAdam": config.optimizer.optimizer_backend}
    apex = [name for name, library in libraries.items() if library is KernelLibrary.APEX]
    logger.info("%s", devices.start_line(device, config.parallel.distributed_backend, apex))
    devices.set_cpu_threads(launch)
    devices.set_deterministic(config.training.deterministic)
    seeding.seed_all(config.training.seed)


def _tasks(run: RunContext) -> TasksInTraining | None:
    """The tasks of ``eval_tasks``, if there are any."""
    if not run.config.training.eval_task_names:
        return None
    from megatron.optimus.inference.in_training import TasksInTraining  # lm_eval, which takes seconds

    with run.startup.phase("tasks", "loading the tasks of lm-eval's harness"):
        return TasksInTraining(run)


def _check_same(config: RunConfig, ranks: Ranks) -> None:
    """Raises ConfigError on every rank unless all ranks have the same options. Collective.

    They differ where a file was edited while ranks read it, or where the command line contains the time.
    """
    own = to_dict(config)
    first = json.loads(ranks.broadcast_bytes(json.dumps(own).encode()))

    def compare() -> None:
        others = [
            f"{section}.{name}={value!r}, rank 0 has {first[section][name]!r}"
            for section, options in own.items()
            for name, value in options.items()
            if value != first[section][name]
        ]
        if others:
            raise ConfigError("; ".join(others) + "; start all ranks with the same command line and --config")

    ranks.run_on_all_ranks(compare, "comparing the options of all ranks", ConfigError)


def _token_files(config: RunConfig, launch: RankEnvironment) -> list[str]:
    """Prefixes of this rank's share of all token files."""
    data = config.data
    further = (prefix for prefixes in (data.valid_sets | data.test_sets).values() for prefix in prefixes)
    return list(dict.fromkeys([*read_sources(data).prefixes, *further]))[launch.rank :: launch.world_size]


def _check_tokenizer(config: RunConfig, launch: RankEnvironment, ranks: Ranks) -> TokenizerIdentity | None:
    """Compares the run's tokenizer with those that made its token files. Collective.

    Returns the run's tokenizer, else that of the files, if they say so. Raises DataError on every rank where they
    differ.
    """
    data = config.data
    is_named = data.tokenizer_model is not None or data.tokenizer_type is TokenizerType.BYTE

    def read() -> list[Any]:
        """The run's, which rank 0 reads, and those of this rank's files, as JSON."""
        kind = data.tokenizer_type or TokenizerType.HF
        own = TokenizerIdentity.of(kind, data.tokenizer_model) if is_named and launch.rank == 0 else None
        found = [(prefix, read_identity(prefix)) for prefix in _token_files(config, launch)]
        return [own and own.to_json(), [(prefix, one and one.to_json()) for prefix, one in found]]

    sent = ranks.run_on_all_ranks(read, "reading which tokenizer made the data", DataError)
    parts = [json.loads(part) for part in ranks.all_gather_bytes(json.dumps(sent).encode())]
    own = None if parts[0][0] is None else TokenizerIdentity(**parts[0][0])
    found = [(prefix, None if one is None else TokenizerIdentity(**one)) for _, part in parts for prefix, one in part]
    with ranks.failing_alike():
        warning = check_same(own, found)
    if warning and launch.rank == 0:
        logger.warning(warning)
    vocab_size = config.model.vocab_size
    if own is not None and own.vocab_size > vocab_size and launch.rank == 0:
        logger.warning(
            "the tokenizer has ids up to %d, beyond vocab_size=%d of the model", own.vocab_size - 1, vocab_size
        )
    return own or next((one for _, one in found if one is not None), None)


def _check_tokens(config: RunConfig, launch: RankEnvironment, tokenizer: TokenizerIdentity | None) -> None:
    """Raises DataError for a token id of this rank's share of the files that model or tokenizer do not have."""
    data, limit = config.data, config.model.vocab_size
    eod_id = build_tokenizer(data.tokenizer_type, data.tokenizer_model).eod_id if data.needs_eod else None
    vocab_size = limit if tokenizer is None else min(limit, tokenizer.vocab_size)
    try:
        check_contents(_token_files(config, launch), vocab_size, eod_id=eod_id)
    except DataError as error:
        if vocab_size == limit or "outside the vocabulary" not in str(error):
            raise
        raise DataError(f"{error}. The vocabulary is that of the tokenizer {tokenizer}") from error


def _make_folders(config: RunConfig, launch: RankEnvironment) -> None:
    """Makes the folders that this rank writes to, before the model is built rather than at the first save.

    Raises ConfigError where this rank cannot write.
    """
    folders = {"save_local_dir": config.checkpoint.save_local_dir}
    if launch.rank == 0:
        folders |= {"run_dir": config.logging.run_dir, "tensorboard_dir": config.logging.tensorboard_dir}
    for name, folder in folders.items():
        if folder is None:
            continue
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise ConfigError(f"{name}={folder!r}: {error.strerror}; name a folder that can be written") from error


if __name__ == "__main__":
    signals.raise_on_sigint()
    run_program(main)
