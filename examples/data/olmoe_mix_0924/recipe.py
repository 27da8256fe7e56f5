#!/usr/bin/env python3
"""OLMoE-mix-0924: what to download, and whether it has arrived whole.

python recipe.py urls listing.json --output urls.txt     # where there is a network
wget --continue --input-file urls.txt ...                # see README.md
python recipe.py verify RAW --listing listing.json       # offline: every file there, of the right size
python recipe.py verify TOKENS --tokens                  # offline: a pair of token files for every source file
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # run from a checkout, without installation

from megatron.optimus.data.errors import DataError
from megatron.optimus.data.files import TokenFiles

HERE = Path(__file__).resolve().parent
BASE_URL = "https://huggingface.co/datasets/{dataset}/resolve/main/{path}"


def load_manifest() -> dict[str, Any]:
    return yaml.safe_load((HERE / "manifest.yaml").read_text(encoding="utf-8"))


def read_listing(path: str, corpora: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Files of a saved listing, a JSON list of {"path", "size", ...}, by path. Raises DataError.

    A file belongs to the corpus whose name is one of the folders it lies in; others (README) are left out.
    """
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        files = {e["path"]: e for e in entries if corpus_of(e["path"], corpora) and int(e["size"]) > 0}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not a JSON list of files with path and size: {error!r}") from error
    compare(path, Counter(corpus_of(file, corpora) for file in files), corpora)
    return files


def corpus_of(path: str, corpora: dict[str, int]) -> str | None:
    return next((folder for folder in Path(path).parts[:-1] if folder in corpora), None)


def compare(where: str, found: Counter[str | None], expected: dict[str, int]) -> None:
    """Prints the numbers of files; raises DataError if any differs from the manifest."""
    for corpus, number in expected.items():
        print(f"{corpus}: {found[corpus]} of {number} files")
    if wrong := [corpus for corpus, number in expected.items() if found[corpus] != number]:
        raise DataError(f"{where}: {', '.join(wrong)} differ from manifest.yaml in the number of files")
    print(f"all {sum(expected.values())} files")


def urls(args: argparse.Namespace, manifest: dict[str, Any]) -> None:
    files = read_listing(args.listing, manifest["corpora"])
    lines = [args.base_url.format(dataset=manifest["dataset"], path=path) for path in sorted(files)]
    Path(args.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{args.output}: {len(lines)} addresses, {sum(int(e['size']) for e in files.values()) / 1e12:.3f} TB")


def verify(args: argparse.Namespace, manifest: dict[str, Any]) -> None:
    corpora, folder = manifest["corpora"], Path(args.folder)
    if args.tokens:
        prefixes = [str(path.with_suffix("")) for path in sorted(folder.rglob("*_text_document.idx"))]
        compare(args.folder, Counter(corpus_of(prefix, corpora) for prefix in prefixes), corpora)
        print(f"{int(TokenFiles(prefixes).tokens.sum()) / 1e12:.6f} T tokens")
        return
    if not args.listing:
        names = [str(path) for path in folder.rglob("*") if path.is_file()]
        compare(args.folder, Counter(corpus_of(name, corpora) for name in names), corpora)
        return
    wrong = []
    for path, entry in sorted(read_listing(args.listing, corpora).items()):
        parts = Path(path).parts
        file = folder.joinpath(*parts[parts.index(corpus_of(path, corpora) or "") :])  # below the corpus's folder
        if not file.is_file():
            wrong.append(f"{file}: missing")
        elif file.stat().st_size != int(entry["size"]):
            wrong.append(f"{file}: {file.stat().st_size} bytes, the listing says {entry['size']}")
    print("\n".join(wrong) or "every file is there, of the right size")
    if wrong:
        raise DataError(f"{len(wrong)} files are missing or of another size; download them again")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="OLMoE-mix-0924: what to download, and whether it has arrived whole")
    actions = parser.add_subparsers(dest="action", required=True)
    making = actions.add_parser("urls", help="list of addresses to download")
    making.add_argument("listing", help="saved listing of the data set's files (JSON)")
    making.add_argument("--output", default="urls.txt")
    making.add_argument("--base-url", default=BASE_URL, help="with {dataset} and {path}: for a mirror")
    checking = actions.add_parser("verify", help="compare a folder with manifest and listing")
    checking.add_argument("folder")
    checking.add_argument("--listing", help="compare names and sizes too")
    checking.add_argument("--tokens", action="store_true", help="the folder holds token files")
    args = parser.parse_args(argv)
    try:
        (urls if args.action == "urls" else verify)(args, load_manifest())
    except DataError as error:
        print(f"recipe: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
