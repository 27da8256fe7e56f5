"""Bad nodes: the evidence against them, who replaces them, and that they stay away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.optimus.launcher.nodes import FILE_NAME, NodePool, lost_hosts, silent_hosts
from megatron.optimus.platform import files

HOSTS = [f"x{number}.a.b" for number in range(8)]


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        ("x2.hsn.site: shepherd died from signal 9", ["x2.a.b"]),
        ("ping failed on x1: No reply from x3.hsn.site", ["x3.a.b"]),
        ("srun: error: Node failure on x1", ["x1.a.b"]),
        ("values that are not finite came first on rank 5 of node x5.other (in layers.3)", ["x5.a.b"]),
        ("rank 2413 died from signal 11", []),  # often the victim of another node
        ("x77.hsn.site: shepherd died from signal 9", []),  # not one of ours
    ],
)
def test_nodes_named_as_lost(line: str, lost: list[str]) -> None:
    assert lost_hosts(["step=1", line], HOSTS) == lost


def test_the_node_that_was_silent() -> None:
    assert silent_hosts({0, 1, 2, 3, 5, 6, 7}, HOSTS) == ["x4.a.b"]
    assert silent_hosts({0, 1}, HOSTS) == []  # the others were stopped before they could say anything
    assert silent_hosts(set(range(8)), HOSTS) == []
    assert silent_hosts({0}, HOSTS[:2]) == []  # who is the victim, of two?


def test_lost_nodes_leave_for_good_and_for_later_jobs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = tmp_path / "run" / FILE_NAME
    nodes = NodePool(HOSTS, 6, 2, record)
    assert "lost nodes: x2.a.b" in nodes.after_failure(["x2: shepherd died from signal 9"], ())
    assert nodes.hosts == ["x0.a.b", "x1.a.b", "x6.a.b", "x3.a.b", "x4.a.b", "x5.a.b"] and nodes.spares == ["x7.a.b"]
    survivors = {rank for rank in range(12) if rank // 2 != 4}  # of two ranks a node
    assert "silent when the others lost a peer" in nodes.after_failure([], survivors)
    assert nodes.hosts[4] == "x7.a.b" and nodes.spares == []
    later = NodePool([host.replace(".a.b", ".c") for host in HOSTS], 6, 2, record)  # the same nodes by another network
    assert later.hosts == ["x0.c", "x1.c", "x3.c", "x5.c", "x6.c", "x7.c"] and later.spares == []
    assert "not used: x2.c, x4.c" in caplog.text
    few = NodePool(HOSTS[:5], 5, 2, record)
    assert sorted(few.hosts) == HOSTS[:5] and "used all the same" in caplog.text


def test_a_check_finds_the_one_bad_node_of_eight_at_the_first_failure() -> None:
    asked: list[list[str]] = []

    def check(hosts: object) -> dict[str, str]:
        asked.append(list(hosts))  # type: ignore[call-overload]
        return {"x5.a.b": "wrong products"}

    nodes = NodePool([*HOSTS, "x8.a.b"], 8, 1, check=check)
    assert nodes.after_failure([], ()) == "lost nodes: x5.a.b (check: wrong products)"
    assert nodes.hosts[5] == "x8.a.b" and "x5.a.b" not in nodes.spares
    assert asked == [[*HOSTS, "x8.a.b"]]


def test_without_evidence_nodes_stay_once_and_suspects_do_not_come_back() -> None:
    nodes = NodePool([*HOSTS, "x8.a.b", "x9.a.b"], 8, 1)
    assert nodes.after_failure([], ()) == "no node was named: the nodes stay"
    assert nodes.hosts == HOSTS
    assert "x0.a.b is exchanged for x8.a.b on suspicion" in nodes.after_failure([], ())
    assert nodes.spares == ["x9.a.b"]
    nodes.after_failure([], ())
    assert nodes.hosts[:2] == ["x8.a.b", "x9.a.b"] and nodes.spares == []
    nodes.after_failure([], ())  # only now, as there is nothing else
    assert nodes.hosts[2] == "x0.a.b"
    nodes.after_progress()
    before = list(nodes.hosts)
    nodes.after_failure([], ())
    assert nodes.hosts == before


def test_what_agents_say_is_not_guessed_about(tmp_path: Path) -> None:
    """A node without its agent is lost. One where ranks fail twice in a row is exchanged, and no other in its place."""
    record = tmp_path / FILE_NAME
    nodes = NodePool([*HOSTS, "x8.a.b", "x9.a.b"], 8, 1, record)
    survivors = {rank for rank in range(8) if rank != 4}
    assert nodes.after_failure([], survivors, where="x1.a.b") == "on node x1.a.b; the nodes stay"  # x4 was only slower
    assert nodes.after_failure([], (), where="x2.a.b") == "on node x2.a.b; the nodes stay"
    assert nodes.after_failure([], (), where="x2.a.b") == (
        "again on node x2.a.b: x2.a.b is exchanged for x8.a.b on suspicion"
    )
    found = nodes.after_failure([], (), {"x5.a.b": "its agent is gone"})
    assert found == "lost nodes: x5.a.b (its agent is gone)" and '"x5"' in record.read_text()
    assert nodes.hosts[2] == "x8.a.b" and nodes.hosts[5] == "x9.a.b" and nodes.spares == []
    other = NodePool([*HOSTS, "x8.a.b", "x9.a.b"], 8, 1, record)  # of another coordinator
    other.restore(json.loads(json.dumps(nodes.state())))
    assert (other.hosts, other.spares, other.state()) == (nodes.hosts, [], nodes.state())


def test_a_damaged_list_of_bad_nodes_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE_NAME).write_text("[1")
    assert NodePool(HOSTS, 8, 1, tmp_path / FILE_NAME).hosts == HOSTS
    assert "cannot be read" in caplog.text


def test_with_fewer_nodes_than_asked_for_until_some_come_back(tmp_path: Path) -> None:
    """An attempt may use 2, 4 or 8 nodes; of those left out none is beside another that is gone."""
    record, listed = tmp_path / FILE_NAME, list(HOSTS)

    def fit(available: int) -> int:
        return max((size for size in (2, 4, 8) if size <= available), default=0)

    nodes = NodePool(HOSTS, 8, 1, record, fit=fit, listed=lambda: listed)
    assert not nodes.can_grow()
    found = nodes.after_failure(["x2: shepherd died from signal 9"], ())
    assert found == "lost nodes: x2.a.b (named as lost); it goes on with 4 of 8 nodes"
    assert nodes.hosts == ["x1.a.b", "x3.a.b", "x5.a.b", "x7.a.b"]
    assert nodes.spares == ["x4.a.b", "x6.a.b", "x0.a.b"] and not nodes.can_grow()
    nodes.after_failure(["x1: shepherd died from signal 9"], ())  # a spare takes its place
    assert nodes.hosts == ["x4.a.b", "x3.a.b", "x5.a.b", "x7.a.b"] and not nodes.can_grow()

    record.write_text(record.read_text().replace('"x1"', '"x9"'))  # x1 is repaired; seven of eight are not enough
    assert not nodes.can_grow()
    listed.append("x8.a.b")  # the job gets one more
    assert nodes.can_grow()
    nodes.grow()
    assert len(nodes.hosts) == 8 and {"x1.a.b", "x8.a.b"} <= set(nodes.hosts) and "x2.a.b" not in nodes.hosts
    assert not nodes.can_grow() and not nodes.is_smaller

    later = NodePool(HOSTS, 8, 1, record, fit=fit)  # another job: x2 is still bad, and the run begins smaller
    assert len(later.hosts) == 4 and "x2.a.b" not in [*later.hosts, *later.spares]
    for host in HOSTS[3:] + HOSTS[:1]:
        nodes.after_failure([f"{host}: shepherd died from signal 9"], ())
    assert nodes.problem == "" and sorted(nodes.hosts) == ["x1.a.b", "x8.a.b"]
    nodes.after_failure(["x1: shepherd died from signal 9"], ())
    assert nodes.problem == "1 good node left, too few for --min-nodes"


def test_a_list_of_bad_nodes_that_cannot_be_written_lets_none_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*words: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    record = tmp_path / FILE_NAME
    record.write_text("{}")
    nodes = NodePool(HOSTS[:4], 4, 1, record, fit=lambda count: count if count > 1 else 0)
    monkeypatch.setattr(files, "write_atomically", full)
    nodes.after_failure(["x2: shepherd died from signal 9"], ())
    assert nodes.hosts == ["x0.a.b", "x1.a.b", "x3.a.b"] and not nodes.can_grow()


def test_nodes_under_suspicion_are_used_before_the_run_stays_smaller(tmp_path: Path) -> None:
    nodes = NodePool(HOSTS[:4], 4, 1, tmp_path / FILE_NAME, fit=lambda count: 4 if count >= 4 else 2 * (count >= 2))
    nodes.after_failure(["x3: shepherd died from signal 9"], ())
    assert len(nodes.hosts) == 2 and len(nodes.spares) == 1
    for _ in range(2):
        nodes.after_failure([], ())  # nobody is named: one is exchanged
    assert len(nodes.hosts) == 2 and nodes.spares == [] and not nodes.can_grow()
    (tmp_path / FILE_NAME).unlink()
    assert nodes.can_grow()
    nodes.grow()
    assert sorted(nodes.hosts) == HOSTS[:4] and nodes.spares == []
