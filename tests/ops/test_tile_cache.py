"""The file of tuned tiles, without Triton: what is written is read, and what is believed."""

from __future__ import annotations

import json
import multiprocessing as mp
from pathlib import Path
from typing import Any

import pytest

from megatron.optimus.ops.triton import tile_cache
from megatron.optimus.ops.triton.candidates import CANDIDATES, as_record
from megatron.optimus.platform import environment
from tests.ops.tile_cases import FIRST, H200, PRODUCT, SECOND, THIRD, chosen, entry

pytestmark = pytest.mark.usefixtures("file")


def test_round_trip_through_the_file(file: Path) -> None:
    first, other = (
        {str(PRODUCT): entry(SECOND, matches_default_bits=False)},
        {"up_swiglu x": entry(CANDIDATES["up_swiglu"][1])},
    )
    tile_cache.save(H200.key, first)
    tile_cache.save("another", other)
    tile_cache.save(H200.key, other)
    assert tile_cache.load() == {H200.key: {**first, **other}, "another": other}
    assert chosen(PRODUCT) == SECOND
    tile_cache.save(H200.key, {str(PRODUCT): entry(THIRD)})
    assert tile_cache.load(file)[H200.key][str(PRODUCT)] == entry(THIRD)
    assert sorted(path.name for path in file.parent.iterdir()) == ["tiles.json", "tiles.json.lock"]


def test_no_file_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert tile_cache.load() == {} and chosen(PRODUCT) == FIRST and caplog.records == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"format": 1, "devi',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"[]",
        b"null",
        b'{"format": 2, "devices": {}}',
        b'{"format": 1, "devices": []}',
    ],
    ids=["empty", "cut", "binary", "deep", "list", "null", "later", "devices"],
)
def test_a_damaged_file_is_one_warning_and_replaced(
    file: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    assert [chosen(PRODUCT), chosen(PRODUCT, 7)] == [FIRST] * 2
    [record] = caplog.records
    assert record.levelname == "WARNING" and str(file) in record.getMessage() and "remove it" in record.getMessage()
    tile_cache.save(H200.key, {str(PRODUCT): entry(SECOND)})
    assert tile_cache.load()[H200.key] == {str(PRODUCT): entry(SECOND)}


def _changed(**values: Any) -> dict[str, Any]:
    record = as_record(entry(SECOND))
    record["tiles"] = {**record["tiles"], **values.pop("tiles", {})}
    return {**record, **values}


ILLEGAL = {
    "rows_times_weight 1": _changed(tiles={"rows": 96}),
    "rows_times_weight 2": _changed(tiles={"warps": "8"}),
    "rows_times_weight 3": _changed(tiles={"warps": 8.0}),
    "rows_times_weight 4": _changed(tiles={"stages": 10**9}),
    "rows_times_weight 5": _changed(microseconds=float("nan")),
    "rows_times_weight 6": _changed(is_exact="yes"),
    "rows_times_weight 7": {"tiles": list(SECOND)},
    "rows_times_weight 8": 5,
    "rows_times_weight 9": {k: v for k, v in _changed().items() if k != "default_microseconds"},
    "no_such_kernel 10": _changed(),
    "rows_times_weight 12": _changed(microseconds=10**400),
    "spread_rows 11": _changed(),  # tiles of another kernel
}


def test_entries_that_are_not_ours_are_left_out_and_kept_in_the_file(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.parent.mkdir()
    good = {str(PRODUCT): _changed()}
    file.write_text(json.dumps({"format": 1, "devices": {H200.key: {**ILLEGAL, **good}, "broken": 3}}))
    assert tile_cache.load() == {H200.key: {str(PRODUCT): entry(SECOND)}, "broken": {}}
    [record] = caplog.records
    assert f"{len(ILLEGAL) + 1} entries of {file}" in record.getMessage()
    tile_cache.save(H200.key, {"up_swiglu new": entry(CANDIDATES["up_swiglu"][0])})
    kept = json.loads(file.read_text())["devices"][H200.key]
    assert set(kept) == {*ILLEGAL, *good, "up_swiglu new"}  # another version of the library may know them


def test_a_folder_that_cannot_be_written_raises_and_leaves_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.parent.write_text("a file where the folder should be")
    with pytest.raises(OSError):
        tile_cache.save(H200.key, {})
    file.parent.unlink()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        tile_cache.save(H200.key, {})
    assert [path.name for path in file.parent.iterdir()] == ["tiles.json.lock"]


def _write(path: Path, writer: int) -> None:
    for number in range(10):
        problem = PRODUCT._replace(experts=writer, slots=2**number)
        tile_cache.save(f"device {writer % 2}", {str(problem): entry(SECOND)}, path)


def test_many_processes_write_at_once_and_no_entry_is_lost(file: Path) -> None:
    context = mp.get_context("fork")
    writers = [context.Process(target=_write, args=(file, writer)) for writer in range(6)]
    for process in writers:
        process.start()
    while any(process.is_alive() for process in writers):
        tile_cache.load(file)
        if file.exists():
            json.loads(file.read_text())  # never half a file
    assert [process.exitcode for process in writers] == [0] * 6
    found = tile_cache.load(file)
    assert {key: len(entries) for key, entries in found.items()} == {"device 0": 30, "device 1": 30}
    assert len(list(file.parent.iterdir())) == 2


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    assert environment.tiles_file() == file
    for unset in ("", None):
        monkeypatch.setenv("OPTIMUS_TILES", "") if unset == "" else monkeypatch.delenv("OPTIMUS_TILES")
        monkeypatch.setenv("HOME", "/home/of/someone")
        assert environment.tiles_file() == Path("/home/of/someone/.cache/optimus/triton_tiles.json")
