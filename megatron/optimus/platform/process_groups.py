"""Joins and leaves torch.distributed's process group of all ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.optimus.config.schema import ConfigError, DistributedBackend
from megatron.optimus.platform import rendezvous
from megatron.optimus.platform.device import backend_for
from megatron.optimus.platform.environment import RankEnvironment
from megatron.optimus.platform.log import first_line

logger = logging.getLogger("optimus")


class RendezvousError(ConfigError):
    """The ranks could not meet. Started again they may: `optimus launch` chooses another port for each attempt."""


# torch 2.13 renamed these two and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def init(launch: RankEnvironment, device: torch.device, backend: DistributedBackend, timeout: timedelta) -> None:
    """Joins the process group of all ranks and returns when all of them have joined. Collective.

    Args:
        launch: this process's rank and where rank 0 listens.
        device: the device of this rank.
        backend: ``distributed_backend``; AUTO chooses by device.
        timeout: limit of the rendezvous and of every later collective.

    Raises:
        RendezvousError: where rank 0 cannot listen or some ranks do not join.
        ConfigError: where the device or the store is not of this run.
    """
    if dist.is_initialized():
        raise RuntimeError("torch.distributed is already initialised; call shutdown() first")
    address = f"[{launch.master_addr}]" if ":" in launch.master_addr else launch.master_addr  # IPv6
    chosen = backend_for(device, backend)
    if rendezvous.stays_on_this_machine(launch):
        rendezvous.use_loopback_interface()
    try:
        store = rendezvous.make_store(launch, timeout)
        dist.init_process_group(
            chosen,
            init_method=f"tcp://{address}:{launch.master_port}" if store is None else None,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            # No device_id: with one, NCCL makes every group by splitting the group of all ranks, so all ranks would
            # have to take part in making each group. Without, a group connects at its first use, members only.
            timeout=timeout,
        )
    except (dist.DistError, OSError) as error:
        place = f"{launch.master_addr}:{launch.master_port}"
        raise RendezvousError(
            f"rank {launch.rank} of {launch.world_size} ({launch.launcher.value}) could not meet the others at "
            f"{place} within {timeout.total_seconds():.0f} s: {first_line(error)}. Check that all ranks were "
            "started, that MASTER_ADDR is rank 0's host, and that MASTER_PORT is free there (set another one)"
        ) from error


# What gloo and NCCL say where the process at the other end is gone.
_GONE = ("Connection reset by peer", "Connection closed by peer", "Broken pipe", "remote process exited")
# What they say where it does not answer any more, by the option distributed_timeout_minutes.
_TIMED_OUT = ("Timed out waiting", "timed out", "Watchdog caught collective operation timeout")


def lost_peer_reason(error: RuntimeError) -> str | None:
    """Returns what a collective's error says of another rank, which has ended or hangs; None for other errors."""
    text = str(error)
    if "gloo" not in text and not isinstance(error, dist.DistError):
        return None
    if reason := next((reason for reason in _GONE if reason in text), None):
        return f"another rank has ended ({reason}); that rank or the launcher says why"
    if any(words in text for words in _TIMED_OUT):
        return (
            "another rank did not take part in a collective within distributed_timeout_minutes; it hangs, was stopped, "
            "or its node is gone (py-spy dump --pid shows where a rank is)"
        )
    return None


def shutdown() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def leave_after_error(leave: Callable[[], None], seconds: float = 5.0) -> None:
    """Calls ``leave``, which destroys process groups, and returns when it is done, or after ``seconds``.

    A collective that waits for a rank that will not come holds the destruction of its group up to the collective's own
    time-out, which is minutes or hours. The thread that waits is then left behind; the process can still end.
    """

    def try_to_leave() -> None:
        try:
            leave()
        except Exception as error:  # the error that ends the run is the one to report
            logger.warning("the process groups could not be destroyed: %s", error)

    thread = threading.Thread(target=try_to_leave, name="leave process groups", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        logger.warning("a pending collective keeps a process group alive; not waiting for it after %.0f s", seconds)
