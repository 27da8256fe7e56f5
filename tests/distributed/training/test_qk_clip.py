"""QK-clip against a plain implementation in one process, and layouts against one process: metrics and all weights."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron.optimus.config.checks import check
from megatron.optimus.config.schema import (
    ContextCommunication,
    OptimizerConfig,
    OptimizerName,
    ParallelConfig,
    Precision,
    Recompute,
    RunConfig,
    TrainingConfig,
)
from megatron.optimus.context import RunContext
from megatron.optimus.layers.attention import Attention
from megatron.optimus.layers.rope import apply_rope
from megatron.optimus.ops import attention_logits
from megatron.optimus.parallel.context import own_positions
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.metrics import Recorder
from tests.distributed.layouts import BATCH, LENGTH, deviation, model_config, part_of
from tests.distributed.test_training_layouts import micro_batch
from tests.distributed.training_cases import SEQUENCES, Case
from tests.distributed.zero_stack import WIDTH, Stack, input_of, sharded
from tests.helpers import run_distributed

STEPS = 3
THRESHOLD = 4.0  # of largest logits between 2 and 8
# Four query heads over two key heads, so that heads of a pair have different factors.
GROUPED = dict(qk_layernorm=False, num_query_groups=2, add_qkv_bias=True)


class Layout(NamedTuple):
    parallel: dict[str, Any]
    optimizer: dict[str, Any] | None = None
    documents: bool = False


RING = dict(context_parallel_size=2, cp_comm_type=ContextCommunication.P2P)
TWO = {
    "tp 2": Layout(dict(tensor_model_parallel_size=2)),
    "cp 2 (ulysses), recomputed": Layout(dict(context_parallel_size=2, recompute_modules=list(Recompute))),
}
FOUR = {
    "tp 2 x cp 2 (ring), documents": Layout(RING | dict(tensor_model_parallel_size=2), documents=True),
    "pp 2 x tp 2": Layout(dict(pipeline_model_parallel_size=2, tensor_model_parallel_size=2)),
    "dp 4, zero 2, small buckets": Layout({}, dict(zero_stage=2, ddp_bucket_size=500)),
}


def train(rank: int, world: int, layout: Layout, mode: str = "clipped") -> tuple[list[float], dict[str, Tensor]]:
    """Metrics of the steps and the weights afterwards. ``mode``: clipped, plain, off, high or skipped."""
    from megatron.optimus.training import qk_clip
    from megatron.optimus.training.data import context_parallel_slice
    from megatron.optimus.training.engine import build_engine, build_model  # they import deepspeed
    from megatron.optimus.training.pipeline_schedule import build_schedule
    from megatron.optimus.training.trainer import train_step

    attention_logits.MAX_SCORES = 4 * BATCH * LENGTH * 3  # three queries at a time
    threshold = 0.0 if mode in ("off", "plain") else 1e9 if mode == "high" else THRESHOLD
    muon = OptimizerConfig(
        optimizer=OptimizerName.MUON, lr=3e-3, adam_eps=1e-2, qk_clip_threshold=threshold, **(layout.optimizer or {})
    )
    training = TrainingConfig(
        micro_batch_size=BATCH, global_batch_size=SEQUENCES, seq_length=LENGTH, params_dtype=Precision.FP32, seed=3
    )
    model_options, parallel = model_config(GROUPED), ParallelConfig(**layout.parallel)
    config = RunConfig(model=model_options, parallel=parallel, optimizer=muon, training=training)
    check(config, world)
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    run = RunContext.of(config, mesh, torch.device("cpu"))
    model = build_model(run)
    engine = build_engine(run, model)
    schedule, recorder = build_schedule(run, engine), Recorder(run.ranks)
    clip = qk_clip.QKClip(run, model, engine) if threshold else None
    plain = _PlainClip(model) if mode == "plain" else None
    if mode == "skipped":
        engine.optimizer.skip_above = 0.0
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    positions, case = own_positions(LENGTH, config.parallel, mesh), Case({}, "documents" if layout.documents else "moe")
    accumulation = SEQUENCES // BATCH // mesh.size("dp")
    numbers: list[float] = []
    for step in range(STEPS):
        batches = [
            context_parallel_slice(
                micro_batch(step * 100 + micro * mesh.size("dp") + mesh.index("dp"), case), positions
            )
            for micro in range(accumulation)
        ]
        if clip is not None:
            clip.begin_step(step)
        before = partial(clip.before_update, recorder) if clip is not None else lambda: None
        metrics = train_step(run, engine, schedule, recorder, batches, before_update=before).read().metrics
        engine.optimizer.wait_for_params()
        measured = [metrics.get(name, 0.0) for name in ("max_attention_logit", "qk_clipped_heads")]
        numbers += [*(plain.scale() if plain else measured), metrics["loss"]]
    engine.optimizer.sync_params_from_master()
    weights = dict(model.named_parameters())
    assert mode != "skipped" or all(torch.equal(weight, initial[name]) for name, weight in weights.items())
    return numbers, weights


class _PlainClip:
    """The algorithm as it reads: every logit by itself, every head by itself, on the weights of one process."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.attentions = [module for module in model.modules() if isinstance(module, Attention)]
        self.largest: list[list[float]] = [[-math.inf] * 4 for _ in self.attentions]
        for number, attention in enumerate(self.attentions):
            attention.register_forward_pre_hook(partial(self._measure, number))

    @torch.no_grad()
    def _measure(self, number: int, attention: Attention, args: tuple[Any, ...]) -> None:
        x_BSD, rope, documents = args
        width = attention.head_dim
        q_BHSd, k_BGSd = (
            apply_rope(layer(x_BSD).unflatten(-1, (-1, width)).transpose(1, 2), rope)
            for layer in (attention.q_proj, attention.k_proj)
        )
        ends = [LENGTH * (row + 1) for row in range(BATCH)] if documents is None else documents.cu_seqlens_host
        for row in range(BATCH):
            for query in range(LENGTH):
                at = row * LENGTH + query
                first = max([0, *(end for end in ends if end <= at)]) - row * LENGTH
                for head in range(4):
                    seen = k_BGSd[row, head // 2, first : query + 1]
                    logit = float((seen @ q_BHSd[row, head, query]).max()) / math.sqrt(width)
                    self.largest[number][head] = max(self.largest[number][head], logit)

    @torch.no_grad()
    def scale(self) -> list[float]:
        """Scales the weights after an update; returns the largest logit and the number of heads above the threshold."""
        clipped = 0
        for attention, largest in zip(self.attentions, self.largest, strict=True):
            width = attention.head_dim
            for pair in range(2):
                factors = [min(1.0, THRESHOLD / largest[2 * pair + one]) for one in range(2)]
                clipped += sum(factor < 1 for factor in factors)
                of_key = math.sqrt(min(factors))
                for parameter in attention.k_proj.parameters():
                    parameter[pair * width : (pair + 1) * width] *= of_key
                for one, factor in enumerate(factors):
                    rows = slice((2 * pair + one) * width, (2 * pair + one + 1) * width)
                    for parameter in attention.q_proj.parameters():
                        parameter[rows] *= factor / of_key
        most = max(value for one in self.largest for value in one)
        self.largest = [[-math.inf] * 4 for _ in self.attentions]
        return [most, float(clipped)]


def serial(rank: int, world: int) -> dict[bool, dict[str, Any]]:
    """What each mode computes, without and with several documents in a sequence."""
    modes = {False: ["clipped", "plain", "off", "high", "skipped"], True: ["clipped", "plain"]}
    found: dict[bool, dict[str, Any]] = {documents: {} for documents in modes}
    for documents, mode in ((documents, mode) for documents, names in modes.items() for mode in names):
        numbers, weights = train(0, 1, Layout({}, documents=documents), mode)
        found[documents][mode] = numbers, {name: weight.detach() for name, weight in weights.items()}
    return found


def deviations(rank: int, world: int, layouts: dict[str, Layout], expected: dict[bool, Any]) -> dict[str, float]:
    found = {}
    for name, layout in layouts.items():
        numbers, weights = train(rank, world, layout)
        wanted, whole = expected[layout.documents]
        worst = [deviation(weight, part_of(whole[key], weight)) for key, weight in weights.items()]
        found[name] = max(deviation(torch.tensor(numbers), torch.tensor(wanted), each=True), *worst)
    return found


@pytest.fixture(scope="module")
def one_process() -> dict[bool, dict[str, Any]]:
    [found] = run_distributed(serial, 1)
    return found


@pytest.mark.parametrize("documents", [False, True])
def test_it_is_the_plain_algorithm(one_process: dict[bool, dict[str, Any]], documents: bool) -> None:
    (numbers, weights), (wanted, expected) = (one_process[documents][mode] for mode in ("clipped", "plain"))
    assert deviation(torch.tensor(numbers), torch.tensor(wanted), each=True) < 1e-6
    clipped_heads = numbers[1::3]
    assert all(0 < count < 8 for count in clipped_heads), numbers
    assert max(deviation(weights[name], weight) for name, weight in expected.items()) < 1e-5
    off = one_process[False]["off"][1]
    assert deviation(off["layers.0.attention.q_proj.weight"], weights["layers.0.attention.q_proj.weight"]) > 1e-2


def test_below_the_threshold_and_in_skipped_steps_no_bit_changes(one_process: dict[bool, dict[str, Any]]) -> None:
    modes = one_process[False]
    for name, weight in modes["off"][1].items():
        assert torch.equal(modes["high"][1][name], weight), name
    assert all(count > 0 for count in modes["skipped"][0][1::3])  # the weights are compared in ``train``


@pytest.mark.parametrize(("world", "layouts"), [(2, TWO), (4, FOUR)])
def test_layouts_equal_one_process(
    one_process: dict[bool, dict[str, Any]], world: int, layouts: dict[str, Layout]
) -> None:
    expected = {documents: modes["clipped"] for documents, modes in one_process.items()}
    for found in run_distributed(deviations, world, layouts, expected):
        for name, worst in found.items():
            assert worst < 1e-5, (name, worst)


def _scaled(rank: int, world: int) -> tuple[float, float]:
    """The largest error of masters and parameters after a step with scaled rows; what the next step changes."""
    models = [Stack(torch.bfloat16) for _ in range(2)]
    plain, scaled = (sharded(model, overlap_param_gather=True) for model in models)
    factors = {name: torch.linspace(0.5, 1.5, WIDTH) for name in ("layers.1.weight", "layers.3.bias", "bare.weight")}
    scaled.scale_rows_after_update({models[1].get_parameter(name): one for name, one in factors.items()})
    _step(models[0], plain, rank)
    _step(models[1], scaled, rank)
    worst, masters = 0.0, []
    for own, other in zip(plain.state_shards(), scaled.state_shards(), strict=True):
        expected = own.tensors["master"].clone()
        if own.name in factors:
            expected *= factors[own.name][torch.arange(own.start, own.stop) // (own.param.numel() // WIDTH)]
        whole = models[1].get_parameter(own.name).detach().flatten()
        masters.append(other.tensors["master"].clone())
        worst = max(worst, float((masters[-1] - expected).abs().max()))
        worst = max(worst, float((whole[own.start : own.stop] - expected.bfloat16()).abs().max()))
    _step(models[1], scaled, rank)
    changes = [
        (one.tensors["master"] - old).abs().max() for one, old in zip(scaled.state_shards(), masters, strict=True)
    ]
    plain.destroy()
    scaled.destroy()
    return worst, float(max(changes))


def _step(model: Stack, optimizer: Any, rank: int) -> None:
    optimizer.set_gradient_accumulation_boundary(True)
    model(input_of(0, rank).bfloat16()).backward()
    optimizer.reduce_gradients()
    optimizer.backward_epilogue()
    optimizer.step()
    optimizer.wait_for_params()


def test_rows_of_sharded_masters_and_parameters_are_scaled_once() -> None:
    for worst, change in run_distributed(_scaled, 2):
        assert worst == 0.0
        assert change < 0.02  # AdamW's rate is 0.01; the smallest factor again would change weights by 0.04
