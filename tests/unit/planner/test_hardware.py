"""Files of machines: each figure has its source, a user's own file counts, and a wrong one gives one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.models.activations import CUDA, XPU
from megatron.optimus.planner.hardware import (
    AURORA,
    MACHINES,
    Figure,
    machine_named,
    machine_of_device,
    read_machine,
)
from megatron.optimus.planner.report import figures
from megatron.optimus.platform.device import peak_flops

FOLDER = Path(__file__).resolve().parents[3] / "megatron/optimus/planner/systems"


def test_presets_say_where_each_figure_is_from() -> None:
    assert set(MACHINES) == {"a100", "aurora", "b200", "h100", "h200", "max1550", "mi300x"}
    for name, machine in MACHINES.items():
        assert machine.kernels is (XPU if name in ("aurora", "max1550") else CUDA)
        for figure, one in figures(machine).items():
            assert one.is_measured <= (name == "h200"), f"{figure} of {name} was not measured"
            is_told = any(
                word in one.source for word in ("public", "assumed", "not measured here", "as h200", "as aurora")
            )
            assert one.is_measured or is_told, (name, figure, one.source)
    for name in set(MACHINES) - {"h200", "aurora"}:
        own = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["figures"]
        assert all("public" in one["source"] or "not measured here" in one["source"] for one in own.values()), name


def test_a_file_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: h100\nfigures:\n  memory: {value: 4e10, source: half of it, measured: true}\n")
    mine, h100 = machine_named(str(path)), MACHINES["h100"]
    assert (mine.name, mine.memory, mine.file) == ("mine", Figure(4e10, "half of it", True), str(path))
    for name, one in figures(mine).items():
        if name != "memory":
            assert (one.value, one.is_measured) == (getattr(h100, name).value, False)
            assert one.source.startswith("as h100: ")
    assert (mine.device, mine.devices_per_node, mine.kernels) == (h100.device, 8, CUDA)


def test_machines_are_found_by_the_name_of_a_device() -> None:
    names = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H200": "h200"}
    names |= {"AMD Instinct MI300X": "mi300x", "NVIDIA B200": "b200", "Intel(R) Data Center GPU Max 1550": "aurora"}
    for name, expected in names.items():
        assert machine_of_device(name, "xpu" if "Intel" in name else "cuda").name == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: h200\nfigure: {}\n", "unknown key 'figure'; did you mean figures?"),
        (
            "extends: h200\nfigures: {memry: {value: 1, source: x}}\n",
            "figures: unknown key 'memry'; did you mean memory?",
        ),
        ("extends: h200\nfigures: {memory: {value: 1e9, source: x, by: me}}\n", "figures.memory: unknown key 'by'"),
        (
            "extends: h200\nfigures: {memory: {value: -3, source: x}}\n",
            r"memory: value=-3 must be 1e\+06 to 1e\+15 bytes",
        ),
        ("extends: h200\nfigures: {peak: {value: .inf, source: x}}\n", "figures.peak: value=inf must be .* FLOP/s"),
        ("extends: h200\nfigures: {peak: {value: .nan, source: x}}\n", "figures.peak: value=nan must be"),
        ("extends: h200\nfigures: {peak: {value: true, source: x}}\n", "figures.peak: value=True must be"),
        ("extends: h200\nfigures: {peak: {value: fast, source: x}}\n", "figures.peak: value='fast' must be"),
        (
            "extends: h200\nfigures: {slack: {value: 3, source: x}}\n",
            "figures.slack: value=3 must be 0 to 1 as a share",
        ),
        (
            "extends: h200\nfigures: {intra_node_bandwidth: {value: 0, source: x}}\n",
            "figures.intra_node_bandwidth: value=0 must be .* bytes/s",
        ),
        ("extends: h200\nfigures: {peak: {value: 1e12}}\n", "figures.peak: source=None must say in words"),
        (
            "extends: h200\nfigures: {peak: {value: 1.0e+12, source: x, measured: 3}}\n",
            "measured=3 must be true or false",
        ),
        ("extends: h200\nfigures: {peak: 3}\n", "figures.peak: 3 must be a mapping with value, source, measured"),
        ("extends: h200\nfigures: [1]\n", r"figures: \[1\] must be a mapping"),
        ("extends: ../h200\n", "extends='../h200' is no machine; use a100, "),
        ("extends: ../../config/presets/mula-tiny\n", "is no machine"),
        ("extends: [h200]\n", r"extends=\['h200'\] is no machine"),
        ("extends: h200\nkernels: rocm\n", "kernels='rocm' must be cuda, xpu or cpu"),
        ("extends: h200\ndevices_per_node: 0\n", "devices_per_node=0 must be a whole number"),
        ("extends: h200\ndevices_per_node: 1.5\n", "devices_per_node=1.5 must be a whole number"),
        ("extends: h200\ndevice: 3\n", "device=3 must be text"),
        ("device: mine\n", "chip, kernels, devices_per_node, figures.memory, .* missing; or take another machine's"),
        ("- 1\n", r"\[1\] must be a mapping with extends"),
        ("", "None must be a mapping"),
        ("a: [", "mine.yaml"),
    ],
)
def test_a_wrong_file_gives_one_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        read_machine(path)
    assert str(path) in str(raised.value)


def test_unknown_machines() -> None:
    with pytest.raises(ConfigError, match=r"--system='h300' is unknown; use a100, .* or the path of a \.yaml file"):
        machine_named("h300")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        machine_named("nowhere.yaml")


def test_every_constant_has_a_source_and_peaks_agree_with_the_trainers() -> None:
    for machine in MACHINES.values():
        assert all(figure.value > 0 and figure.source for figure in figures(machine).values())
        device = {"aurora": "Intel(R) Data Center GPU Max 1550"}.get(machine.name, machine.device)
        if machine.name != "max1550":  # whose devices have the name of Aurora's, which have fewer cores
            assert machine.peak.value == peak_flops(device, torch.bfloat16)
    assert not any(figure.is_measured for figure in figures(AURORA).values())
