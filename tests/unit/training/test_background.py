"""Work for a service in a thread: in its order, never in the way of a run, and errors are told once."""

from __future__ import annotations

import threading

import pytest

from megatron.optimus.training.background import Background


def test_everything_is_done_in_its_order() -> None:
    done: list[int] = []
    worker = Background("tracker")
    for number in range(50):
        worker.put(lambda number=number: done.append(number))
    assert worker.close(20) and done == list(range(50))


def test_errors_are_told_once_and_the_rest_is_done(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    worker = Background("tracker")
    worker.put(lambda: 1 / 0)
    worker.put(lambda: {}["key"])
    worker.put(lambda: done.append(1))
    assert worker.close(20) and done == [1]
    assert [record.getMessage() for record in caplog.records] == ["tracker: division by zero; training goes on"]


def test_a_service_out_of_reach_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    begun, go_on = threading.Event(), threading.Event()
    worker = Background("tracker", most_waiting=2)
    worker.put(lambda: (begun.set(), go_on.wait(20), done.append(0))[2])
    assert begun.wait(20)
    for number in range(1, 5):
        worker.put(lambda number=number: done.append(number))
    assert not worker.close(0.05)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "tracker does not keep up: more than 2 items wait, further ones are dropped",
        "tracker has not ended within 0.05 s: the rest of its work is lost",
    ]
    go_on.set()
    assert worker.close(20) and done == [0, 1, 2]
