"""Set-up of the whole test suite."""

import setuptools  # noqa: F401  # before anything imports distutils: setuptools refuses to replace it later

# isort: split
import contextlib
import gc
import os
from typing import Any

import pytest
import torch

from tests.helpers import start_fork_server, use_fork_server

with contextlib.suppress(ImportError):  # whoever runs tests without it misses those that need it, not all
    from hypothesis import HealthCheck, settings

    # No test is timed: on a busy machine an example may take longer than hypothesis allows by itself.
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")

# Tests for GPUs that take longest, most of all those that start processes or compile dozens of kernels. Begun last they
# would run alone at the end.
LONGEST = ("tests/distributed/", "tests/ops/test_autotune.py", "tests/integration/")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All workers of pytest-xdist fork their ranks from one server: what it imports takes six seconds."""
    node.workerinput["fork_server"] = start_fork_server()


def pytest_configure(config: pytest.Config) -> None:
    """Each worker of pytest-xdist has a GPU of its own first, and sees the others for tests of several."""
    if address := getattr(config, "workerinput", {}).get("fork_server"):
        use_fork_server(address)
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), torch.cuda.device_count()
    if worker and count > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        first = int(worker.removeprefix("gw"))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((first + step) % count) for step in range(count))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr == "gpu":
        items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_collection_finish() -> None:
    """Whatever was imported and collected stays: no garbage collection of a test has to look through it again."""
    gc.collect()
    gc.freeze()
