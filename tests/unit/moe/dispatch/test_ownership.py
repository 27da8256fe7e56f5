"""Every expert has one owner; a placement file that cannot be used is named with its option and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ConfigError, ExpertPlacement
from megatron.optimus.context import RunContext
from megatron.optimus.moe.dispatch.ownership import Ownership, read_placements
from megatron.optimus.platform.mesh import Mesh


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file"), ("{}", "must hold 4 layers of 1 ranks")])
def test_what_cannot_be_read_is_named_with_its_option(tmp_path: Path, content: str | None, reason: str) -> None:
    file = tmp_path / "p.json"
    if content is not None:
        file.write_text(content)
    config = load(["--preset", "mula-tiny", "--moe-expert-placement-file", str(file)]).config
    mesh = Mesh(config.parallel, rank=0, world_size=1)
    with pytest.raises(ConfigError, match=rf"reading moe_expert_placement_file=.*p\.json failed on rank 0: .*{reason}"):
        read_placements(RunContext.of(config, mesh, torch.device("cpu")))


@pytest.mark.parametrize("placement", list(ExpertPlacement))
def test_every_expert_has_one_owner(placement: ExpertPlacement) -> None:
    ownership = Ownership.from_placement(12, 4, placement)
    owned = [ownership.expert_ids(rank) for rank in range(4)]
    assert sorted(expert for ids in owned for expert in ids) == list(range(12))
    owner_E, local_E = ownership.owner_and_local_id(torch.device("cpu"))
    for rank, ids in enumerate(owned):
        for local, expert in enumerate(ids):
            assert (owner_E[expert], local_E[expert]) == (rank, local)
