"""What the commands that load a model for inference share: its options, the ranks, and the errors of users."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.config.choices import Device, DistributedBackend, TokenizerType
from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.schema import ConfigError, ParallelConfig
from megatron.optimus.data.errors import DataError
from megatron.optimus.inference.load import TextModel, load_text_model
from megatron.optimus.platform import device as devices
from megatron.optimus.platform import environment, process_groups
from megatron.optimus.platform.environment import RankEnvironment
from megatron.optimus.platform.hub import local_folder
from megatron.optimus.platform.log import print_error
from megatron.optimus.platform.progress import StderrHandler
from megatron.optimus.platform.ranks import REPORTED_BY_ANOTHER_RANK, Ranks

USER_ERRORS = (ConfigError, DataError, CheckpointError)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_model_options(parser: Parser, batch_size: int = 8) -> None:
    """Adds the options that ``load_model`` and ``run_on_ranks`` read, with this default of --batch-size."""
    text = f"prompts at a time; default: {batch_size}"
    parser.add_argument("--batch-size", type=whole_number(), default=batch_size, help=text)
    parser.add_argument("--dtype", choices=tuple(_DTYPES), help="dtype of the weights; default: as trained or stored")
    text = "file or folder of the tokenizer; default: the checkpoint's"
    parser.add_argument("--tokenizer-model", "--tokenizer", metavar="PATH", help=text)
    parser.add_enum("--tokenizer-type", members=TokenizerType, help="default: the checkpoint's")
    for kind in ("tensor", "expert"):
        text = f"ranks over which {'matrices' if kind == 'tensor' else 'experts'} are split; default: 1"
        parser.add_argument(f"--{kind}-model-parallel-size", type=whole_number(), default=1, help=text)
    parser.add_enum("--device", members=Device, default=Device.AUTO, help="default: auto")
    backend = DistributedBackend.AUTO
    parser.add_enum("--distributed-backend", members=DistributedBackend, default=backend, help="default: auto")


def run_on_ranks(
    parser: Parser,
    argv: Sequence[str] | None,
    prepare: Callable[[argparse.Namespace], Callable[[RankEnvironment, Ranks], None]],
) -> int:
    """Runs a command on this rank.

    Args:
        parser: of its options.
        argv: its words; None takes those of this process.
        prepare: checks the options; what it returns is called when all ranks have met.

    Returns:
        0, 2 after one line that says what is wrong, or 1 if another rank has ended.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", handlers=[StderrHandler()])
    rank, met_others = 0, False
    try:
        launch = environment.detect()
        rank = launch.rank
        args = parser.parse(argv)
        work = prepare(args)
        met_others = True
        with _all_ranks(args, launch) as ranks:
            work(launch, ranks)
    except USER_ERRORS as error:
        if rank == 0:
            print_error(error)
        elif met_others and not getattr(error, REPORTED_BY_ANOTHER_RANK, False):
            print_error(error, f"error on rank {rank}")
        return 2
    except RuntimeError as error:
        if (reason := process_groups.lost_peer_reason(error)) is None:
            raise
        print_error(reason, f"error on rank {rank}")
        return 1
    return 0


@contextlib.contextmanager
def _all_ranks(args: argparse.Namespace, launch: RankEnvironment) -> Iterator[Ranks]:
    """Joins the process group, unless this process is alone; yields the ranks and leaves the group at the end."""
    device = devices.device_for_rank(args.device, launch.local_rank)
    devices.set_device(device)
    devices.set_cpu_threads(launch)
    if launch.world_size == 1:
        yield Ranks(None, device)
        return
    process_groups.init(launch, device, args.distributed_backend, timedelta(minutes=10))
    try:
        yield Ranks(None, device)
    except BaseException:
        process_groups.leave_after_error(process_groups.shutdown)
        raise
    process_groups.shutdown()


def load_model(args: argparse.Namespace, launch: RankEnvironment, ranks: Ranks) -> TextModel:
    """Loads the checkpoint that the options name. Collective; raises as ``load_text_model``."""
    parallel = ParallelConfig(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        device=args.device,
        distributed_backend=args.distributed_backend,
    )
    return load_text_model(
        args.checkpoint,
        parallel,
        ranks,
        local_world_size=launch.local_world_size,
        dtype=_DTYPES.get(args.dtype),
        tokenizer_type=args.tokenizer_type,
        tokenizer_model=None if args.tokenizer_model is None else str(local_folder(args.tokenizer_model)),
    )
