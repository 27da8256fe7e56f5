"""Universal checkpoints of stock DeepSpeed and of the converter, loaded by the sharded optimizer at other layouts."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed_ext
from deepspeed_ext.optimizers import OPTIMIZERS
from megatron.optimus.convert import Options, convert
from megatron.optimus.models.huggingface.config import hf_config
from tests.helpers import run_distributed
from tests.unit.convert import stock_deepspeed as stock
from tests.unit.convert.test_deepspeed import merged, moe_config

STEPS, EXPERTS = 3, stock.SHAPE["experts"]
CASES: dict[str, stock.Case] = {"dense": ("decoder", 1, 1, "bf16"), "moe": ("moe", 1, 2, "fp32")}
_NATIVE_EXPERT = re.compile(r"(.*deepspeed_experts\.)(\d+)(\..*)")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Universal folders "dense" (by ds_to_universal), "modules" and "stacked" (by the converter: every expert a module,
    all experts of a layer one tensor), and the states that stock DeepSpeed then had, by case."""
    from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal

    folder = tmp_path_factory.mktemp("universal")
    ranks = run_distributed(stock.write_checkpoints, 2, str(folder / "stock"), CASES, timeout=400)
    states = {case: merged([rank[case] for rank in ranks], CASES[case][2]) for case in CASES}
    tag = f"global_step{STEPS}_universal"
    options = {"keep_temp_folder": False, "num_extract_workers": 1, "num_merge_workers": 1, "strict": True}
    source, target = folder / "stock/dense" / f"global_step{STEPS}", folder / "dense" / tag
    ds_to_universal(
        argparse.Namespace(input_folder=str(source), output_folder=str(target), inject_missing_state=True, **options)
    )
    (folder / "dense/latest_universal").write_text(tag)
    (folder / "config.json").write_text(json.dumps(hf_config(moe_config(), "float32")))
    convert(folder / "stock/moe", folder / "ours", to="optimus", model_config=folder / "config.json")
    for name, names in (("modules", "hf-native-moe"), ("stacked", "optimus")):
        convert(folder / "ours", folder / name, to="universal", options=Options(names=names))
    return folder, states


class Tree(nn.Module):
    """Parameters under given dotted names, without a forward."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for step in path:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module._modules[step]  # type: ignore[assignment]
            module.register_parameter(last, nn.Parameter(torch.zeros(shape)))


def _stacked_shapes(folder: Path, ep: int) -> dict[str, tuple[int, ...]]:
    """Of the model that a folder of the converter holds, with this rank's share of the experts."""
    shapes = {}
    for entry in sorted((folder / f"global_step{STEPS}_universal/zero").iterdir()):
        if entry.is_dir():
            shape = tuple(torch.load(entry / "fp32.pt")["param"].shape)
            shapes[entry.name] = (shape[0] // ep, *shape[1:]) if len(shape) == 3 else shape
    return shapes


def _engine(model: nn.Module, stage: int, **arguments: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
        "checkpoint": {"load_universal": True},
        **arguments.pop("config", {}),
    }
    optimizer = arguments.pop("optimizer", torch.optim.AdamW)(model.parameters(), lr=0.5)
    return deepspeed_ext.initialize(model=model, optimizer=optimizer, config=config, **arguments)[0]


def _state(engine: Any) -> list[tuple[str, int, dict[str, torch.Tensor]]]:
    shards = engine.optimizer.state_shards()
    return [(s.name, s.start, {kind: t.clone() for kind, t in s.tensors.items()}) for s in shards]


def _load(rank: int, world: int, folder: str) -> dict[str, Any]:
    deepspeed_ext.init_distributed()
    found: dict[str, Any] = {}
    for stage in (1, 2):
        dense = _engine(stock.decoder_model(), stage, config={"bf16": {"enabled": True}})
        dense.optimizer.keep_average(evaluates=False)
        path, client = dense.load_checkpoint(f"{folder}/dense")
        for shard in dense.optimizer._shards():
            assert torch.equal(shard.average, shard.master), "it begins anew at the weights"
            shard.average = None
        assert path is not None and path.endswith(f"global_step{STEPS}_universal")
        assert client["consumed_samples"] == 12 and dense.global_steps == STEPS
        assert dense.optimizer.param_groups[0]["lr"] == 1e-2, "the hyperparameters are the checkpoint's"
        assert dense.optimizer.step_count == STEPS
        weights = {name: param.detach().clone() for name, param in dense.module.named_parameters()}
        found[f"dense{stage}"] = (_state(dense), weights)
    stock.train(dense, rank, 1)  # and training goes on
    assert dense.optimizer.step_count == STEPS + 1 and not dense.optimizer.overflow
    for ep in (1, 2, 4):
        modules = _engine(stock.MoEModel(ep), 1)
        modules.load_checkpoint(f"{folder}/modules", load_optimizer_states=ep != 1)
        assert modules.optimizer.step_count == (STEPS if ep != 1 else 0)
        found[f"modules{ep}"] = _state(modules)
        names = _stacked_shapes(Path(folder) / "stacked", ep)
        experts = {name for name, shape in names.items() if len(shape) == 3}
        stacked = _engine(
            Tree(names), 2, is_expert=lambda name, ep=ep, e=experts: f"ep_size_{ep}" if name in e else None
        )
        stacked.load_checkpoint(f"{folder}/stacked")
        found[f"stacked{ep}"] = _state(stacked)
    found["errors"] = _errors(Path(folder))
    deepspeed_ext.shutdown()
    return found


def _errors(folder: Path) -> list[str]:
    """Of a model with another shape, one with another parameter, a damaged file on disk, a folder that is none."""
    messages = []
    wrong = {"embedding.weight": (3, 5)}
    for where, shapes in (("dense", wrong), ("dense", {"other": (2,)}), ("damaged", {"embedding.weight": (64, 16)})):
        engine = _engine(Tree(shapes), 1)
        before = _state(engine)
        try:
            engine.load_checkpoint(str(folder / where))
            messages.append("no error")
        except ValueError as error:
            messages.append(str(error))
        after = _state(engine)
        assert all(torch.equal(a[2]["master"], b[2]["master"]) for a, b in zip(before, after, strict=True))
    adafactor = _engine(Tree({"embedding.weight": (64, 16)}), 1, optimizer=OPTIMIZERS["Adafactor"])
    with pytest.raises(ValueError, match=r"holds no states of whole matrices or tensors, which Adafactor has"):
        adafactor.load_checkpoint(str(folder / "dense"))
    with pytest.raises(ValueError, match="latest_universal does not exist"):
        engine.load_checkpoint(str(folder / "stock"))
    # what one rank alone sees otherwise
    with pytest.raises(ValueError, match=r"latest_universal does not exist.* \(on 1 rank\(s\), first rank 2\)"):
        engine.load_checkpoint(str(folder / ("stock" if dist.get_rank() == 2 else "dense")))
    (folder / "dense/another/zero").mkdir(parents=True, exist_ok=True)
    with pytest.raises(ValueError, match=r"to load: rank 0 has global_step\d+_universal, rank 3 has another"):
        engine.load_checkpoint(str(folder / "dense"), tag="another" if dist.get_rank() == 3 else None)
    return messages


def _assert_holds(shards: list[Any], rank: int, ep: int, expected: dict[str, dict[str, torch.Tensor]]) -> int:
    """Every shard holds its part of the whole tensors, bit for bit; returns how many elements that were."""
    count = 0
    for name, start, tensors in shards:
        native = _NATIVE_EXPERT.fullmatch(name)
        known = f"{native[1]}{rank % ep * (EXPERTS // ep) + int(native[2])}{native[3]}" if native else name
        for kind, tensor in tensors.items():
            whole = expected[kind][known]
            if whole.dim() == 3:
                whole = whole.chunk(ep)[rank % ep]
            assert torch.equal(tensor, whole.flatten()[start : start + tensor.numel()]), (name, kind)
            count += tensor.numel()
    return count


def test_loads_at_any_layout(checkpoints: tuple[Path, dict[str, Any]]) -> None:
    folder, states = checkpoints
    shutil.copytree(folder / "dense", folder / "damaged", dirs_exist_ok=True)
    file = folder / f"damaged/global_step{STEPS}_universal/zero/embedding.weight/exp_avg.pt"
    raw = file.read_bytes()
    file.write_bytes(raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 1]) + raw[len(raw) // 2 + 1 :])
    tag = f"global_step{STEPS}_universal"
    stacked = {
        kind: {
            entry.name: torch.load(entry / f"{file}.pt")["param"]
            for entry in (folder / "stacked" / tag / "zero").iterdir()
            if entry.is_dir()
        }
        for kind, file in (("master", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"))
    }
    assert any(tensor.dim() == 3 for tensor in stacked["master"].values())
    whole = sum(tensor.numel() for kind in stacked.values() for tensor in kind.values())
    (folder / "dense" / tag / "notes.pt").write_text("somebody's own file, which nothing reads")
    results = run_distributed(_load, 4, str(folder), timeout=300)
    for rank, found in enumerate(results):
        for stage in (1, 2):
            shards, weights = found[f"dense{stage}"]
            _assert_holds(shards, rank, 1, states["dense"])
            for name, weight in weights.items():
                assert torch.equal(weight, states["dense"]["master"][name].bfloat16()), name
        wrong_shape, no_file, damaged = found["errors"]
        assert "has shape (64, 16), the model needs (3, 5)" in wrong_shape
        assert "other/fp32.pt does not exist" in no_file
        assert "embedding.weight/exp_avg.pt cannot be read: BadZipFile: Bad CRC-32" in damaged  # one bit of a tensor
    for ep in (2, 4):
        counts = [_assert_holds(found[f"modules{ep}"], rank, ep, states["moe"]) for rank, found in enumerate(results)]
        assert sum(counts) == sum(
            t.numel() for kind in ("master", "exp_avg", "exp_avg_sq") for t in states["moe"][kind].values()
        )
    for ep in (1, 2, 4):
        counts = [_assert_holds(found[f"stacked{ep}"], rank, ep, stacked) for rank, found in enumerate(results)]
        assert sum(counts) == whole
    masters_only = [[(n, s, {"master": t["master"]}) for n, s, t in found["modules1"]] for found in results]
    assert all(_assert_holds(shards, rank, 1, states["moe"]) for rank, shards in enumerate(masters_only))
    assert all(not t["exp_avg"].any() for found in results for _, _, t in found["modules1"])
