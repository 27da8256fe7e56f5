"""The store through which ranks find each other: on one interface, under a token of the run.

Torch's TCPStore listens on every interface and knows no password. Here rank 0 binds the socket itself, to the address
of MASTER_ADDR alone, and keys lie under the token that ``optimus launch`` makes. SECURITY.md says what that protects.
Under torchrun the store is torchrun's own.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
from datetime import timedelta

import torch.distributed as dist

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.platform import environment
from megatron.optimus.platform.environment import Launcher, RankEnvironment

_HELLO = "world_size"

logger = logging.getLogger("optimus")


def make_store(launch: RankEnvironment, timeout: timedelta) -> dist.Store | None:
    """Connects to rank 0's store, which rank 0 starts.

    Args:
        launch: this process's rank and where rank 0 listens.
        timeout: limit of the connection and of later reads.

    Returns:
        The store; None where the agents of torchrun on several nodes have one.

    Raises:
        ConfigError: the store is of another run.
        OSError: MASTER_ADDR has no address, or its port is taken.
        torch.distributed.DistError: some ranks did not come.
    """
    if launch.launcher is Launcher.ALONE:
        return dist.HashStore()  # a single process needs no port, which another program could have taken meanwhile
    if environment.has_torchrun_store():
        attempt = environment.torchrun_attempt()
        if attempt is None:
            return None
        # On one node torchrun may keep its store over attempts, and with it the addresses of ranks that are gone.
        kept = dist.TCPStore(launch.master_addr, launch.master_port, timeout=timeout, wait_for_workers=False)
        return dist.PrefixStore(f"attempt-{attempt}", kept)
    token = environment.rendezvous_token()
    listener = _listen(launch, token) if launch.rank == 0 else None
    store: dist.Store = dist.TCPStore(
        launch.master_addr,
        launch.master_port,
        launch.world_size,
        launch.rank == 0,
        timeout,
        master_listen_fd=None if listener is None else listener.detach(),  # the store closes it
    )
    if token is not None:
        store = dist.PrefixStore(token, store)
    if launch.rank == 0:
        store.set(_HELLO, str(launch.world_size))
    _check_same_run(store, launch, timeout)
    return store


def _check_same_run(store: dist.Store, launch: RankEnvironment, timeout: timedelta) -> None:
    place = f"{launch.master_addr}:{launch.master_port}"
    try:
        store.wait([_HELLO], timeout)
        found = store.get(_HELLO)
    except dist.DistError as error:
        raise ConfigError(
            f"the store at {place} does not know this run: another program listens there, or ranks have different "
            f"values of {environment.RENDEZVOUS_TOKEN}; set another MASTER_PORT, and the same token on all ranks"
        ) from error
    if found != str(launch.world_size).encode():
        raise ConfigError(
            f"the store at {place} is of a run of {found[:20]!r} ranks, this one has {launch.world_size}; "
            "set another MASTER_PORT"
        )


def stays_on_this_machine(launch: RankEnvironment) -> bool:
    """Whether all ranks are on this machine: the launcher says so, or MASTER_ADDR is the loopback address."""
    if launch.is_one_machine or launch.master_addr == "localhost":
        return True
    try:
        return ipaddress.ip_address(launch.master_addr).is_loopback
    except ValueError:  # a host name
        return False


def use_loopback_interface() -> None:
    """Lets gloo and NCCL listen on the loopback interface, unless the user has named another."""
    names = {name for _, name in socket.if_nameindex()}
    for name in ("lo", "lo0"):
        if name in names:
            environment.set_default("GLOO_SOCKET_IFNAME", name)
            environment.set_default("NCCL_SOCKET_IFNAME", f"={name}")  # without = it would be a prefix


def _listen(launch: RankEnvironment, token: str | None) -> socket.socket | None:
    """Opens the port on the address of MASTER_ADDR; None where the store must listen on every interface."""
    is_local = stays_on_this_machine(launch)
    found = socket.getaddrinfo(launch.master_addr, launch.master_port, type=socket.SOCK_STREAM)
    addresses = sorted({(family, address) for family, _, _, _, address in found}, key=lambda each: each[0].value)
    loopback = [each for each in addresses if ipaddress.ip_address(str(each[1][0]).partition("%")[0]).is_loopback]
    # /etc/hosts often gives a machine's own name a loopback address, at which other nodes would not find it.
    others = [each for each in addresses if each not in loopback]
    for family, address in (loopback or others) if is_local else others:
        listener = socket.socket(family, socket.SOCK_STREAM)
        with contextlib.ExitStack() as on_error:
            on_error.callback(listener.close)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart finds connections that linger
            try:
                listener.bind(address)
                listener.listen(4096)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                continue
            on_error.pop_all()
        if not is_local and token is None:
            logger.warning(
                "rank 0 listens on %s:%d without a token: whoever reaches that port can disturb the run; start it with "
                "`optimus launch`, or export one value of %s to all ranks",
                address[0],
                launch.master_port,
                environment.RENDEZVOUS_TOKEN,
            )
        return listener
    logger.warning(
        "MASTER_ADDR=%s is no address of an interface of this machine: rank 0 listens on all of them; name one that is",
        launch.master_addr,
    )
    return None
