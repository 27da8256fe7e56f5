"""What a run says about time is true where the host runs ahead of the device: measured on an imitated one.

Host and device have a clock each. What is queued begins when the device is done with what was queued before, the host
goes on; only a wait for the device moves its clock there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerAction

from megatron.optimus.config.costs import flops_per_token
from megatron.optimus.config.duration import batch_sizes
from megatron.optimus.config.load import load
from megatron.optimus.context import RunContext
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.metrics import Recorder
from megatron.optimus.platform.ranks import Ranks
from megatron.optimus.training import profiling
from megatron.optimus.training import trainer as training
from megatron.optimus.training.drill import DrillFaults
from megatron.optimus.training.evaluate import SetLoss
from megatron.optimus.training.health import Health
from megatron.optimus.training.integrity import Integrity
from megatron.optimus.training.lr_schedule import RateSchedule
from megatron.optimus.training.metrics import read_metrics
from megatron.optimus.training.noise_scale import GradientNoiseScale
from megatron.optimus.training.nonfinite import NonFiniteSource
from megatron.optimus.training.rollback import Rollbacks
from megatron.optimus.training.timing import StepClock
from megatron.optimus.training.trainer import StepResult, Trainer

TOKENS = 4 * 64  # of a step
OPTIONS = "--preset mula-tiny --device cpu --global-batch-size 4 --micro-batch-size 4 --seq-length 64".split()
OPTIONS += ["--device-peak-tflops", "2"]
RESULT = StepResult({"loss": 3.0}, 1.0, skipped=False, expert_load_LE=[[1, 1]], stop_requested=False)


class Machine:
    """Seconds on both clocks. ``room``: of queued work, beyond which the host waits to queue more."""

    def __init__(self, room: float = 1e9) -> None:
        self.host = self.device = 100.0
        self.room = room
        self.waits: list[tuple[float, float]] = []  # from, to, on the host's clock

    def queue(self, launch: float, work: float) -> None:
        self.host += launch
        self.device = max(self.host, self.device) + work
        self.host = max(self.host, self.device - self.room)

    def wait(self, until: float | None = None) -> None:
        until = self.device if until is None else until
        if until > self.host:
            self.waits.append((self.host, until))
            self.host = until

    def synchronize(self, device: torch.device) -> None:
        self.wait()


def imitate(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    class DeviceEvent:
        def __init__(self, device: torch.device) -> None:
            self.at = max(machine.host, machine.device)

        def seconds_since(self, earlier: DeviceEvent) -> float:
            machine.wait(self.at)
            return self.at - earlier.at

    monkeypatch.setattr(devices, "DeviceEvent", DeviceEvent, raising=False)
    monkeypatch.setattr(devices, "synchronize", machine.synchronize)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.host)


@dataclass
class Costs:
    """Seconds; of the host unless they are the device's."""

    launch: float = 0.01  # queueing a step
    step: float = 0.09  # on the device
    reduce: float = 0.01  # the sums at its end, on the device
    first_step: float = 0.0  # more, in the first one
    read: float = 0.0  # a batch, by the thread that reads ahead
    log: float = 0.0  # writing a line
    validate: float = 0.5  # on the device
    save: float = 0.3
    check: float = 0.2  # on the device
    start_profile: float = 1.0
    write_profile: float = 5.0


class Profile:
    """In torch.profiler's place."""

    def __init__(self, machine: Machine, costs: Costs, schedule: Any, on_trace_ready: Any, **_: Any) -> None:
        self.machine, self.costs, self.schedule, self.on_trace_ready = machine, costs, schedule, on_trace_ready
        self.step_num = 0

    def start(self) -> None:
        self.machine.host += self.costs.start_profile

    def step(self) -> None:
        self.step_num += 1
        if self.schedule(self.step_num - 1) is ProfilerAction.RECORD_AND_SAVE and self.on_trace_ready is not None:
            self.on_trace_ready(self)

    def stop(self) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        self.machine.host += self.costs.write_profile

    def key_averages(self) -> list[Any]:
        return []


class Run:
    """A run of Trainer.fit whose model, data and checkpoints are costs."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, options: str, costs: Costs, room: float = 1e9
    ) -> None:
        self.machine = machine = Machine(room)
        imitate(machine, monkeypatch)
        self.costs, self.queued, self.ends = costs, list[float](), list[float]()  # of steps
        config = load([*OPTIONS, "--run-dir", str(folder), *options.split()]).config
        trainer = self.trainer = Trainer.__new__(Trainer)
        mesh, device = Mesh(config.parallel, rank=0, world_size=1), torch.device("cpu")
        trainer.run = RunContext(config, mesh, device, Ranks.alone())
        trainer.config, trainer.is_async_device = config, True
        trainer.queued, trainer.stop_requested, trainer.logged_batch_size = None, False, 0
        trainer.recorder = Recorder(trainer.run.ranks)
        self.warnings: list[str] = []  # of its checkpoints
        trainer.data = SimpleNamespace(train=self, valid={"validation": None}, test={}, fingerprints=[])  # type: ignore[assignment]
        trainer.engine = SimpleNamespace(module=nn.Module(), optimizer=SimpleNamespace(param_groups=[]))
        trainer.schedule, trainer.checkpoints = None, self  # type: ignore[assignment]
        trainer.step = trainer.first_step = trainer.consumed_samples = 0
        trainer.batch_sizes, trainer.rates = (
            batch_sizes(config.training),
            RateSchedule(config.optimizer, config.training),
        )
        trainer.last_step, trainer.health = config.training.train_iters, Health()
        trainer.clock, trainer.sampler = StepClock(device), None
        trainer.integrity = Integrity(trainer.run, trainer.engine, None, self, 0)  # type: ignore[arg-type]
        trainer.rollbacks, trainer.noise_scale = Rollbacks(config.training), GradientNoiseScale()
        trainer.drill = DrillFaults(0, trainer.engine.module, trainer.engine)
        trainer.nonfinite = NonFiniteSource(nn.Module(), trainer.run.ranks, lambda *_: "")
        monkeypatch.setattr(training, "train_step", self.train_step)
        monkeypatch.setattr(training, "loss_over", self.validate)
        monkeypatch.setattr(training, "check_devices", self.check_devices)
        monkeypatch.setattr(profiling, "profile", lambda **arguments: Profile(machine, costs, **arguments))
        if costs.log:
            log = training.MetricsLogger.log
            monkeypatch.setattr(training.MetricsLogger, "log", lambda *args: (machine.queue(costs.log, 0), log(*args)))
        trainer.fit()
        self.lines = read_metrics(folder / "metrics.jsonl")
        self.seconds = [line["step_time_s"] for line in self.lines]

    def train_step(self, *_: Any, stop_requested: Callable[[], bool], **__: Any) -> Any:
        machine, costs = self.machine, self.costs
        self.queued.append(machine.host)
        machine.queue(costs.launch, costs.step + (0 if self.trainer.step else costs.first_step))
        stop_requested()
        machine.queue(0, costs.reduce)
        end = machine.device
        self.ends.append(end)

        def read() -> StepResult:
            machine.wait(end)
            return RESULT

        return SimpleNamespace(read=read)

    def validate(self, *_: Any) -> SetLoss:
        self.machine.queue(0.001, self.costs.validate)
        self.machine.wait()
        return SetLoss(3.0, None)

    def check_devices(self, *_: Any) -> None:
        self.machine.wait()
        self.machine.queue(0.001, self.costs.check)
        self.machine.wait()

    # ---- the data

    def start(self, consumed: int, steps: int, left_out: set[int]) -> None:
        self.left_out, self.asked = left_out, list[int]()
        self.ready = [self.machine.host + self.costs.read * (1 + n) for n in range(1000)]
        self.machine.host = self.began = self.ready[1]

    def batch(self, consumed: int) -> list[Any]:
        self.asked.append(consumed)
        self.machine.host = max(self.machine.host, self.ready[consumed // 4])
        return []

    def failure(self) -> None:
        """Waits for the two batches after the present one."""
        self.machine.host = max(self.machine.host, self.ready[self.trainer.consumed_samples // 4 + 2])

    # ---- the checkpoints

    extra_state: dict[str, Any] = {}  # noqa: RUF012

    def prepare(self) -> None:
        pass

    def is_due(self, step: int) -> bool:
        interval = self.trainer.config.checkpoint.save_interval
        return interval > 0 and step % interval == 0

    full_is_due = is_due

    def after_step(self, step: int, consumed: int, *, is_exiting: bool) -> None:
        if self.is_due(step) or is_exiting:
            self.machine.host += self.costs.save

    def take_times(self) -> dict[str, float | None]:
        return {}

    def finish(self) -> None:
        pass

    def before_update(self) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    def start(options: str, costs: Costs, room: float = 1e9) -> Run:
        return Run(tmp_path, monkeypatch, options, costs, room)

    return start


ALL = (
    "--train-iters 20 --eval-interval 5 --save-interval 4 --straggler-check-interval 3 "
    "--profile --profile-step-start 8 --profile-step-end 9"
)
# Steps before which the device has run dry: the first, and those after checks (3, 6, ...), validations (5, 10, ...),
# checkpoints (4, 8, ...) and a profile (it starts before 7, and waits after 7 and 9).
DRY = {1} | {n + 1 for n in range(20) if n % 3 == 0 or n % 4 == 0 or n % 5 == 0 or n in (7, 9)}


@pytest.mark.parametrize("room", [1e9, 0.15, 0.05])
def test_a_step_takes_what_the_device_takes(run: Callable[..., Run], room: float) -> None:
    """Whatever is done between steps. A step that finds the device idle begins with its launch."""
    found = run(ALL, Costs(), room)
    expected = [0.11 if step in DRY | {7} else 0.1 for step in range(1, 21)]
    assert found.seconds == pytest.approx(expected)
    rates = [line["tokens_per_second_per_device"] for line in found.lines]
    assert rates == pytest.approx([TOKENS / seconds for seconds in expected])
    flops = flops_per_token(found.trainer.config.model, 64)
    assert [line["tflops_per_device"] for line in found.lines] == pytest.approx([rate * flops / 1e12 for rate in rates])
    assert [line["mfu"] for line in found.lines] == pytest.approx([rate * flops / 2e12 for rate in rates])
    # What recurs: 0.501 a validation, 0.201 a check, 0.3 a checkpoint; told with the step after it.
    pauses = [0.201 * (n % 3 == 0) + (0.501 * (n % 5 == 0) + 0.3 * (n % 4 == 0)) * (n > 0) for n in range(20)]
    assert [line.get("pause_s", 0.0) for line in found.lines] == pytest.approx(pauses)


@pytest.mark.parametrize(("launch", "step"), [(0.01, 0.09), (0.08, 0.01)])
def test_steps_and_pauses_add_up_to_the_run(run: Callable[..., Run], launch: float, step: float) -> None:
    """Also where the device waits for the host, which writes a line of every step, too."""
    found = run(ALL, Costs(launch=launch, step=step, log=0.03))
    pauses = sum(line.get("pause_s", 0.0) for line in found.lines) + 1.0 + 5.0  # of the profile
    assert sum(found.seconds) + pauses == pytest.approx(found.ends[-1] - found.began)


def test_ordinary_steps_wait_for_the_step_before_alone(run: Callable[..., Run]) -> None:
    found = run(ALL, Costs())
    ordinary = [n for n in range(2, 20) if not {n, n + 1} & DRY and n not in (6, 7)]
    assert ordinary, "else this says nothing"
    for step in ordinary:  # until the next one is queued
        own = [to for begin, to in found.machine.waits if found.queued[step - 1] <= begin < found.queued[step]]
        assert own == pytest.approx([found.ends[step - 2]]), step


@pytest.mark.parametrize("read", [0.05, 0.25])
def test_data_waits_are_the_devices(run: Callable[..., Run], read: float) -> None:
    """A step takes the device 0.1 s, and it is queued while the sums of the one before are; the rest is waiting, which
    the host does at the end of a step, for data of the next ones."""
    found = run("--train-iters 30 --eval-interval 0", Costs(read=read))
    assert found.seconds[1:] == pytest.approx([max(read, 0.1)] * 29)
    wait = max(0.0, read - 0.1)
    assert [line["data_wait_s"] for line in found.lines[1:]] == pytest.approx([wait] * 29, abs=1e-9)


def test_the_data_of_steps_left_out_are_not_asked_for(run: Callable[..., Run]) -> None:
    """But the last step is never left out. Steps have four samples."""
    found = run("--train-iters 9 --eval-interval 0 --iterations-to-skip 1 5 6 9", Costs())
    assert found.left_out == {0, 16, 20}
    assert found.asked == [4, 8, 12, 24, 28, 32]


def test_the_time_left_counts_pauses_but_not_the_start(
    run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--train-iters 400 --eval-interval 10 --log-interval 4 --straggler-check-interval 20"
    run(options + " --profile", Costs(first_step=60.0))
    lines = {int(line[5:].split()[0]): line for line in capsys.readouterr().out.splitlines() if line[:5] == "step="}
    assert lines[4].split("tokens/s=")[1].split()[0] == f"{4 * TOKENS / 60.41:.0f}"  # all four, with the start
    assert lines[8].split("tokens/s=")[1].split()[0] == f"{4 * TOKENS / 0.4:.0f}"  # of four steps
    # 200 steps are left: 20 s, 20 validations and 10 checks.
    assert lines[200].split("eta=")[1] in ("0:31", "0:32", "0:33")
