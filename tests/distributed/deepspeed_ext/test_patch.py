"""The Trainer of transformers with deepspeed_ext in the place of DeepSpeed, compared value by value with stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import deepspeed_ext
from tests.distributed.deepspeed_ext.stock import config_for
from tests.helpers import run_distributed

WORLD = 2
TRAINER_CONFIG: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto"}
        | {"warmup_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
}


def _with_trainer(folder: Path, steps: int, resume: str | None) -> dict[str, Any]:
    """Trains a small Llama with the Trainer of transformers. Returns losses, norms, weights and who trained."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
    )
    tokens = torch.randint(0, 32, (48, 8), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=steps,
        learning_rate=0.01,
        weight_decay=0.1,
        warmup_steps=1,
        logging_steps=1,
        save_steps=2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        deepspeed=config_for(deepspeed.initialize, TRAINER_CONFIG),
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    engine = trainer.deepspeed
    return {
        "losses": [entry["loss"] for entry in history],
        "norms": [entry["grad_norm"] for entry in history],
        "rates": [entry["learning_rate"] for entry in history],
        "weights": [param.detach().clone() for param in engine.module.parameters()],
        "optimizer": type(engine.optimizer).__name__,
    }


def _trainers(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    deepspeed_ext.init_distributed()
    from deepspeed_ext import patch

    patch.apply()
    patch.apply()
    assert deepspeed.initialize is deepspeed_ext.initialize
    ours = Path(folder, "ours")
    whole = _with_trainer(ours, 4, None)
    resumed = _with_trainer(Path(folder, "resumed"), 4, str(ours / "checkpoint-2"))
    patch.undo()
    assert deepspeed.initialize is not deepspeed_ext.initialize
    stock = _with_trainer(Path(folder, "stock"), 4, None)
    deepspeed_ext.shutdown()
    return [whole, resumed, stock]


def test_trainer_of_transformers_trains_and_resumes_as_with_stock_deepspeed(tmp_path: Path) -> None:
    for whole, resumed, stock in run_distributed(_trainers, WORLD, str(tmp_path)):
        assert whole["optimizer"] == resumed["optimizer"] == "EPZeroOptimizer"
        assert stock["optimizer"] == "DeepSpeedZeroOptimizer"
        assert len(whole["losses"]) == 4
        assert whole["losses"] == pytest.approx(stock["losses"], rel=1e-5)
        assert whole["norms"] == pytest.approx(stock["norms"], rel=1e-4)
        assert whole["rates"] == stock["rates"] == resumed["rates"]
        for ours, resumed_weight, weight in zip(whole["weights"], resumed["weights"], stock["weights"], strict=True):
            assert torch.equal(ours, resumed_weight)
            torch.testing.assert_close(ours, weight, rtol=1e-4, atol=2e-5)
