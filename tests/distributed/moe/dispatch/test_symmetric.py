"""The symmetric-memory token dispatcher on real GPUs, one process each: MoE layers equal those with all-gather.

That it is refused elsewhere: test_select.py; its kernels and its order of reads and writes: ops/test_peers.py.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.optimus.config.schema import (
    ConfigError,
    ExpertPlacement,
    LoadBalancing,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TokenDispatcherType,
    TrainingConfig,
)
from megatron.optimus.context import RunContext
from megatron.optimus.moe.dispatch import symmetric
from megatron.optimus.moe.dispatch.select import select_dispatcher
from megatron.optimus.moe.layer import MoE
from megatron.optimus.parallel.expert import apply_expert_parallelism
from megatron.optimus.parallel.recompute import recompute_forward
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.process_exit import exit_process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
]
WIDTH, EXPERTS, TOPK, LAYERS, BATCHES = 128, 12, 3, 3, 3
MODEL = dict(num_attention_heads=2, vocab_size=32, num_experts=EXPERTS, moe_router_topk=TOPK)
# Between dispatchers partial sums are rounded at other places. In 16 bits that changes what the next layer's router
# chooses, so there one layer is compared.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
NUM_LAYERS = {torch.float32: LAYERS, torch.bfloat16: 1}


def layers_of(kind: TokenDispatcherType, mesh: Mesh, ep: int, dtype: torch.dtype, recompute: bool) -> list[MoE]:
    parallel = ParallelConfig(
        expert_model_parallel_size=ep,
        moe_token_dispatcher_type=kind,
        moe_expert_placement=ExpertPlacement.INTERLEAVED,
    )
    config = ModelConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        moe_ffn_hidden_size=64,
        moe_router_load_balancing_type=LoadBalancing.NONE,
        **MODEL,  # type: ignore[arg-type]
    )
    torch.manual_seed(5)
    layers = []
    for _ in range(NUM_LAYERS[dtype]):
        layer = MoE(config)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        layer.experts.to(dtype)
        layer.router.weight.data[0] += 1.0  # some experts get many tokens
        apply_expert_parallelism(layer, parallel, mesh)
        layer.cuda()
        if recompute:
            layer.experts.forward = recompute_forward(layer.experts.forward)  # type: ignore[method-assign]
        layers.append(layer)
    return layers


def trained(layers: list[MoE], num_tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Outputs and gradients of some micro-batches that are in flight together; more run without gradients between."""
    torch.full((2**24,), torch.nan, device="cuda")  # what memory that nothing is written to will hold
    inputs, outputs = [], []
    for batch in range(BATCHES):
        torch.manual_seed(100 * dist.get_rank() + batch)
        inputs.append(torch.rand(1, num_tokens, WIDTH).to("cuda", dtype).requires_grad_())
        y = inputs[-1]
        for layer in layers:
            y = y + layer(y)[0]
        with torch.no_grad():
            layers[0](inputs[-1])
        outputs.append(y)
    for y in outputs:
        (y * torch.cos(torch.arange(y.numel(), device="cuda")).view_as(y).to(dtype)).sum().backward()
    found = {f"y {n}": y.detach() for n, y in enumerate(outputs)} | {f"dx {n}": x.grad for n, x in enumerate(inputs)}
    for number, layer in enumerate(layers):
        found |= {f"{name} {number}": parameter.grad for name, parameter in layer.named_parameters()}
    return found  # type: ignore[return-value]


def compare(rank: int, world: int, ep: int) -> list[str]:
    mesh = Mesh(ParallelConfig(expert_model_parallel_size=ep), rank=rank, world_size=world)
    wrong = []
    for dtype, tolerance in TOLERANCE.items():
        for num_tokens in (1, 37, 256):
            for recompute in (False, True):
                args = mesh, ep, dtype, recompute
                expected = trained(layers_of(TokenDispatcherType.ALLGATHER, *args), num_tokens, dtype)
                got = trained(layers_of(TokenDispatcherType.SYMMETRIC, *args), num_tokens, dtype)
                again = trained(layers_of(TokenDispatcherType.SYMMETRIC, *args), num_tokens, dtype)
                for name, value in expected.items():
                    error = (got[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-30)
                    if not error <= tolerance:
                        wrong.append(f"{name} {dtype} T={num_tokens} {recompute=}: {error:.1e}")
                    if dtype is torch.bfloat16 and not torch.equal(got[name], again[name]):
                        wrong.append(f"{name} {dtype} T={num_tokens}: other bits in the second run")
    return wrong


def memory_is_shared_and_given_back(rank: int, world: int) -> list[str]:
    mesh = Mesh(ParallelConfig(expert_model_parallel_size=world), rank=rank, world_size=world)
    group = mesh.group("experts")
    assert group is not None
    gc.collect()
    layers = layers_of(TokenDispatcherType.SYMMETRIC, mesh, world, torch.float32, False)
    trained(layers, 16, torch.float32)
    wrong = []
    if (count := len(symmetric._buffers[group])) != 1:
        wrong.append(f"{count} allocations for {LAYERS} layers")
    try:
        trained(layers, 17 + rank, torch.float32)
        wrong.append("ranks with different numbers of tokens were not refused")
    except ConfigError as error:
        if "give every rank as many tokens" not in str(error):
            wrong.append(str(error))
    del layers
    gc.collect()
    if count := len(symmetric._buffers[group]):
        wrong.append(f"{count} allocations live without a layer")
    return wrong


def auto_measures_it(rank: int, world: int) -> list[str]:
    config = RunConfig(
        model=ModelConfig(num_layers=1, hidden_size=WIDTH, **MODEL),  # type: ignore[arg-type]
        parallel=ParallelConfig(
            expert_model_parallel_size=world, moe_token_dispatcher_type=TokenDispatcherType.SYMMETRIC
        ),
        training=TrainingConfig(seq_length=64, micro_batch_size=2),
    )
    device = torch.device("cuda", rank)
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    run = RunContext.of(config, mesh, device)
    wrong = []
    if select_dispatcher(run) is not config.parallel:
        wrong.append("symmetric was asked for and not taken")
    config.parallel.moe_token_dispatcher_type = TokenDispatcherType.AUTO
    taken = select_dispatcher(run).moe_token_dispatcher_type
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, taken.value)
    if len(set(everyone)) > 1 or taken is TokenDispatcherType.AUTO:
        wrong.append(f"auto took {everyone}")
    return wrong


def one_rank(rank: int, world: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    wrong = []
    for ep in sorted({2, world}):
        wrong += [f"ep {ep}: {what}" for what in compare(rank, world, ep)]
    wrong += memory_is_shared_and_given_back(rank, world)
    wrong += auto_measures_it(rank, world)
    Path(folder, f"{rank}").write_text("\n".join(wrong))
    dist.barrier()
    dist.destroy_process_group()
    exit_process(0)


def test_layers_equal_those_with_all_gather() -> None:
    """On two GPUs, or four in groups of two and of four."""
    world = 4 if torch.cuda.device_count() >= 4 else 2
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(one_rank, args=(world, folder), nprocs=world)
        for rank in range(world):
            assert Path(folder, f"{rank}").read_text() == ""
