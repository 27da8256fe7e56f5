"""Drawing from several corpora: shares, stages, coverage, resume."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.data.dataset import Split
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.loader import BatchLoader
from megatron.optimus.data.mixture import Mixture, log_plan
from megatron.optimus.data.sources import Sources

from .cases import STAGES, YAML, L, blend, window_of


def mixture(
    sources: Sources, part: Split = Split.TRAIN, split: str = "1,0,0", seed: int = 3, extra_token: bool = True
) -> Mixture:
    return Mixture(sources, L, split=split, part=part, seed=seed, extra_token=extra_token)


def test_shares_and_coverage(corpora_folder: Path) -> None:
    mixed = mixture(blend(corpora_folder, YAML))
    assert (len(mixed), mixed.names) == (130, ["web", "code", "wiki"])
    ids = mixed.ids_at(0, 1000)
    corpora = np.searchsorted([90, 120, 130], ids, side="right")
    assert corpora.tolist() == mixed.corpora_at(0, 1000).tolist()
    for n in range(1, 1001):
        for i, share in enumerate((0.6, 0.3, 0.1)):
            assert abs(np.count_nonzero(corpora[:n] == i) - n * share) <= 1 + 1e-9
    assert mixed.counts(1000) == [600, 300, 100]
    for i, (low, size) in enumerate([(0, 90), (90, 30), (120, 10)]):
        drawn = ids[corpora == i]
        epochs = [drawn[at : at + size].tolist() for at in range(0, len(drawn) - size + 1, size)]
        assert all(sorted(epoch) == list(range(low, low + size)) for epoch in epochs)
        assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])


def test_reading_and_describing_a_sample(corpora_folder: Path) -> None:
    mixed = mixture(blend(corpora_folder, YAML))
    for position in range(0, 200, 7):
        (i,) = mixed.ids_at(position, 1).tolist()
        window, sample = window_of(mixed, i), mixed.sample(position)
        assert (np.diff(window) == 1).all() and mixed.locate(i) == (sample.prefix, sample.ranges)
        base = {"web": 0, "code": 10_000, "wiki": 20_000}[sample.corpus] + 1000 * int(sample.prefix[-1])
        assert window[0] == base + sample.ranges[0][0]
    shorter = mixture(blend(corpora_folder, YAML), extra_token=False)
    assert shorter.ids_at(0, 500).tolist() == mixed.ids_at(0, 500).tolist()  # a run may switch at any step
    assert shorter.read(5)[0].tokens.tolist() == mixed.read(5)[0].tokens.tolist()
    assert (shorter.labels_per_sample, mixed.labels_per_sample) == (L - 1, L)
    assert [mixed.sample(p).epoch for p in range(0, 500) if mixed.sample(p).corpus == "wiki"] == sorted(
        [0, 1, 2, 3, 4] * 10
    )
    with pytest.raises(IndexError):
        mixed.read(130)


def test_stages_leave_the_past_alone_and_go_on_where_it_ended(corpora_folder: Path) -> None:
    plain, staged = mixture(blend(corpora_folder, YAML)), mixture(blend(corpora_folder, YAML + STAGES))
    assert staged.ids_at(0, 100).tolist() == plain.ids_at(0, 100).tolist()
    ids = staged.ids_at(0, 400)
    assert np.concatenate([staged.ids_at(at, 50) for at in range(0, 400, 50)]).tolist() == ids.tolist()
    corpora = staged.corpora_at(0, 400)
    assert np.bincount(corpora[100:200]).tolist() == [20, 30, 50]
    assert np.bincount(corpora[200:300], minlength=3).tolist() == [50, 0, 50]
    assert staged.counts(300) == [60 + 20 + 50, 30 + 30, 10 + 50 + 50]
    wiki = ids[corpora == 2]
    for at in range(0, 160, 10):  # no instance is skipped or repeated where a stage begins
        assert sorted(wiki[at : at + 10].tolist()) == list(range(120, 130))
    with pytest.raises(ConfigError, match="stages must follow each other; they start at samples"):
        mixture(blend(corpora_folder, YAML + STAGES.replace("1599", "700")))


def test_natural_shares(corpora_folder: Path) -> None:
    mixed = mixture(
        blend(
            corpora_folder, YAML.replace(", weight: 0.6", "").replace(", weight: 0.3", "").replace(", weight: 0.1", "")
        )
    )
    assert sorted(mixed.ids_at(0, 130).tolist()) == list(range(130))  # one epoch of everything


def test_order_of_a_corpus_does_not_depend_on_its_company(corpora_folder: Path) -> None:
    alone = mixture(blend(corpora_folder, "corpora: {code: {paths: ['code/*'], weight: 7}}")).ids_at(0, 60)
    mixed = mixture(blend(corpora_folder, YAML))
    assert (mixed.ids_at(0, 200)[mixed.corpora_at(0, 200) == 1] - 90).tolist() == alone.tolist()
    assert mixture(blend(corpora_folder, YAML), seed=4).ids_at(0, 60).tolist() != mixed.ids_at(0, 60).tolist()


def test_splits_of_a_mixture(corpora_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = {}
    for part in (Split.TRAIN, Split.VALID):
        mixed = mixture(blend(corpora_folder, YAML), part, "70,30,0")
        seen[part] = {int(token) for i in range(len(mixed)) for token in window_of(mixed, i)}
    assert not seen[Split.TRAIN] & seen[Split.VALID]
    with caplog.at_level(logging.WARNING, logger="optimus"):
        small = mixture(blend(corpora_folder, YAML), Split.VALID, "95,5,0")
    assert small.names == ["web", "code"] and "corpus wiki is not in the valid split" in caplog.text
    later = YAML.replace("weight: 0.6", "weight: 0").replace("weight: 0.3", "weight: 0")
    with pytest.raises(
        DataError, match=r"no corpus that the first stage draws from has an instance in the valid split"
    ):
        mixture(
            blend(corpora_folder, later + "stages: [{start_samples: 100, weights: {web: 1, code: 1, wiki: 0}}]"),
            Split.VALID,
            "95,5,0",
        )
    with pytest.raises(DataError, match=r"corpus wiki: .*too little data"):
        mixture(blend(corpora_folder, YAML), Split.TRAIN, "5,95,0")


def test_plan_and_dry_corpora(corpora_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = mixture(blend(corpora_folder, YAML)).plan(200)
    assert [(c.name, c.files, c.instances, c.samples) for c in plan] == [
        ("web", 3, 90, 120),
        ("code", 2, 30, 60),
        ("wiki", 1, 10, 20),
    ]
    with caplog.at_level(logging.INFO, logger="optimus"):
        log_plan(plan, 200, None)
    assert "corpus wiki: 1 file, 0.000 G tokens, 10.0000 % of the samples, 2.000 epochs (repeats)" in caplog.text
    log_plan(plan, 200, 2)
    with pytest.raises(DataError, match="corpus code runs dry: the run draws 60 samples of its 30 instances"):
        log_plan(plan, 200, 1.5)


def loader(sources: Sources, dp: int = 1, rank: int = 0, mbs: int = 2, gbs: int = 8, **options) -> BatchLoader:
    part = Split.TRAIN if options.get("shuffle", True) else Split.VALID
    return BatchLoader(
        mixture(sources, part, "80,20,0"),
        seq_length=L,
        global_batch_size=gbs,
        micro_batch_size=mbs,
        data_parallel_rank=rank,
        data_parallel_size=dp,
        seed=3,
        **options,
    )


def rows(sources: Sources, consumed: int, dp: int, mbs: int, gbs: int = 8) -> list[int]:
    """First tokens of a step's samples in the order of the global batch, put together from all ranks."""
    ranks = [loader(sources, dp, rank, mbs, gbs).batch(consumed) for rank in range(dp)]
    return torch.cat([ranks[r][m].tokens_BS[:, 0] for m in range(len(ranks[0])) for r in range(dp)]).tolist()


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_stopped_and_resumed_with_other_world_sizes(corpora_folder: Path, data: st.DataObject) -> None:
    """The log of sample ids of a run that stops at random steps equals the unbroken one's."""
    sources = blend(corpora_folder, YAML + STAGES)
    unbroken = [rows(sources, 8 * step, 1, 8) for step in range(30)]
    log, step = [], 0
    while step < 30:
        dp, mbs = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2]))
        loaders = [loader(sources, dp, rank, mbs) for rank in range(dp)]
        for _ in range(data.draw(st.integers(1, 30 - step))):
            batches = [each.batch(8 * step) for each in loaders]
            log.append(torch.cat([b[m].tokens_BS[:, 0] for m in range(len(batches[0])) for b in batches]).tolist())
            step += 1
        [each.close() for each in loaders]
    assert log == unbroken


def test_global_batch_may_change_at_any_step(corpora_folder: Path) -> None:
    sources = blend(corpora_folder, YAML)
    small = [rows(sources, 8 * step, 2, 2) for step in range(6)]
    large = rows(sources, 16, 2, 2, gbs=16), rows(sources, 32, 4, 2, gbs=16)
    for i, batch in enumerate(large):
        assert Counter(batch) == Counter(small[2 * i + 2] + small[2 * i + 3])


def test_no_rank_sees_one_corpus_only(corpora_folder: Path) -> None:
    sources = blend(
        corpora_folder,
        YAML.replace("0.6", "1").replace("0.3", "1").replace("wiki: {paths: [wiki/part-0], weight: 0.1}", ""),
    )
    for rank in range(2):
        reader = loader(sources, dp=2, rank=rank, mbs=1)
        firsts = torch.cat([b.tokens_BS[:, 0] for step in range(25) for b in reader.batch(8 * step)])
        share = (firsts < 10_000).float().mean()
        assert 0.3 < share < 0.7
        reader.close()


def test_validation_of_a_mixture_is_fixed_and_has_every_corpus(corpora_folder: Path) -> None:
    sources = blend(corpora_folder, YAML)
    valid = loader(sources, shuffle=False, max_batches=2)
    assert valid.num_batches == 2
    first = [valid.batch(8 * step)[0].tokens_BS.tolist() for step in range(2)]
    assert first == [valid.batch(8 * step)[0].tokens_BS.tolist() for step in range(2)]
    corpora = {int(token) // 10_000 for step in range(2) for b in valid.batch(8 * step) for token in b.tokens_BS[:, 0]}
    assert corpora == {0, 1, 2}
    valid.close()


_ROWS_WITHOUT_TORCH = """
import json, sys
from megatron.optimus.config.schema import DataConfig
from megatron.optimus.data.dataset import Split
from megatron.optimus.data.mixture import Mixture, shuffled_rows
from megatron.optimus.data.dataset import SampleOptions, make_sample
from megatron.optimus.data.sources import read_sources
sources = read_sources(DataConfig(data_file_list=sys.argv[1]))
mixture = Mixture(sources, 8, split="1,0,0", part=Split.TRAIN, seed=3)
ids = mixture.ids_at(16, 8)[shuffled_rows(8, 16)[1::2]]
rows = [make_sample(mixture.read(i), 8, SampleOptions()) for i in ids.tolist()]
print(json.dumps([[row[0].tolist(), row[1].tolist()] for row in rows]))
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""


def test_rows_are_made_without_torch(corpora_folder: Path) -> None:
    """So the data's own memory is that of numpy, and tools start fast; rank 1 of 2 gets the same from the loader."""
    mixture = Mixture(blend(corpora_folder, YAML), L, split="1,0,0", part=Split.TRAIN, seed=3)
    options = {"micro_batch_size": 1, "data_parallel_rank": 1, "data_parallel_size": 2, "seed": 3}
    loader = BatchLoader(mixture, seq_length=L, global_batch_size=8, **options)
    expected = [[batch.tokens_BS[0].tolist(), batch.labels_BS[0].tolist()] for batch in loader.batch(16)]
    loader.close()
    command = [sys.executable, "-c", _ROWS_WITHOUT_TORCH, str(corpora_folder / "blend.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
