"""Check the installation on this machine: versions, devices, kernels, collectives, space, optional packages, limits.

    optimus doctor
    optimus doctor --run-dir /lustre/runs/first --save /lustre/checkpoints --device cuda
    optimus doctor --json > doctor.json

Each problem comes with what it costs and the command that mends it. Two ranks really exchange tensors, which takes some
seconds. The report has no names of hosts or users, so that it can be sent to others.

Exit code: 0 where nothing needed is broken, 1 where something is, or 2 after one line that says what is wrong with the
command line.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron.optimus.commands import diagnosis
from megatron.optimus.commands.diagnosis import Finding, State
from megatron.optimus.config.choices import Device
from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.platform.log import counted, printable, prints_errors
from megatron.optimus.version import __version__

_MARKS = {State.OK: "ok", State.ABSENT: "-", State.WARNING: "warn", State.BROKEN: "FAIL"}
_WIDTH, _INDENT = 80, 22  # columns; where values begin


@prints_errors(ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus doctor``; returns the exit code."""
    parser = Parser("doctor", __doc__ or "")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--run-dir", type=Path, default=Path("runs"), help="folder of the runs to come [runs]")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="folder of checkpoints, if it is another")
    device = "type of device that a run would use [auto]"
    parser.add_enum("--device", members=Device, default=Device.AUTO, help=device)
    parser.add_argument(
        "--timeout", type=whole_number(), default=60, metavar="S", help="seconds that an exchange of ranks may take"
    )
    options = parser.parse(argv)
    folders = {"run-dir": options.run_dir} | ({} if options.save is None else {"save": options.save})
    findings = list(examine(options.device, folders, options.timeout))
    is_healthy = all(finding.state is not State.BROKEN for finding in findings)
    if options.json:
        report = {"version": __version__, "is_healthy": is_healthy, "findings": [_record(one) for one in findings]}
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    else:
        sys.stdout.write(text_of(findings))
    return 0 if is_healthy else 1


def examine(asked: Device, folders: dict[str, Path], limit_s: float) -> Iterator[Finding]:
    """Yields all findings, section by section; those that need torch are left out where it cannot be imported."""
    found = list(diagnosis.software())
    yield from found
    if not any(one.name == "torch" and one.state is State.BROKEN for one in found):
        from megatron.optimus.platform import device as devices

        kind = devices.default_kind() if asked is Device.AUTO else asked.value
        with ThreadPoolExecutor(1) as thread:  # DeepSpeed takes as long to import as the ranks take to exchange
            deepspeed = thread.submit(list, diagnosis.imports_deepspeed(limit_s))
            exchanged = list(diagnosis.collectives(kind, limit_s))
            yield from deepspeed.result()
        yield from diagnosis.devices(asked)
        yield from diagnosis.kernels(kind)
        yield from exchanged
        yield from diagnosis.limits(kind)
    yield from diagnosis.space(folders)
    yield from diagnosis.extras()


def text_of(findings: Iterable[Finding]) -> str:
    """Returns the report in 80 columns: a table of each section, then the problems with what mends them."""
    findings = list(findings)
    lines = [f"Optimus {__version__} on {platform.system()}, {platform.machine()}"]
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section]
        label = f"  {_MARKS[finding.state]:<5} {finding.name:<13} "
        lines += _wrapped(label, finding.value, _INDENT)
    problems = [one for one in findings if one.state in (State.WARNING, State.BROKEN)]
    lines += ["", "To mend"] if problems else []
    for number, one in enumerate(sorted(problems, key=lambda each: each.state is not State.BROKEN), 1):
        lines += _wrapped(f"  {number}. ", f"{one.name}: {one.cost}", 5)
        lines += [f"       {printable(one.remedy)}"] if one.remedy else []  # whole, to be copied
    broken = sum(one.state is State.BROKEN for one in problems)
    warnings = counted(len(problems) - broken, "warning")
    end = f"{counted(broken, 'problem')} and {warnings}." if broken else f"Nothing needed is broken; {warnings}."
    end = end if problems else "Nothing is broken."
    return "\n".join([*lines, "", end, ""])


def _wrapped(label: str, text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        printable(text), _WIDTH, initial_indent=label, subsequent_indent=" " * indent, break_on_hyphens=False
    )


def _record(finding: Finding) -> dict[str, str]:
    return dataclasses.asdict(finding) | {"state": finding.state.value}
