"""Joining and leaving the process group: one process, several, and the ways it fails."""

import dataclasses
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.optimus import pretrain
from megatron.optimus.config.schema import ConfigError, DistributedBackend
from megatron.optimus.platform import environment
from megatron.optimus.platform.environment import Launcher, RankEnvironment, detect, free_port
from megatron.optimus.platform.process_groups import init, lost_peer_reason, shutdown

CPU = torch.device("cpu")
MINUTE = timedelta(minutes=1)


@pytest.fixture(autouse=True)
def leave() -> Iterator[None]:
    yield
    shutdown()


def test_one_process() -> None:
    init(detect({}), CPU, DistributedBackend.AUTO, MINUTE)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    total = torch.tensor([3.0])
    dist.all_reduce(total)
    assert total.item() == 3.0
    with pytest.raises(RuntimeError, match="already"):
        init(detect({}), CPU, DistributedBackend.AUTO, MINUTE)
    shutdown()
    assert not dist.is_initialized()
    shutdown()  # a second time does nothing
    init(detect({}), CPU, DistributedBackend.AUTO, MINUTE)  # and another start works


def test_ranks_that_torchrun_starts_again_meet_at_once(tmp_path: Path) -> None:
    """torchrun --nproc-per-node keeps its store, in which the addresses of the attempt before still are."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import os, sys, torch, torch.distributed as dist
        from datetime import timedelta
        from megatron.optimus.config.schema import DistributedBackend
        from megatron.optimus.platform import environment, process_groups
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        open(f"{sys.argv[1]}/attempt-{attempt}", "w").close()
        launch = environment.detect(os.environ)
        process_groups.init(launch, torch.device("cpu"), DistributedBackend.AUTO, timedelta(seconds=60))
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 3
        dist.barrier()
        os._exit(1 if attempt < 2 else 0)
    """)
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--max-restarts", "5"]
    torchrun += ["--monitor-interval", "0.1", "--master-port", str(free_port())]
    env = environment.current() | environment.import_path()
    done = subprocess.run(
        [*torchrun, program, tmp_path], capture_output=True, text=True, timeout=100, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list(tmp_path.glob("attempt-*"))) == 3, done.stderr[-2000:]


def test_a_rank_that_is_gone_is_told_from_other_errors() -> None:
    program = textwrap.dedent("""
        import os, sys, torch, torch.distributed as dist
        from datetime import timedelta
        from megatron.optimus.config.schema import DistributedBackend
        from megatron.optimus.platform import process_groups
        from megatron.optimus.platform.environment import RankEnvironment, Launcher
        from megatron.optimus.platform.process_exit import exit_process
        rank = int(sys.argv[1])
        launch = RankEnvironment(rank, 2, rank, 2, "127.0.0.1", int(sys.argv[2]), Launcher.MPI)
        process_groups.init(launch, torch.device("cpu"), DistributedBackend.AUTO, timedelta(seconds=60))
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            os._exit(0)
        try:
            for _ in range(1000):
                dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            print(error)
            exit_process(0 if process_groups.lost_peer_reason(error) else 1)
    """)
    port, root = str(free_port()), Path(__file__).parents[3]
    ranks = [subprocess.Popen([sys.executable, "-c", program, str(rank), port], cwd=root) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert lost_peer_reason(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert lost_peer_reason(RuntimeError("a pipe of its own: Broken pipe")) is None


def test_two_processes_without_torchrun() -> None:
    program = textwrap.dedent("""
        import sys, torch, torch.distributed as dist
        from datetime import timedelta
        from megatron.optimus.config.schema import DistributedBackend
        from megatron.optimus.platform import process_groups
        from megatron.optimus.platform.environment import RankEnvironment, Launcher
        from megatron.optimus.platform.process_exit import exit_process
        rank = int(sys.argv[1])
        launch = RankEnvironment(rank, 2, rank, 2, "127.0.0.1", int(sys.argv[2]), Launcher.MPI)
        process_groups.init(launch, torch.device("cpu"), DistributedBackend.AUTO, timedelta(seconds=60))
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        process_groups.shutdown()
        exit_process(0 if total.item() == 3.0 else 3)
    """)
    port = str(free_port())
    root = Path(__file__).parents[3]
    ranks = [subprocess.Popen([sys.executable, "-c", program, str(rank), port], cwd=root) for rank in range(2)]
    try:
        assert [rank.wait(timeout=90) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


def test_ranks_that_do_not_come() -> None:
    launch = RankEnvironment(0, 2, 0, 2, "127.0.0.1", free_port(), Launcher.SLURM)
    with pytest.raises(ConfigError) as info:
        init(launch, CPU, DistributedBackend.AUTO, timedelta(seconds=1))
    for part in ("rank 0 of 2 (slurm)", f"127.0.0.1:{launch.master_port}", "within 1 s", "all ranks were started"):
        assert part in str(info.value)


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        launch = RankEnvironment(0, 1, 0, 1, "127.0.0.1", taken.getsockname()[1], Launcher.TORCHRUN)
        with pytest.raises(ConfigError, match=r"MASTER_PORT is free") as info:
            init(launch, CPU, DistributedBackend.AUTO, timedelta(seconds=2))
        assert pretrain._exit_code(info.value) == 1  # a launcher starts it again, with another port
        assert pretrain._exit_code(ConfigError("lr=-1")) == 2
        init(dataclasses.replace(launch, launcher=Launcher.ALONE), CPU, DistributedBackend.AUTO, MINUTE)  # meets nobody
        shutdown()


def test_a_backend_that_does_not_serve_the_device() -> None:
    with pytest.raises(ConfigError, match="use gloo or auto"):
        init(detect({}), CPU, DistributedBackend.NCCL, MINUTE)
