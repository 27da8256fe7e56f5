#!/usr/bin/env python3
"""OLMoE-mix-0924: what to download, and whether it has arrived whole.

python recipe.py urls --output urls.txt               # anywhere; from the manifest's names
wget --continue --input-file urls.txt ...             # where there is a network: see README.md
python recipe.py record RAW --output sizes.json       # there: names, sizes and hashes of what has arrived
python recipe.py verify RAW --listing sizes.json      # offline: every file there, of the right size
python recipe.py verify RAW --deep                    # offline: every archive can be read to its end
python recipe.py verify TOKENS --tokens               # offline: a pair of token files for every source file
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # run from a checkout, without installation

from megatron.optimus.platform import missing_packages

if __name__ == "__main__":
    sys.excepthook = missing_packages.excepthook

import xxhash
import yaml

from megatron.optimus.data.errors import DataError
from megatron.optimus.data.files import TokenFiles
from megatron.optimus.data.tokenize.corpus import parse_batch, read_batches
from megatron.optimus.platform.log import counted

HERE = Path(__file__).resolve().parent
BASE_URL = "https://huggingface.co/datasets/{dataset}/resolve/main/data/{path}"
SUFFIXES = (".json.gz", ".jsonl.gz", ".json.zst")
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


def load_manifest() -> dict[str, Any]:
    manifest = yaml.safe_load((HERE / "manifest.yaml").read_text(encoding="utf-8"))
    for corpus in manifest["corpora"].values():
        corpus["files"] = [name for pattern in corpus["files"] for name in expand(pattern)]
        corpus["tokens"] = float(corpus["tokens"])
    return manifest


def expand(pattern: str) -> list[str]:
    """Names of "part-{0008..0010}.gz"; numbers keep the width of the first."""
    found = BRACES.search(pattern)
    assert found is not None, pattern
    first, last = found.groups()
    return [BRACES.sub(f"{i:0{len(first)}}", pattern) for i in range(int(first), int(last) + 1)]


def paths(manifest: dict[str, Any]) -> list[str]:
    """corpus/name of all files."""
    return [f"{corpus}/{name}" for corpus, content in manifest["corpora"].items() for name in content["files"]]


def compare(where: str, found: Iterable[str], manifest: dict[str, Any], form: Callable[[str], str] = str) -> None:
    """Prints the numbers of files of each corpus; raises DataError if any name is missing or unknown.

    ``form``: what a name of the manifest has become there.
    """
    present, wrong = set(found), []
    for corpus, content in manifest["corpora"].items():
        expected = {f"{corpus}/{form(name)}" for name in content["files"]}
        own = {path for path in present if path.startswith(f"{corpus}/")}
        print(f"{corpus}: {len(own & expected)} of {len(expected)} files")
        wrong += [f"{path}: missing" for path in sorted(expected - own)]
        wrong += [f"{path}: not one of the data set" for path in sorted(own - expected)]
    if wrong:
        print("\n".join(wrong[:50]))
        raise DataError(f"{where}: {counted(len(wrong), 'name')} unlike manifest.yaml: {shown(wrong)}")


def shown(wrong: list[str]) -> str:
    """The first few."""
    return "; ".join(wrong[:3]) + "; ..." * (len(wrong) > 3)


def read_listing(path: str, manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{corpus/name: {"size": ..., maybe "xxh3": ...}} of the hub's listing, or of one that ``record`` made."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        by_path = {"/".join(Path(e["path"]).parts[-2:]): e for e in entries if int(e["size"]) > 0}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not a JSON list of files with path and size: {error!r}") from error
    compare(path, by_path, manifest)
    return {name: by_path[name] for name in paths(manifest)}


def in_folder(folder: str, suffixes: tuple[str, ...]) -> list[str]:
    """corpus/name of the files below a folder. Raises DataError where there is none."""
    if not Path(folder).is_dir():
        raise DataError(f"{folder}: no such folder")
    files = (path for path in Path(folder).rglob("*") if path.is_file() and path.name.endswith(suffixes))
    return sorted(path.relative_to(folder).as_posix() for path in files)


def digest(path: str) -> str:
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 22):
            hasher.update(chunk)
    return hasher.hexdigest()


def read_through(path: str, key: str) -> str | None:
    """What is wrong with an archive: it cannot be read to its end, or its first lines have no text. None: nothing."""
    try:
        for number, batch in enumerate(read_batches([Path(path)], [key])):
            if not number:
                parse_batch(batch, [key])
    except DataError as error:
        return str(error)
    return None


def urls(args: argparse.Namespace, manifest: dict[str, Any]) -> None:
    names = paths(manifest)
    if args.listing:
        size = sum(int(entry["size"]) for entry in read_listing(args.listing, manifest).values())
        print(f"{size / 1e12:.3f} TB")
    try:
        lines = [args.base_url.format(dataset=manifest["dataset"], path=name) for name in names]
    except (LookupError, ValueError) as error:
        raise DataError(f"--base-url {args.base_url}: takes {{dataset}} and {{path}} alone: {error!r}") from error
    Path(args.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{args.output}: {len(lines)} addresses")


def record(args: argparse.Namespace, manifest: dict[str, Any]) -> None:
    compare(args.folder, in_folder(args.folder, SUFFIXES), manifest)
    files = [Path(args.folder) / name for name in paths(manifest)]
    with ProcessPoolExecutor(args.workers) as pool:
        digests = pool.map(digest, map(str, files))
        entries = [
            {"path": name, "size": file.stat().st_size, "xxh3": value}
            for name, file, value in zip(paths(manifest), files, digests, strict=True)
        ]
    Path(args.output).write_text(json.dumps(entries, indent=0) + "\n", encoding="utf-8")
    print(f"{args.output}: {len(entries)} files, {sum(int(entry['size']) for entry in entries) / 1e12:.6f} TB")


def verify(args: argparse.Namespace, manifest: dict[str, Any]) -> None:
    if args.tokens:
        verify_tokens(args.folder, manifest)
        return
    compare(args.folder, in_folder(args.folder, SUFFIXES), manifest)
    files = [f"{args.folder}/{name}" for name in paths(manifest)]
    listing = read_listing(args.listing, manifest) if args.listing else {}
    entries = {f"{args.folder}/{name}": entry for name, entry in listing.items()}
    wrong = {}  # file: a line that says what is wrong with it
    for file in files:
        size = Path(file).stat().st_size
        if size != int(entries.get(file, {}).get("size", size)):
            wrong[file] = f"{file}: {size} bytes, the listing says {entries[file]['size']}"
        elif not size:
            wrong[file] = f"{file}: empty"
    if args.deep:
        left = [file for file in files if file not in wrong]
        with ProcessPoolExecutor(args.workers) as pool:
            reasons = pool.map(read_through, left, [manifest["json_key"]] * len(left))
            for file, reason, value in zip(left, reasons, pool.map(digest, left), strict=True):
                if reason:
                    wrong[file] = reason
                elif value != entries.get(file, {}).get("xxh3", value):
                    wrong[file] = f"{file}: its hash is {value}, the listing says {entries[file]['xxh3']}"
    lines = list(wrong.values())
    compared = ", of the right size" if listing else "; their sizes were not compared, which --listing does"
    print("\n".join(lines) or f"all {len(files)} files are there{compared}")
    if lines:
        what = f"{counted(len(lines), 'file')} damaged or of another size, to be downloaded again"
        raise DataError(f"{args.folder}: {what}: {shown(lines)}")


def verify_tokens(folder: str, manifest: dict[str, Any]) -> None:
    def form(name: str) -> str:
        return f"{next(name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix))}_text_document.idx"

    compare(folder, in_folder(folder, ("_text_document.idx",)), manifest, form)
    total = 0
    for corpus, content in manifest["corpora"].items():
        prefixes = [f"{folder}/{corpus}/{form(name).removesuffix('.idx')}" for name in content["files"]]
        tokens = int(TokenFiles(prefixes).tokens.sum())
        total += tokens
        print(f"{corpus}: {tokens / 1e9:.3f} billion tokens; the card says {content['tokens'] / 1e9:g}")
    print(f"{total / 1e12:.6f} trillion tokens")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="OLMoE-mix-0924: what to download, and whether it has arrived whole")
    actions = parser.add_subparsers(dest="action", required=True)
    making = actions.add_parser("urls", help="list of addresses to download")
    making.add_argument("--listing", help="the hub's listing of files (JSON): its names must be the manifest's")
    making.add_argument("--output", default="urls.txt")
    making.add_argument("--base-url", default=BASE_URL, help="with {dataset} and {path}: for a mirror")
    recording = actions.add_parser("record", help="write down names, sizes and hashes of a download")
    recording.add_argument("folder")
    recording.add_argument("--output", default="sizes.json")
    checking = actions.add_parser("verify", help="compare a folder with manifest and listing")
    checking.add_argument("folder")
    checking.add_argument("--listing", help="compare sizes too: the hub's listing, or what 'record' wrote")
    checking.add_argument("--deep", action="store_true", help="read every archive to its end; compare hashes if known")
    checking.add_argument("--tokens", action="store_true", help="the folder holds token files")
    for action in (recording, checking):
        action.add_argument(
            "--workers", type=positive, default=os.cpu_count() or 1, help="processes; default: one a core"
        )
    args = parser.parse_args(argv)
    try:
        {"urls": urls, "record": record, "verify": verify}[args.action](args, load_manifest())
    except (DataError, OSError) as error:
        what = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"recipe: error: {what}", file=sys.stderr)
        return 1
    return 0


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
