"""Process groups of the optimizer, attributes that mark expert parameters, start and end of torch.distributed."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

_EP_NAME = re.compile(r"ep_size_([1-9][0-9]*)")


@dataclass(frozen=True)
class ZeroGroups:
    """The groups over which gradients are summed and optimizer states are sharded.

    A parameter that tensor parallelism splits has the attribute ``tensor_model_parallel = True``; any other is taken to
    be the same on all ranks of ``tensor``.

    Attributes:
        dense: all data-parallel ranks.
        expert: by group name ("ep_size_N"), the ranks that hold the same experts (expert data parallel), a subset of
            ``dense``. None: only this rank holds its experts.
        model: the ranks that together hold one copy of a model split by tensor and pipeline parallelism; the gradient
            norm is summed over them too.
        tensor: the ranks of ``model`` that split the same layers.
        matrices: for optimizers of whole matrices (Muon), by expert group name or None for dense parameters, the ranks
            that together hold all parts of the matrices that are cut: the group over which they are sharded times the
            ranks that cut them, these one after the other.
        expert_tensor: the ranks that split the same experts, each marked with Megatron's ``partition_dim``; None: those
            of ``tensor``. Only optimizers with sums over whole tensors ask.
    """

    dense: dist.ProcessGroup
    expert: dict[str, dist.ProcessGroup | None]
    model: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    matrices: dict[str | None, dist.ProcessGroup | None] = field(default_factory=dict)
    expert_tensor: dist.ProcessGroup | None = None

    def of(self, expert_group: str | None) -> dist.ProcessGroup | None:
        """Returns the group of expert parameters by their group name, or ``dense`` for None."""
        return self.dense if expert_group is None else self.expert[expert_group]

    def check(self) -> None:
        """Raises ValueError unless ``dense`` x ``model`` are all ranks. Without communication."""
        dense, model = len(ranks_of(self.dense)), len(ranks_of(self.model))
        if dense * model != dist.get_world_size():
            raise ValueError(
                f"the dense group has {dense} ranks and the model group {model}, of {dist.get_world_size()}; their "
                "product must be all ranks: pass ZeroGroups(model=...), the tensor- and pipeline-parallel ranks that "
                "hold one copy of the model, over which the gradient norm is summed as well"
            )

    @property
    def is_first_tensor_rank(self) -> bool:
        """Whether this rank adds to the norm the parameters that are the same on all ranks of ``tensor``."""
        return self.tensor is None or dist.get_rank(self.tensor) == 0


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Returns the global ranks of a group; for None this rank alone, where torch would mean all ranks."""
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def world_group() -> dist.ProcessGroup:
    """Returns the group of all ranks. Raises RuntimeError before torch.distributed is initialised."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("torch.distributed is not initialised; call deepspeed_ext.init_distributed() first")
    return world


def expert_group_name(param: torch.nn.Parameter) -> str | None:
    """Reads the expert group of a parameter from DeepSpeed's attributes; None for a dense parameter.

    Raises:
        ValueError: the parameter has ``allreduce=False`` and no ``group_name``.
    """
    if getattr(param, "allreduce", True):
        return None
    name = getattr(param, "group_name", None)
    if name is None:
        raise ValueError("an expert parameter (allreduce=False) needs group_name='ep_size_N'")
    return str(name)


def mark_experts(model: torch.nn.Module, is_expert: Callable[[str], str | None]) -> int:
    """Sets DeepSpeed's attributes ``allreduce`` and ``group_name`` on the expert parameters of a model.

    Args:
        model: its parameters get the attributes.
        is_expert: returns the expert group of a parameter's name, or None.

    Returns:
        The number of expert parameters.

    Raises:
        ValueError: ``is_expert`` is no function, returns anything but a name or None, or returns different groups for
            two names of one parameter (tied weights).
    """
    if not callable(is_expert):
        raise ValueError(f"is_expert={is_expert!r} must be a function of a parameter's name")
    group_of: dict[torch.nn.Parameter, tuple[str, str | None]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        group_name = is_expert(name)
        if not isinstance(group_name, str | None):
            raise ValueError(f"is_expert({name!r}) returned {group_name!r}; return a name such as 'ep_size_1', or None")
        other, first = group_of.setdefault(param, (name, group_name))
        if first != group_name:
            raise ValueError(
                f"is_expert returned {first!r} for {other!r} and {group_name!r} for {name!r}, which are one parameter; "
                "a tied weight belongs to one group"
            )
        if group_name is not None:
            param.allreduce = False  # type: ignore[attr-defined]
            param.group_name = group_name  # type: ignore[attr-defined]
    return sum(group_name is not None for _, group_name in group_of.values())


def build_groups(expert_groups: Iterable[str]) -> ZeroGroups:
    """Builds process groups for expert groups "ep_size_N": N consecutive ranks share the experts (EP), ranks with
    stride N hold copies (EDP). Collective over all ranks.

    Args:
        expert_groups: names "ep_size_N", the same on every rank.

    Raises:
        ValueError: another form of name, or an N that does not divide the number of ranks; before any communication.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes: dict[str, int] = {}
    for name in set(expert_groups):
        match = _EP_NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"expert group {name!r} must be named 'ep_size_N', or be passed in groups=ZeroGroups(...)")
        sizes[name] = int(match.group(1))
        if world % sizes[name]:
            divisors = [n for n in range(1, world + 1) if world % n == 0]
            raise ValueError(
                f"expert parallel size {sizes[name]} (group {name!r}) must divide the {world} data-parallel ranks; "
                f"use one of {divisors}"
            )
    expert: dict[str, dist.ProcessGroup | None] = {}
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        for first in range(size):
            # new_group is collective over the world: every rank calls it for every subgroup, in the same order.
            group = world_group() if size == 1 else _new_group(range(first, world, size))
            if rank % size == first:
                expert[name] = group
    return ZeroGroups(dense=world_group(), expert=expert)


def _new_group(ranks: range) -> dist.ProcessGroup | None:
    return None if len(ranks) == 1 else dist.new_group(ranks)


def init_distributed(
    dist_backend: str | None = None, *, local_rank: int | None = None, timeout: timedelta | None = None, **kwargs: Any
) -> None:
    """Initialises torch.distributed, if it is not yet, and deepspeed.comm from the launcher's environment variables.

    A process without a launcher becomes a world of one rank. A second call does nothing.

    Args:
        dist_backend: of torch.distributed; None: the accelerator's.
        local_rank: sets LOCAL_RANK if the launcher has not.
        timeout: of collectives.
        kwargs: passed on to ``deepspeed.init_distributed``.
    """
    import deepspeed
    import deepspeed.comm

    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    launched = any(name in os.environ for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"))
    if not dist.is_initialized() and not launched and "init_method" not in kwargs:
        backend = dist_backend or deepspeed.get_accelerator().communication_backend_name()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.is_initialized() and dist.get_world_size() == 1:
        os.environ.setdefault("LOCAL_RANK", "0")
    if not deepspeed.comm.is_initialized():
        backend = dist_backend or (dist.get_backend() if dist.is_initialized() else None)
        if timeout is not None:
            kwargs["timeout"] = timeout
        # DeepSpeed's CPU backend would compile a shared-memory all-reduce for inference and fail without a compiler.
        # The dict is made by its first reader, who runs a compiler for seconds: not here, in every rank.
        probed = vars(deepspeed.ops).get("__compatible_ops__")
        deepspeed.ops.__compatible_ops__ = {**(probed or {}), "deepspeed_shm_comm": False}
        try:
            with _without_own_ccl():
                deepspeed.comm.init_distributed(dist_backend=backend, **kwargs)
        finally:
            if probed is None:
                del deepspeed.ops.__compatible_ops__


@contextlib.contextmanager
def _without_own_ccl() -> Iterator[None]:
    """Lets DeepSpeed use a process group that exists. Where oneCCL's bindings are installed it would compile an
    extension for oneCCL and open a second communicator, also beside a group of gloo."""
    import deepspeed

    accelerator = deepspeed.get_accelerator()
    if not dist.is_initialized() or accelerator.communication_backend_name() != "ccl":
        yield
        return
    accelerator._communication_backend_name = "gloo"  # for which DeepSpeed has nothing of its own
    try:
        yield
    finally:
        accelerator._communication_backend_name = dist.get_backend()


def shutdown() -> None:
    """Destroys all process groups and DeepSpeed's references to them.

    A process that exits with live gloo groups sometimes aborts in a destructor: call this at the end of a program, or
    use ``run_program``.
    """
    import deepspeed.comm

    if not dist.is_initialized():
        return
    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    else:
        dist.destroy_process_group()


def run_program(main: Callable[[], object]) -> NoReturn:
    """Calls ``main``, destroys the process groups and ends the process with the right exit code.

    The exit code is 0, that of ``sys.exit``, or 1 after the traceback of an error. After a failed or pending collective
    gloo's threads can abort a process whose interpreter finalizes, and SIGABRT would replace the exit code. Therefore
    this runs the exit handlers (``atexit``, for at most 60 seconds), flushes stdout and stderr and ends by
    ``os._exit``. After an error the groups are not destroyed, since that would wait for pending collectives.

    Args:
        main: the program.
    """
    code = 1
    try:
        main()
        shutdown()
        code = 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code = error.code or 0
        else:
            sys.stderr.write(f"{error.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            limit = threading.Timer(60.0, os._exit, (code & 0xFF,))
            limit.daemon = True
            limit.start()
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
        finally:
            os._exit(code & 0xFF)
