"""Recomputation and offloading change where activations are, never a bit of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.optimus import ops
from megatron.optimus.config.schema import ConfigError, ModelConfig, ParallelConfig, PipelineSchedule, Recompute
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights
from megatron.optimus.parallel import recompute
from megatron.optimus.parallel.apply import parallelize
from megatron.optimus.parallel.pipeline_stages import keep_local_stages, local_stages, stage_plan
from megatron.optimus.platform.mesh import Mesh

ALL = list(Recompute)


def model(parallel: ParallelConfig, **changes: Any) -> Decoder:
    sizes = dict(num_layers=3, hidden_size=32, num_attention_heads=4, vocab_size=40, ffn_hidden_size=64, kv_channels=8)
    with torch.device("meta"):
        built = Decoder(ModelConfig(**(sizes | dict(moe_ffn_hidden_size=64, moe_router_topk=2) | changes)))
    parallelize(built, Mesh(parallel, rank=0, world_size=1), parallel, seq_length=16)
    initialize_weights(built, seed=1, device=torch.device("cpu"), dtype=torch.float32)
    return built


def run(built: Decoder) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes that the forward keeps for the backward beside weights, and the gradients."""
    weights = {p.untyped_storage().data_ptr() for p in built.parameters()}
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    tokens = torch.arange(2 * 24).view(2, 24) % 40
    with saved_tensors_hooks(pack, lambda x: x):
        output = built(tokens, tokens.roll(1, 1))
    (output.loss_sum + output.aux_loss + output.z_loss).backward()
    return sum(kept.values()), {name: p.grad for name, p in built.named_parameters()}


@pytest.mark.parametrize("num_experts", [0, 4])
@pytest.mark.parametrize("parts", [[part] for part in ALL] + [ALL])
def test_less_is_kept_and_gradients_have_the_same_bits(parts: list[Recompute], num_experts: int) -> None:
    changes: dict[str, Any] = dict(num_experts=num_experts)
    kept, grads = run(model(ParallelConfig(), **changes))
    kept_less, same = run(model(ParallelConfig(recompute_modules=parts), **changes))
    kept_some, _ = run(model(ParallelConfig(recompute_modules=parts, recompute_num_layers=1), **changes))
    assert kept_less < kept_some < kept
    for name, grad in grads.items():
        assert torch.equal(grad, same[name]), name


def test_first_layers_are_those_of_each_stage() -> None:
    """Of every chunk of a pipeline rank, as the planner has it."""
    sizes = dict(num_layers=8, hidden_size=8, num_attention_heads=2, vocab_size=16, ffn_hidden_size=8)
    parallel = ParallelConfig(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_schedule=PipelineSchedule.INTERLEAVED_1F1B,
        recompute_modules=[Recompute.MOE],
        recompute_num_layers=1,
        cpu_offloading_num_layers=1,
    )
    with torch.device("meta"):
        built = Decoder(ModelConfig(**sizes))
    plan = stage_plan(built.config, parallel, 16, 1)
    assert [list(plan.layers[stage]) for stage in plan.local_stages] == [[2, 3], [6, 7]]
    keep_local_stages(built, plan)
    recompute.apply_recomputation(local_stages(built, plan), parallel)
    recompute.apply_offloading(local_stages(built, plan), parallel)
    blocks = dict(built.layers.named_children())
    assert [name for name, block in blocks.items() if "forward" in vars(block)] == ["2", "6"]
    assert [name for name, block in blocks.items() if "forward" in vars(block.mlp)] == ["2", "6"]


def test_routers_choose_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = model(ParallelConfig(recompute_modules=ALL), num_experts=4)
    calls = {"router": 0, "experts": 0}

    def counted(forward: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[what] += 1
            return forward(*args)

        return call

    for layer in built.moe_layers():
        monkeypatch.setattr(layer.router, "forward", counted(layer.router.forward, "router"))
    monkeypatch.setattr(ops, "moe_mlp", counted(ops.moe_mlp, "experts"))
    run(built)
    assert calls == {"router": 3, "experts": 6}


def test_offloaded_layers_keep_host_copies_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "MIN_OFFLOADED_BYTES", 1)
    copies: list[torch.Size] = []
    pack = recompute._HostCopies.pack

    def counted(self: Any, x: torch.Tensor) -> Any:
        device, copy = pack(self, x)
        if copy.data_ptr() != x.data_ptr():
            copies.append(x.shape)
        return device, copy

    monkeypatch.setattr(recompute._HostCopies, "pack", counted)
    _, grads = run(model(ParallelConfig(), num_experts=4))
    assert copies == []
    _, same = run(model(ParallelConfig(cpu_offloading_num_layers=1), num_experts=4))
    one_layer = len(copies)
    assert one_layer > 5
    _, both = run(model(ParallelConfig(cpu_offloading_num_layers=3, recompute_modules=ALL), num_experts=4))
    for name, grad in grads.items():
        assert torch.equal(grad, same[name]) and torch.equal(grad, both[name]), name


def test_nothing_is_recomputed_in_validation() -> None:
    built = model(ParallelConfig(recompute_modules=ALL, cpu_offloading_num_layers=3), num_experts=4)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with torch.no_grad():
        assert not built(tokens, tokens).loss_sum.requires_grad


def test_offloading_beside_tensor_parallelism_needs_a_newer_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ParallelConfig(cpu_offloading_num_layers=2, tensor_model_parallel_size=2)
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    recompute.apply_offloading([[]], config)
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    with pytest.raises(ConfigError, match="cpu_offloading_num_layers=2 with tensor_model_parallel_size=2 needs torch"):
        recompute.apply_offloading([[]], config)
    recompute.apply_offloading([[]], ParallelConfig(cpu_offloading_num_layers=2))
