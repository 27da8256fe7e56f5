"""Random damage to the newest checkpoint: each must be noticed, the tensor named, and the one before taken instead.

    python -m tests.campaigns.corruption --count 10000 --seed 1 --output benchmarks/results/checkpoint_corruption.json

Kinds of damage: one bit, a block of zeros, a cut, a tail, a lost file, two files exchanged, a file of the checkpoint
before, two equally long tensors exchanged inside a file; over all files, manifest included.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from megatron.optimus.checkpoint import Manifest, Saver, load_manifest, load_newest, store
from megatron.optimus.checkpoint.manifest import MANIFEST_NAME
from megatron.optimus.checkpoint.shards import ShardFile
from tests.helpers import run_distributed
from tests.unit.checkpoint.helpers import CONFIG, assert_holds, layout_slices, whole_state

KINDS = ("bit", "zeros", "cut", "tail", "lost", "exchanged", "older", "tensors exchanged")


def _save(rank: int, world: int, root: Path) -> None:
    saver = Saver(root, node=f"node {rank}", asynchronous=False)
    for step in (1, 2):
        slices = layout_slices(whole_state(step), rank, world, 2, interleaved=True, loading=False)
        saver.start(slices, Manifest("full", step, step, CONFIG, {}, {}, {}), retain=2)


class Victim:
    """Two checkpoints of two nodes; the newer one is damaged and mended again and again."""

    def __init__(self, root: Path, seed: int) -> None:
        run_distributed(_save, 2, root)
        self.root, self.random = root, random.Random(seed)
        self.older, self.newest = root / "step-00000001", root / "step-00000002"
        self.good = {path.name: path.read_bytes() for path in sorted(self.newest.iterdir())}
        self.shards = [name for name in self.good if name != MANIFEST_NAME]
        self.manifest = load_manifest(self.newest)
        self.headers = {name: self._header(name) for name in self.shards}
        self.messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.messages.append(record.getMessage())  # type: ignore[method-assign]
        log = logging.getLogger("optimus")
        log.addHandler(handler)
        log.propagate = False

    def _header(self, name: str) -> dict[str, tuple[int, int]]:
        file = ShardFile(self.newest / name, len(self.good[name]), 1 << 20)
        places = {key: (t.offset, t.offset + t.num_bytes) for key, t in file.tensors.items()}
        file.close()
        return places

    def damage(self, kind: str) -> dict[str, bytes | None]:
        """file -> what it holds now (None: gone), of the files that changed."""
        draw = self.random
        name = draw.choice(list(self.good))
        data = bytearray(self.good[name])
        if kind == "bit":
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif kind == "zeros":
            start = draw.randrange(len(data))
            stop = min(len(data), start + draw.choice((1, 16, 512)))
            data[start:stop] = bytes(stop - start)
        elif kind == "cut":
            del data[draw.randrange(len(data)) :]
        elif kind == "tail":
            data += draw.randbytes(draw.choice((1, 8, 512)))
        elif kind == "lost":
            return {name: None}
        elif kind == "older":
            data = bytearray((self.older / name).read_bytes())
        elif kind == "exchanged":
            first, second = draw.sample(list(self.good), 2)
            return {first: self.good[second], second: self.good[first]}
        else:
            name = draw.choice(self.shards)
            data = bytearray(self.good[name])
            pairs = [
                (a, b)
                for a in self.headers[name].values()
                for b in self.headers[name].values()
                if a < b and a[1] - a[0] == b[1] - b[0]
            ]
            (a, b), (c, d) = draw.choice(pairs)
            data[a:b], data[c:d] = data[c:d], data[a:b]
        return {name: bytes(data)}

    def suspects(self, changed: dict[str, bytes | None]) -> set[str]:
        """Names one of which the report must contain: damaged tensors, or the manifest's file."""
        names: set[str] = set()
        for name, data in changed.items():
            if name == MANIFEST_NAME:
                names.add(MANIFEST_NAME)
                continue
            good, places = self.good[name], self.headers[name]
            begin = min(start for start, _ in places.values())
            is_whole = data is not None and len(data) == len(good) and data[:begin] == good[:begin]
            for key, (start, stop) in places.items():
                if not is_whole or data is None or data[start:stop] != good[start:stop]:
                    names.add(key.split("/")[0])
        return names

    def check_one(self, kind: str) -> bool:
        """Damages, loads, mends. False where the damage changed nothing. AssertionError where it went unnoticed."""
        changed = {n: d for n, d in self.damage(kind).items() if d != self.good[n]}
        if not changed:
            return False
        for name, data in changed.items():
            (self.newest / name).unlink() if data is None else (self.newest / name).write_bytes(data)
        loaded: dict[int, list] = {}
        self.messages.clear()
        found = load_newest(self.root, lambda m: loaded.setdefault(m.step, store.everything(m)))
        assert found is not None and found[1].step == 1, f"{kind} of {list(changed)}: went unnoticed"
        assert_holds(loaded[1], whole_state(1))
        suspects = self.suspects(changed)
        assert any(s in m for m in self.messages for s in suspects), f"{kind}: {self.messages} names none of {suspects}"
        for name in changed:
            (self.newest / name).write_bytes(self.good[name])
        return True

    def run(self, count: int) -> Counter[str]:
        done: Counter[str] = Counter()
        while sum(done.values()) < count:
            kind = self.random.choice((*KINDS, "bit", "bit"))
            done[kind] += self.check_one(kind)
        loaded = load_newest(self.root, store.everything)
        assert loaded is not None and loaded[1].step == 2, "mended, the newest is good again"
        return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder, started = Path(tempfile.mkdtemp()), time.monotonic()
    done = Victim(folder / "root", options.seed).run(options.count)
    shutil.rmtree(folder)
    evidence = {
        "seed": options.seed,
        "damages": sum(done.values()),
        "by_kind": dict(sorted(done.items())),
        "unnoticed": 0,  # an assertion ends the campaign at the first one
        "tensor_or_file_not_named": 0,
        "no_fallback": 0,
        "wall_s": round(time.monotonic() - started),
    }
    options.output.write_text(json.dumps(evidence, indent=1) + "\n")
    print(json.dumps(evidence))


if __name__ == "__main__":
    main()
