"""Foreign checkpoints with a damaged file: one line with its name, or the very result of the whole one; nothing else.

Files of torch.save have checksums of everything, so nothing can slip through. Safetensors have none of the data: there
only what is not data is flipped.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import xxhash

from megatron.optimus.checkpoint import CheckpointError
from megatron.optimus.checkpoint.manifest import MANIFEST_NAME
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.convert import Options, convert
from tests.unit.checkpoint.test_manifest import sealed

_FILES = {  # format -> the files to damage, of each pattern one
    "hf": ("config.json", "model.safetensors.index.json", "model-00002-*.safetensors"),
    "megatron": ("latest_checkpointed_iteration.txt", "*/optimus_model.json", "*/*/model_optim_rng.pt"),
    "zero": ("latest", "optimus_model.json", "*/mp_rank_00_model_states.pt", "*/layer_1_expert_0_*.pt"),
    "universal": ("latest_universal", "*/mp_rank_*.pt", "*/zero/*q_proj.weight/exp_avg.pt", "*/zero/*norm.weight/*.pt"),
}
_OPTIONS = {
    "hf": Options(max_shard_bytes=1500),
    "megatron": Options(tp=2, pp=2),
    "zero": Options(names="hf-native-moe"),
    "universal": Options(names="hf"),
}


def tensors_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def damaged(data: bytes, flips_from: int, flips_to: int, seed: int) -> list[bytes]:
    """Nothing of it, two beginnings, four bits anywhere and eight in what surrounds the data."""
    draw = random.Random(seed)
    found = [b"", data[: draw.randrange(len(data))], data[: len(data) - 1]]
    places = [draw.randrange(flips_from, flips_to) for _ in range(4)]
    places += [draw.randrange(flips_from, min(flips_to, flips_from + 600)) for _ in range(4)]
    places += [draw.randrange(max(flips_from, flips_to - 600), flips_to) for _ in range(4)]
    for place in places:
        found.append(data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :])
    return found


@pytest.mark.parametrize("to", _FILES)
def test_a_damaged_file_is_named_or_changes_nothing(to, ours, tmp_path):
    foreign, out = tmp_path / to, tmp_path / "out"
    convert(ours, foreign, to=to, options=_OPTIONS[to])
    convert(foreign, out, to="optimus")
    expected = tensors_of(out)
    refused = 0
    for number, pattern in enumerate(_FILES[to]):
        file = sorted(foreign.glob(pattern))[0]
        good = file.read_bytes()
        flippable = 8 + int.from_bytes(good[:8], "little") if file.suffix == ".safetensors" else len(good)
        for data in damaged(good, 0, flippable, 100 + number):
            file.write_bytes(data)
            shutil.rmtree(out, ignore_errors=True)
            try:
                convert(foreign, out, to="optimus")
            except (CheckpointError, ConfigError) as error:
                refused += 1
                told = str(error)
                assert "\n" not in told and len(told) < 500, told
                assert file.name in told or (file.suffix in (".safetensors", ".json") and str(foreign) in told), told
                assert not out.exists()
            else:
                assert file.suffix == ".json" or tensors_of(out) == expected, (file, data)
        file.write_bytes(good)
    assert refused > 6 * len(_FILES[to])


@pytest.mark.parametrize("numbers", [{"layers": 10**9}, {"layers": 10**9, "width": 10**12 + 39}, {"experts": 10**15}])
def test_a_model_larger_than_any_is_refused_before_it_is_described(ours, tmp_path, numbers):
    """Listing the names of a billion layers would take all memory there is; 10^12 + 39 is a prime."""
    convert(ours, tmp_path / "hf", to="hf")
    file = tmp_path / "hf" / "config.json"
    names = {"layers": "num_hidden_layers", "width": "hidden_size", "experts": "num_experts"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {names[key]: n for key, n in numbers.items()}))
    [path] = shutil.copytree(ours, tmp_path / "ours").glob("step-*")
    body = json.loads((path / MANIFEST_NAME).read_text())
    names = {"layers": "num_layers", "width": "hidden_size", "experts": "num_experts"}
    body["config"]["model"] |= {names[key]: n for key, n in numbers.items()}
    text = json.dumps(body["config"], sort_keys=True, separators=(",", ":"))
    body["config_xxh3_128"] = xxhash.xxh3_128_hexdigest(text.encode())
    (path / MANIFEST_NAME).write_bytes(sealed(body))
    for source in (tmp_path / "hf", path):
        to = "optimus" if source.name == "hf" else "hf"
        with pytest.raises((CheckpointError, ConfigError), match=r"num_layers=|hidden_size=") as caught:
            convert(source, tmp_path / "out", to=to)
        assert str(source) in str(caught.value) or "hidden_size=" in str(caught.value)


_JUNK = (None, -1, 1e300, "x", [], {"a": 1}, [1, 2], torch.zeros(3), torch.zeros(()), b"x", argparse.Namespace(a=1))


@pytest.mark.parametrize("to", ["megatron", "zero", "universal"])
def test_sound_files_with_something_else_in_them(to, ours, tmp_path):
    """Every field near the top, replaced by a value of another type and saved with right checksums."""
    foreign, out = tmp_path / to, tmp_path / "out"
    convert(ours, foreign, to=to, options=_OPTIONS[to])
    for sidecar in foreign.rglob("optimus_model.json") if to == "megatron" else ():
        sidecar.unlink()  # then the arguments in the file count
    draw = random.Random(5)
    for pattern in [pattern for pattern in _FILES[to] if pattern.endswith(".pt")]:
        file = sorted(foreign.glob(pattern))[0]
        good = file.read_bytes()

        def content(good=good):
            return torch.load(io.BytesIO(good), weights_only=False)

        fields = [()] + [(name,) for name in content()] if isinstance(content(), dict) else [()]
        fields += [("args", name) for name in vars(content()["args"])] if to == "megatron" else []
        for field in fields:
            tree, junk = content(), draw.choice(_JUNK)
            if len(field) == 2:
                setattr(tree["args"], field[1], junk)
            elif field:
                tree[field[0]] = junk
            torch.save(tree if field else junk, file)
            shutil.rmtree(out, ignore_errors=True)
            try:
                convert(foreign, out, to="optimus")
            except (CheckpointError, ConfigError) as error:
                assert "\n" not in str(error) and str(foreign) in str(error), error
                assert not out.exists()
            else:
                assert (out / MANIFEST_NAME).exists()
        file.write_bytes(good)
