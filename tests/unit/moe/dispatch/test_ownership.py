"""A placement file that cannot be used: the option, the file and the reason in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.context import RunContext
from megatron.optimus.moe.dispatch.ownership import read_placements
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
