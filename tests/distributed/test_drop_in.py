"""deepspeed_ext in the place of DeepSpeed: the same programs with both, compared value by value on gloo ranks."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.utils._pytree import tree_map

import deepspeed_ext
from tests.helpers import run_distributed

WORLD = 2
STOCK_TAKES_EMPTY = deepspeed.__version__ >= "0.19.6"  # before, its search for infinities fails on no elements
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
        deepspeed=copy.deepcopy(TRAINER_CONFIG),
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


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
}


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def _poked(rank: int, initialize: Any) -> dict[str, Any]:
    """What clients read of an engine: gradients inside and after ``no_sync``, and the inner optimizer's steps."""
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.utils import safe_get_full_grad

    engine, optimizer, _, _ = initialize(model=_Model(), config=copy.deepcopy(CONFIG))
    params = list(engine.module.parameters())

    def gradients() -> list[torch.Tensor]:
        return [safe_get_full_grad(param).detach().float().clone() for param in params]

    found: dict[str, Any] = {"is ZeRO": isinstance(optimizer, ZeROOptimizer)}
    found["scales"] = [optimizer.loss_scaler.cur_scale, optimizer.loss_scaler.loss_scale, optimizer.loss_scale]
    with engine.no_sync():
        for step in range(2):
            engine.backward(engine(_batch(rank, step)))
            found[f"inside {step}"] = gradients()
    engine.backward(engine(_batch(rank, 2)))
    found["reduced"] = gradients()
    engine.step()
    engine.backward(engine(_batch(rank, 3)))
    engine.step()
    states = optimizer.optimizer.state
    found["steps"] = {
        float(states[master]["step"]) for group in optimizer.optimizer.param_groups for master in group["params"]
    }
    mapped = tree_map(lambda leaf: None, optimizer.optimizer.state_dict()["state"])  # as programs gather it
    found["mapped"] = [dict(sorted(state.items())) for state in mapped.values()]
    saved = io.BytesIO()
    torch.save(optimizer.optimizer.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)["state"].values()
    found["saved"] = [(type(state), float(state["step"]), state["exp_avg"].norm().item()) for state in loaded]
    found["live"] = [states[master]["exp_avg"].norm().item() for master in states if states[master]]
    found["assertions"] = _assertions(engine, initialize)
    engine.destroy()
    return found


def _assertions(engine: Any, initialize: Any) -> list[str]:
    """Which wrong calls a program can catch as AssertionError."""

    def coalesce_in_no_sync() -> None:
        with engine.no_sync(), engine.coalesce_grad_reduction():
            pass

    def step_in_no_sync() -> None:
        with engine.no_sync():
            engine.step()

    caught = []
    calls = {"vector": lambda: engine.backward(engine.module(_batch(0, 0)).reshape(1).expand(2))}
    calls |= {"no model": lambda: initialize(model=None, config=copy.deepcopy(CONFIG)), "step": step_in_no_sync}
    calls["batch"] = lambda: initialize(model=_Model(), config=copy.deepcopy(CONFIG) | {"train_batch_size": 7})
    if hasattr(DeepSpeedEngine, "coalesce_grad_reduction"):
        calls["coalesce"] = coalesce_in_no_sync
    for name, call in calls.items():
        try:
            call()
        except AssertionError:
            caught.append(name)
    return caught


def _pokes(rank: int, world: int) -> list[dict[str, Any]]:
    deepspeed_ext.init_distributed()
    results = [_poked(rank, deepspeed.initialize), _poked(rank, deepspeed_ext.initialize)]
    # Stage 3 goes back to DeepSpeed: its function may have been replaced by ours without the module patch.
    stock, deepspeed.initialize = deepspeed.initialize, deepspeed_ext.initialize
    try:
        engine, *_ = deepspeed.initialize(
            model=_Model(), config=copy.deepcopy(CONFIG) | {"zero_optimization": {"stage": 3}}
        )
        results.append({"stage 3": type(engine.optimizer).__name__})
    finally:
        deepspeed.initialize = stock
    dist.barrier()
    deepspeed_ext.shutdown()
    return results


def test_gradients_in_no_sync_and_inner_state_are_those_of_stock() -> None:
    for stock, ours, handed_back in run_distributed(_pokes, WORLD):
        assert handed_back == {"stage 3": "DeepSpeedZeroOptimizer_Stage3"}
        assert ours.keys() == stock.keys()
        assert ours["is ZeRO"] and stock["is ZeRO"]
        assert ours["steps"] == stock["steps"] == {2.0}
        assert ours["mapped"][0] == stock["mapped"][0] == dict.fromkeys(("exp_avg", "exp_avg_sq", "step"))
        # Ours has an entry for each bucket, stock one for each group.
        assert {(kind, step) for kind, step, _ in ours["saved"]} == {(kind, step) for kind, step, _ in stock["saved"]}
        assert [norm for *_, norm in ours["saved"]] == ours["live"]
        assert ours["assertions"] == stock["assertions"]
        assert {"vector", "no model", "step", "batch"} <= set(ours["assertions"])
        assert "coalesce" in ours["assertions"] or not hasattr(DeepSpeedEngine, "coalesce_grad_reduction")
        assert ours["scales"] == stock["scales"] == [1.0, 1.0, 1.0]
        for what in ("inside 0", "inside 1", "reduced"):
            for gradient, expected in zip(ours[what], stock[what], strict=True):
                torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7, msg=what)


def _train(engine: Any, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(_batch(rank, step).to(next(engine.module.parameters()).dtype)))
        engine.step()


def _stock_checkpoint(rank: int, world: int, folder: str) -> list[tuple[str, list[torch.Tensor], list[torch.Tensor]]]:
    """Weights of stock DeepSpeed going on, and of ours after loading stock's checkpoint of step 2."""
    deepspeed_ext.init_distributed()
    found = []
    for stage, is_bf16 in ((1, False), (2, True)):
        zero = {"stage": stage, "reduce_bucket_size": 50}  # a weight lies in several buckets
        config = CONFIG | {"zero_optimization": zero, "bf16": {"enabled": is_bf16}}
        stock, *_ = deepspeed.initialize(model=_Model(), config=copy.deepcopy(config))
        _train(stock, rank, 0, 2)
        stock.save_checkpoint(f"{folder}/{stage}")
        _train(stock, rank, 2, 5)
        ours, optimizer, _, _ = deepspeed_ext.initialize(model=_Model(), config=copy.deepcopy(config))
        ours.load_checkpoint(f"{folder}/{stage}")
        assert optimizer.step_count == 2
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
