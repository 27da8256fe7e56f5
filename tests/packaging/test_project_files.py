"""The files around the source tree parse, name things that exist and agree with each other."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from megatron.optimus.version import __version__

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_license_is_apache_2_with_our_holder() -> None:
    text = read("LICENSE")
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "Copyright 2026 The Optimus authors" in text and "[name of copyright owner]" not in text
    assert 'license = "Apache-2.0"' in read("pyproject.toml")


def test_the_citation_names_software_and_license() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    assert (citation["cff-version"], citation["type"], citation["license"]) == ("1.2.0", "software", "Apache-2.0")
    assert citation["authors"] == [{"name": "The Optimus authors"}]
    sections = [line.removeprefix("## ") for line in read("CHANGELOG.md").splitlines() if line.startswith("## ")]
    released = [name for name in sections if name != "Unreleased"]
    assert citation["version"] == __version__ == released[0]


def test_workflows_call_what_the_tree_has() -> None:
    steps = {
        name: [
            step for job in yaml.safe_load(read(f".github/workflows/{name}"))["jobs"].values() for step in job["steps"]
        ]
        for name in ("ci.yml", "wheels.yml")
    }
    assert [step["run"] for step in steps["ci.yml"] if "run" in step] == [".ci/run"] and (ROOT / ".ci" / "run").exists()
    assert any("python -m build" in step.get("run", "") for step in steps["wheels.yml"])
    for name in steps:
        assert "has not been run" in read(f".github/workflows/{name}").replace("\n# ", " ")


def test_hooks_run_the_tools_that_requirements_pin() -> None:
    (repository,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert repository["repo"] == "local"
    tools = {hook["entry"].split()[2] for hook in repository["hooks"]}
    assert tools == {"ruff", "mypy"} and all(f"\n{tool}==" in read("requirements.txt") for tool in tools)


def test_images_install_extras_that_exist_and_say_that_they_were_not_built() -> None:
    project = read("pyproject.toml")
    for name in ("cuda.Dockerfile", "aurora.def"):
        text = read(f"tools/containers/{name}")
        assert "This image has not been built" in text
        (extras,) = re.findall(r'"\.\[([\w,]+)\]"', text)
        assert [extra for extra in extras.split(",") if f"\n{extra} = [" not in project] == []
