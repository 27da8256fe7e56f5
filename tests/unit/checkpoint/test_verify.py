"""The verifier and its command line."""

import pytest

from megatron.optimus.checkpoint import CheckpointError, load_manifest, save
from megatron.optimus.checkpoint.verify import compare, find_damage, verify
from tests.unit.checkpoint.helpers import CONFIG, damage, owned, two_checkpoints, whole_state


@pytest.fixture
def two(tmp_path):
    return two_checkpoints(tmp_path)


@pytest.mark.parametrize("jobs", [1, 4])
def test_every_bad_tensor_is_listed(two, jobs):
    assert verify(two[0], jobs=jobs).step == 1
    damage(two[0], ("dense.weight", "exp_avg"), ("seen", "buffer"))
    lines = find_damage(two[0], load_manifest(two[0]), jobs=jobs)
    assert len(lines) == 2 and "dense.weight (exp_avg)" in lines[0] and "seen (buffer)" in lines[1]
    with pytest.raises(CheckpointError, match="exp_avg"):
        verify(two[0])


def test_compare(two, tmp_path):
    differences = {(d.name, d.kind): d for d in compare(*two, jobs=2)}
    assert differences.keys() == whole_state(1).keys()
    [(key, changed)] = [(key, d) for key, d in differences.items() if not d.is_same]
    assert key == ("dense.weight", "master")
    assert (changed.num_different, changed.numel) == (1, 35) and changed.max_abs == pytest.approx(0.5)
    fewer = [piece for piece in owned(whole_state(1)) if piece.name != "flag"]
    other = save(tmp_path / "other", 1, fewer, kind="full", consumed_samples=0, config=CONFIG, metadata={})
    [missing] = [d for d in compare(two[0], other) if d.reason]
    assert missing.name == "flag" and str(other) in missing.reason and missing.only_in == two[0]
