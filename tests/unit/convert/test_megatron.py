"""Conversion against megatron-core: it loads our files and gives our logits, and its files come back bit for bit."""

from __future__ import annotations

import pytest
import torch

from megatron.optimus.checkpoint import CheckpointError, load_manifest
from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.config.serialize import from_dict
from megatron.optimus.convert import Options, convert, open_source
from tests.helpers import run_distributed
from tests.unit.convert import megatron_core_model as core
from tests.unit.convert.megatron_cases import SMALL, our_checkpoint

pytest.importorskip("megatron.core")


# tensor-, pipeline-, expert-parallel size, MoE, QK-norm per head, tied embeddings, shared experts, dense first layer
_LOADED = [
    (1, 1, 1, False, True, True),
    (2, 1, 1, False, False, False),
    (1, 1, 2, True, True, False),
    (2, 1, 1, True, False, False),
    (2, 1, 1, True, False, False, True),
    (2, 1, 1, True, False, False, True, True),
    (1, 1, 2, True, True, False, False, True),
]
_WRITTEN = [
    (2, 2, 1, False, True, True),
    (1, 2, 2, True, True, False),
    (2, 1, 1, True, False, False),
    (2, 2, 1, True, False, False, True),
    (1, 2, 2, True, True, False, True),
    (1, 2, 2, True, False, False, False, True),
]


def test_megatron_core_loads_our_files_and_computes_the_same(tmp_path):
    tokens = torch.randint(0, core.VOCAB, (2, 13))
    expected, cases = [], []
    for number, case in enumerate(_LOADED):
        ours = our_checkpoint(tmp_path / f"ours{number}", ModelConfig(**core.shape(*case[3:])))
        options = Options(tp=case[0], pp=case[1], ep=case[2], transformer_engine=False)
        convert(tmp_path / f"ours{number}", tmp_path / f"m{number}", to="megatron", options=options, verify=True)
        with torch.no_grad():
            expected.append(ours(tokens).logits_BSV)
        cases.append((str(tmp_path / f"m{number}" / "iter_0000005"), case))
    answers = run_distributed(core.load_our_files, 2, cases, tokens, timeout=300)
    for number, case in enumerate(_LOADED):
        columns = dict(answer[number] for answer in answers)
        found = torch.cat([columns[tp_rank] for tp_rank in range(case[0])], dim=-1)
        assert found.shape == expected[number].shape
        difference = (found - expected[number]).abs().max() / expected[number].abs().max()
        assert difference <= 1e-5, (case, difference)


def test_files_of_megatron_core_come_back_bit_for_bit(tmp_path):
    run_distributed(
        core.write_files, 4, [(str(tmp_path / f"m{n}"), case) for n, case in enumerate(_WRITTEN)], timeout=300
    )
    for number, (tp, pp, ep, *kind) in enumerate(_WRITTEN):
        source, ours, back = (tmp_path / f"{name}{number}" for name in ("m", "ours", "back"))
        values = "\n".join(f"  {n}: {getattr(v, 'value', v)}" for n, v in core.shape(*kind).items())
        (tmp_path / "model.yaml").write_text(f"model:\n{values}\n")
        with pytest.raises(CheckpointError, match="has no 'args'; describe the model with --model-config"):
            open_source(source)
        convert(source, ours, to="optimus", model_config=tmp_path / "model.yaml", verify=True)
        assert from_dict(load_manifest(ours).config).model == ModelConfig(**core.shape(*kind))
        options = Options(tp=tp, pp=pp, ep=ep, transformer_engine=False)
        convert(ours, back, to="megatron", options=options, verify=True)
        files = {file.parent.name: file for file in source.glob("iter_0000007/*/*.pt")}
        again = {file.parent.name: file for file in back.glob("iter_*/*/*.pt")}
        assert files.keys() == again.keys() and len(files) == tp * pp * ep
        for folder, file in files.items():
            original = torch.load(file, weights_only=False)["model"]
            found = torch.load(again[folder], weights_only=False)["model"]
            original = {name: tensor for name, tensor in original.items() if isinstance(tensor, torch.Tensor)}
            assert original.keys() == found.keys()
            for name, tensor in original.items():
                assert torch.equal(found[name], tensor), (folder, name)


def test_missing_ranks_and_impossible_layouts(tmp_path):
    config = ModelConfig(**SMALL, qk_layernorm=False)
    our_checkpoint(tmp_path / "ours", config)
    for options, message in (
        (Options(tp=3), "tensor-parallel size 3 must divide num_query_groups=4"),
        (Options(pp=3), "--target-pipeline-parallel-size 3 must divide num_layers=4"),
        (Options(ep=2), "the model has no experts"),
    ):
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / "ours", tmp_path / "mcore", to="megatron", options=options)
    convert(tmp_path / "ours", tmp_path / "mcore", to="megatron", options=Options(tp=2, pp=2))
    [file] = (tmp_path / "mcore").glob("iter_*/mp_rank_00_001/*.pt")
    file.unlink()
    file.parent.rmdir()
    with pytest.raises(CheckpointError, match="files are missing for the ranks tp 0 pp 1 ep 0"):
        open_source(tmp_path / "mcore")
    (tmp_path / "mcore" / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(CheckpointError, match="is neither an iteration nor 'release'"):
        open_source(tmp_path / "mcore")
