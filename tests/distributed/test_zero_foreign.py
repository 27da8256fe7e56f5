"""A model that is not ours, from a file of DeepSpeed's options: stage 1 by us, stage 3 handed on."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed_ext
from tests.helpers import run_distributed

CONFIG = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}


class _Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - y).square().mean()


def _train_foreign(rank: int, world: int, path: str, torch_style: bool) -> dict[str, Any]:
    torch.manual_seed(rank)
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
    y = x.sum(dim=1, keepdim=True)
    engine, optimizer, loader, scheduler = deepspeed_ext.initialize(
        model=_Foreign(), config=path, training_data=torch.utils.data.TensorDataset(x, y)
    )
    assert type(optimizer) is deepspeed_ext.EPZeroOptimizer and type(optimizer.optimizer) is torch.optim.AdamW
    torch.manual_seed(0)
    for param, first in zip(engine.module.parameters(), _Foreign().parameters(), strict=True):
        assert torch.equal(param, first), "every rank must start from the first rank's weights"
    assert scheduler is not None and len(loader) == len(x) // (2 * world)
    losses, rates = [], []
    for _ in range(8):
        for first in range(0, len(x), 2 * world):
            mine = slice(first + 2 * rank, first + 2 * rank + 2)
            loss = engine(x[mine], y[mine])
            if torch_style:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            rates.append(optimizer.param_groups[0]["lr"])
    weights = [p.detach().clone() for p in engine.module.parameters()]
    return {"losses": losses, "rates": rates, "weights": weights, "steps": optimizer.step_count}


def _foreign(rank: int, world: int, path: str) -> list[dict[str, Any]]:
    deepspeed_ext.init_distributed()
    results = [_train_foreign(rank, world, path, torch_style) for torch_style in (False, True)]
    deepspeed_ext.shutdown()
    return results


def test_foreign_dense_model_trains_from_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
                "gradient_clipping": 1.0,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "betas": [0.9, 0.99], "weight_decay": 0.0}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 4}},
                "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
            }
        )
    )
    results = run_distributed(_foreign, 2, str(path))
    for result, torch_style in results:
        assert result["losses"] == torch_style["losses"], "engine.backward(loss) and loss.backward() must agree"
        assert sum(result["losses"][-4:]) < 0.5 * sum(result["losses"][:4])
        assert result["steps"] == len(result["losses"]) // 2
        assert result["rates"][-1] == 0.05 and result["rates"][0] < 0.05
    assert all(torch.equal(a, b) for a, b in zip(results[0][0]["weights"], results[1][0]["weights"], strict=True))


def _delegated(rank: int, world: int) -> str:
    deepspeed_ext.init_distributed()
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}}}
    config = {**CONFIG, **optimizer, "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, wrapped, _, _ = deepspeed_ext.initialize(model=_Foreign(), config=config)
        engine.backward(engine(torch.ones(2, 6), torch.ones(2, 1)))
        engine.step()
    assert dist.is_initialized()
    deepspeed_ext.shutdown()
    assert not dist.is_initialized()
    return type(wrapped).__name__


def test_stage_three_is_deepspeeds_own() -> None:
    assert run_distributed(_delegated, 2) == ["DeepSpeedZeroOptimizer_Stage3"] * 2
