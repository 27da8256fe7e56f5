"""Generation and scores over several ranks equal those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.optimus.convert import Options, convert
from megatron.optimus.inference.generate import Limits, generate
from megatron.optimus.inference.sampling import Sampling
from megatron.optimus.inference.score import score
from megatron.optimus.platform.ranks import Ranks
from tests.helpers import run_distributed
from tests.unit.inference.cases import checkpoint, loaded, prompts

Results = tuple[list[list[int]], list[list[float]], list[list[float]]]


def results(path: Path, ranks: Ranks, parallel: dict[str, int]) -> Results:
    """Greedy and sampled tokens, their log-probabilities, and scores, of seven prompts in batches of two a rank."""
    model = loaded(path, ranks, **parallel)
    ids = prompts(7)
    completions = [
        completion
        for sampling in (Sampling(temperature=0), Sampling(temperature=0.8, top_k=50, seed=3))
        for completion in generate(model, ids, sampling, Limits(6, stops=("a",)), batch_size=2)
    ]
    scores = list(score(model, ids, batch_size=2))
    return [one.token_ids for one in completions], [one.logprobs for one in completions], [s.logprobs for s in scores]


def on_a_rank(rank: int, world_size: int, path: Path, parallel: dict[str, int]) -> Results:
    return results(path, Ranks(None, "cpu"), parallel)


@pytest.mark.parametrize(
    ("name", "to", "world_size", "parallel"),
    [
        ("dense", None, 2, dict(tensor_model_parallel_size=2)),
        ("dense", None, 2, {}),  # ranks share the prompts alone
        ("moe", None, 2, dict(expert_model_parallel_size=2)),
        ("moe", None, 4, dict(tensor_model_parallel_size=2, expert_model_parallel_size=4)),
        ("shared", None, 2, dict(tensor_model_parallel_size=2)),
        ("moe", "hf", 2, dict(tensor_model_parallel_size=2, expert_model_parallel_size=2)),
    ],
)
def test_several_ranks_equal_one(
    name: str, to: str | None, world_size: int, parallel: dict[str, int], tmp_path: Path
) -> None:
    path = checkpoint(tmp_path / "ours", name)
    if to is not None:
        convert(path, tmp_path / to, to=to, options=Options(dtype="fp32"))
        path = tmp_path / to
    tokens, logprobs, scores = results(path, Ranks.alone(), {})
    for found in run_distributed(on_a_rank, world_size, path, parallel):
        assert found[0] == tokens
        for left, right in zip(found[1] + found[2], logprobs + scores, strict=True):
            assert left == pytest.approx(right, abs=1e-4)
