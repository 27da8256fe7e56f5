"""Documents: links lead to files and headings that exist, named files exist, and the commands in them parse."""

from __future__ import annotations

import importlib
import itertools
import json
import pkgutil
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.optimus.cli import COMMANDS
from megatron.optimus.planner import measure

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)\s#]*)(#[^)\s]+)?\)")
NAMED = re.compile(
    r"(?<![\w/.-])((?:tests|benchmarks|tools|examples|megatron|deepspeed_ext|csrc|docs)/[\w/-]+\.(?:py|md|sh|pbs))\b"
)
ABSENT = {"megatron/__init__.py"}  # as CONTRIBUTING.md says
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
BASH = re.compile(r"^ *```bash\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
API_ENTRY = re.compile(r"^::: (\S+)(?:\n    options:\n      members: \[(.*)\])?$", re.MULTILINE)
NAVIGATION = re.compile(r"^\s+- [^:]+: (\S+\.md)$", re.MULTILINE)
RECIPE = re.compile(r'^```\w+ title="[^"]+"', re.MULTILINE)  # test_extending.py makes the file
GENERATED = {"index.md"}  # made from the README


def documents() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, check=False, capture_output=True, text=True
    ).stdout.split()
    found = [ROOT / name for name in listed] or [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return [path for path in found if path.exists()]


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken(path: Path) -> list[str]:
    """The links of a document that lead nowhere."""
    wrong = []
    for target, anchor in LINK.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
        if "://" in target or target.startswith("mailto:"):
            continue
        place = (path.parent / target).resolve() if target else path
        has_anchor = not anchor or place.suffix != ".md" or not place.exists() or anchor in anchors(place)
        if not place.exists() or not has_anchor:
            wrong.append(f"{path.name}: {target}{anchor}")
    return wrong


def test_links_lead_somewhere() -> None:
    assert [link for path in documents() for link in broken(path)] == []


def test_files_that_are_named_exist() -> None:
    missing = [
        f"{path.name}: {name}"
        for path in documents()
        for name in NAMED.findall(RECIPE.sub("", path.read_text(encoding="utf-8")))
        if name not in ABSENT and not (ROOT / name).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("link", ["nowhere.md", "b.md#no-such-heading", "#there-is"])
def test_a_broken_link_is_found(link: str, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(f"# There is not\n\n[good](b.md#one-more-thing), [bad]({link})\n")
    (tmp_path / "b.md").write_text("# One: more thing\n")
    assert broken(tmp_path / "a.md") == [f"a.md: {link}"]


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    pages = {str(path.relative_to(ROOT / "docs")) for path in documents() if ROOT / "docs" in path.parents}
    assert set(NAVIGATION.findall((ROOT / "mkdocs.yml").read_text())) == pages | GENERATED


def test_the_pages_of_the_api_name_what_there_is() -> None:
    """mkdocstrings would say so too, but only `make docs` runs it."""
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    entries = [entry for page in pages for entry in API_ENTRY.findall(page.read_text(encoding="utf-8"))]
    assert len(pages) > 5 and len(entries) > 20
    for name, members in entries:
        found = pkgutil.resolve_name(name)
        assert [member for member in members.split(", ") if member and not hasattr(found, member)] == [], name


def test_results_are_cited_and_named_by_what_they_are() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in documents())
    code = "\n".join(
        path.read_text() for path in [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/unit/planner/*.py")]
    )
    results = sorted(path.name for path in (ROOT / "benchmarks/results").iterdir() if path.is_file())
    assert [name for name in results if name not in text and name not in code] == []
    history = re.compile(r"before|another|again|(third|fourth|fifth|sixth|seventh)_gpu|_[0-9a-f]{7}[._]")
    assert [name for name in results if history.search(name)] == []


class Parsed(BaseException):
    """Raised in place of what a command would do once its words are parsed."""


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each ``optimus`` command of a fenced bash block, those of tools/*.py among them: (page and line, words)."""
    for path in documents():
        for block in BASH.findall(path.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
                if words[:1] == ["optimus"]:
                    yield f"{path.relative_to(ROOT)}: {line}", words[1:]
                elif words[:3] == ["python", "-m", "megatron.optimus"]:
                    yield f"{path.relative_to(ROOT)}: {line}", words[3:]
                elif words[:1] == ["python"] and words[1:2] and words[1].startswith("tools/"):
                    yield f"{path.relative_to(ROOT)}: {line}", [command_of_tool(ROOT / words[1]), *words[2:]]


def command_of_tool(path: Path) -> str:
    """The subcommand that a file of tools/ starts."""
    [name] = [word for word in path.read_text().split('"') if word in COMMANDS]
    return name


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a command parse its words and check its configuration only. Raises AssertionError if it refuses."""
    module = importlib.import_module(COMMANDS[words[0]][0])
    steps = [(module, name) for name in ("load", "read_run") if hasattr(module, name)] or [(module.Parser, "parse")]
    for owner, name in steps:
        monkeypatch.setattr(owner, name, stop_after(getattr(owner, name)))
    try:
        code = module.main(words[1:])
    except Parsed:
        return
    except SystemExit as end:  # --help
        code = end.code
    assert code == 0, words


def stop_after(function: Any) -> Any:
    def stopping(*args: Any, **kwargs: Any) -> Any:
        function(*args, **kwargs)
        raise Parsed

    return stopping


def test_commands_of_the_documents_parse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "measured_yaml", lambda say: "")  # tests/unit/planner/test_measure.py measures
    found = list(commands())
    assert len(found) > 15 and {words[0] for _, words in found if words[0] in COMMANDS} > {
        "pretrain",
        "plan",
        "convert",
    }
    wrong = []
    for where, words in found:
        if words[:1] in (["--help"], ["--version"]):
            continue
        for flag, value in itertools.pairwise(words):
            if flag == "--config":  # of an earlier run
                Path(value).parent.mkdir(parents=True, exist_ok=True)
                Path(value).write_text("training: {train_iters: 1}\n")
            if flag == "--from-hf":  # a downloaded model
                Path(value).mkdir(exist_ok=True)
                sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 512, "rope_theta": 1e4}
                sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 4096}
                (Path(value) / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
        with monkeypatch.context() as patch:
            try:
                parse(words, patch)
            except (AssertionError, KeyError):
                wrong.append(f"{where}: {capsys.readouterr().err.strip() or 'no such command'}")
    assert wrong == []


def test_a_command_that_does_not_parse_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        parse(["plan", "--preset", "mula-7b-a1b", "--noodles", "4"], patch)
    assert "unknown option --noodles" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        parse(["plan", "--preset", "mula-7b-a1b", "--nodes", "4"], patch)
