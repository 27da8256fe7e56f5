"""Checkpoints of stock DeepSpeed go on in ours as in stock, and its scripts and stock itself read ours."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed_ext
from tests.helpers import run_distributed

WORLD = 2
STOCK_TAKES_EMPTY = deepspeed.__version__ >= "0.19.6"  # before, its search for infinities fails on no elements
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def _train(engine: Any, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(batch(rank, step).to(next(engine.module.parameters()).dtype)))
        engine.step()


def _stock_checkpoint(rank: int, world: int, folder: str) -> list[tuple[str, list[torch.Tensor], list[torch.Tensor]]]:
    """Weights of stock DeepSpeed going on, and of ours after loading stock's checkpoint of step 2."""
    deepspeed_ext.init_distributed()
    found = []
    for stage, is_bf16 in ((1, False), (2, True)):
        zero = {"stage": stage, "reduce_bucket_size": 50}  # a weight lies in several buckets
        config = CONFIG | {"zero_optimization": zero, "bf16": {"enabled": is_bf16}}
        stock, *_ = deepspeed.initialize(model=Model(), config=copy.deepcopy(config))
        _train(stock, rank, 0, 2)
        stock.save_checkpoint(f"{folder}/{stage}")
        _train(stock, rank, 2, 5)
        ours, optimizer, _, _ = deepspeed_ext.initialize(model=Model(), config=copy.deepcopy(config))
        optimizer.keep_average(evaluates=False)
        ours.load_checkpoint(f"{folder}/{stage}")
        assert optimizer.step_count == 2
        assert all(torch.equal(shard.average, shard.master) for shard in optimizer._shards())
        _train(ours, rank, 2, 5)
        weights = [[p.detach().float().clone() for p in e.module.parameters()] for e in (stock, ours)]
        found.append((f"stage {stage}", *weights))
        stock.destroy()
        ours.destroy()
    deepspeed_ext.shutdown()
    return found


def test_a_stock_checkpoint_goes_on_in_ours_as_in_stock(tmp_path: Path) -> None:
    for results in run_distributed(_stock_checkpoint, WORLD, str(tmp_path)):
        for what, stock, ours in results:
            for weight, expected in zip(ours, stock, strict=True):
                tolerance = 1e-5 if what == "stage 1" else 2e-2  # bf16: gradients are accumulated in fp32 by ours
                torch.testing.assert_close(weight, expected, rtol=tolerance, atol=tolerance, msg=what)


class _WideModel(nn.Module):
    """Parameters in several buckets of 512 elements, one without elements, one that is frozen, and a buffer."""

    def __init__(self, num_experts: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 301), nn.Tanh(), nn.Linear(301, 7))
        self.empty = nn.Parameter(torch.zeros(0 if STOCK_TAKES_EMPTY else 1))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.register_buffer("offset", torch.full((7,), 0.5))
        if num_experts:
            self.experts = nn.Parameter(torch.ones(num_experts, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.layers(x) * self.frozen + self.offset
        if hasattr(self, "experts"):
            result = result * self.experts.sum(0)
        return result.square().mean() + self.empty.sum()


def _to_universal(source: str, target: str) -> None:
    import argparse

    from deepspeed.checkpoint.ds_to_universal import main

    options = {"keep_temp_folder": False, "num_extract_workers": 1, "num_merge_workers": 1, "strict": True}
    main(argparse.Namespace(input_folder=source, output_folder=target, inject_missing_state=True, **options))


def _whole_states(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Masters and moments by parameter, through what stock and ours have in common. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad and param.numel():
            states = {kind: safe_get_full_optimizer_state(param, kind) for kind in ("exp_avg", "exp_avg_sq")}
            found[name] = {"fp32": safe_get_full_fp32_param(param), **states}
            found[name] = {kind: tensor.detach().clone().view(param.shape) for kind, tensor in found[name].items()}
    return found


def _mend_mappings(stock: Any) -> None:
    """Stock before 0.19.7 has exp_avg_sq in the place of masters for safe_get_ after loading a universal checkpoint."""
    for group, params in enumerate(stock.optimizer.bit16_groups):
        masters = stock.optimizer.single_partition_of_fp32_groups[group]
        for mapping in (param._hp_mapping for param in params if param._hp_mapping is not None):
            address = mapping.hp_fragment_address
            mapping.hp_fragment = masters.narrow(0, address.start, address.numel)


def _our_files(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    """What DeepSpeed's scripts and stock's engine make of checkpoints of ours, and what ours goes on with."""
    deepspeed_ext.init_distributed()
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    results = []
    for stage, is_bf16 in ((1, False), (1, True), (2, False), (2, True)):
        zero = {"stage": stage, "reduce_bucket_size": 512}
        config = CONFIG | {"zero_optimization": zero, "bf16": {"enabled": is_bf16}}
        ours, optimizer, _, _ = deepspeed_ext.initialize(model=_WideModel(), config=copy.deepcopy(config))
        assert len(optimizer.flat_buffers[0].buckets) > 2
        _train(ours, rank, 0, 2)
        path = f"{folder}/{stage}{is_bf16}"
        ours.save_checkpoint(path, tag="two")
        found: dict[str, Any] = {"ours": _whole_states(ours), "bf16": is_bf16}
        dist.barrier()
        if rank == 0:
            weights = get_fp32_state_dict_from_zero_checkpoint(path, tag="two")
            found["script"] = {name: tensor.clone() for name, tensor in weights.items()}
            _to_universal(f"{path}/two", f"{path}/two_universal")
            Path(path, "latest_universal").write_text("two_universal")
        dist.barrier()
        config |= {"checkpoint": {"load_universal": True}}
        stock, *_ = deepspeed.initialize(model=_WideModel(), config=copy.deepcopy(config))
        stock.load_checkpoint(path, tag="two_universal")
        again, optimizer, _, _ = deepspeed_ext.initialize(model=_WideModel(), config=copy.deepcopy(config))
        again.load_checkpoint(path)
        assert optimizer.step_count == stock.global_steps == 2
        _mend_mappings(stock)
        found |= {"stock": _whole_states(stock), "again": _whole_states(again)}
        for engine in (ours, stock, again):
            _train(engine, rank, 2, 4)
        found["after"] = [_whole_states(engine) for engine in (ours, stock, again)]
        with pytest.raises((RuntimeError, ValueError)):  # never the wrong elements
            _stock_without_universal(config).load_checkpoint(path, tag="two")
        results.append(found)
        for engine in (ours, stock, again):
            engine.destroy()
    results.append({"refused": _refused(folder)})
    deepspeed_ext.shutdown()
    return results


def _stock_without_universal(config: dict[str, Any]) -> Any:
    config = copy.deepcopy({key: value for key, value in config.items() if key != "checkpoint"})
    return deepspeed.initialize(model=_WideModel(), config=config)[0]


def _refused(folder: str) -> list[str]:
    """The errors of scripts on experts that are spread over ranks, and on an optimizer without Adam's moments."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    messages = []
    plain = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    for num_experts in (2, 0):
        model = _WideModel(num_experts)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed_ext.initialize(
            model=model,
            optimizer=sgd,
            config=dict(plain),
            is_expert=lambda name: "ep_size_2" if name == "experts" else None,
        )
        path = f"{folder}/refused{num_experts}"
        engine.save_checkpoint(path, tag="zero")
        dist.barrier()
        if dist.get_rank() == 0:
            try:
                if num_experts:
                    get_fp32_state_dict_from_zero_checkpoint(path, tag="zero")
                else:
                    _to_universal(f"{path}/zero", f"{path}/universal")
            except ValueError as error:
                messages.append(str(error))
        dist.barrier()
        engine.destroy()
    return messages


def test_scripts_of_deepspeed_read_our_checkpoints_and_stock_goes_on_from_them(tmp_path: Path) -> None:
    ranks = run_distributed(_our_files, WORLD, str(tmp_path))
    for *results, _ in ranks:
        for found in results:
            for what in ("stock", "again"):
                for name, states in found["ours"].items():
                    for kind, tensor in states.items():
                        assert torch.equal(found[what][name][kind], tensor), (what, name, kind)
            ours, stock, again = found["after"]
            for name, states in ours.items():
                for kind, tensor in states.items():
                    assert torch.equal(again[name][kind], tensor), (name, kind)
                    tolerance = 2e-2 if found["bf16"] else 1e-5  # stock adds gradients in the parameters' dtype
                    torch.testing.assert_close(stock[name][kind], tensor, rtol=tolerance, atol=tolerance, msg=name)
    *results, refused = ranks[0]
    for found in results:
        expected = {name: states["fp32"] for name, states in found["ours"].items()}
        for name, tensor in expected.items():
            assert torch.equal(found["script"][name], tensor), name
        assert torch.equal(found["script"]["offset"], torch.full((7,), 0.5))
    experts, sgd = refused["refused"]
    assert "spread over ranks" in experts and "safe_get_full_fp32_param" in experts
    assert "SGD keeps no state 'exp_avg'" in sgd
