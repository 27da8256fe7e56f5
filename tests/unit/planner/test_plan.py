"""Plans, searches and the command line; predictions against what was measured on H200."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron.optimus.config.checks import check
from megatron.optimus.config.costs import OperationCounts, flops_per_token
from megatron.optimus.config.load import load
from megatron.optimus.config.rank_plan import rank_plans
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.models.activations import CUDA
from megatron.optimus.models.work import shared_work
from megatron.optimus.moe.traffic import dispatcher_traffic, rows_needed
from megatron.optimus.parallel.pipeline_stages import stage_plan
from megatron.optimus.planner.communication import collectives
from megatron.optimus.planner.hardware import AURORA, H200
from megatron.optimus.planner.memory import memory_of
from megatron.optimus.planner.plan import plan
from megatron.optimus.planner.search import search
from megatron.optimus.planner.step_time import busy, compute_seconds, micro_batch_work, seconds, step_time

ROOT = Path(__file__).resolve().parents[3]
SYMMETRIC = (
    "--preset mula-7b-a1b --global-batch-size 16 --top 0 --moe-token-dispatcher-type symmetric "
    "--expert-model-parallel-size"
)


def script(path: str) -> ModuleType:
    """A script as a module; its neighbours can be imported, as when it is run."""
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_script", ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str((ROOT / path).parent))
        patch.setitem(sys.modules, spec.name, module)  # where dataclasses look names up
        spec.loader.exec_module(module)
    return module


def measured() -> list[tuple[Any, int, dict[str, Any]]]:
    """(configuration, ranks, result) of every case in the raw file."""
    benchmark = script("benchmarks/planner_memory.py")
    results = json.loads((ROOT / "benchmarks/results/planner_memory_h200.json").read_text())["results"]
    found = []
    for result in results:
        found.append(
            (load(benchmark.words_of(result["command"], result["ranks"], "cpu", "x")).config, result["ranks"], result)
        )
    return found


def test_peaks_and_steps_measured_on_h200_are_predicted() -> None:
    """With the kernels that the program had then."""
    cases, machine = measured(), script("benchmarks/planner_steps.py").SEPARATE_NORMS
    older = script("benchmarks/planner_memory.py").OLDER_PEAKS
    assert len({result["case"] for _, _, result in cases} - older) >= 8
    for config, ranks, result in cases:
        members = rank_plans(config, ranks)
        memory = memory_of(members[result["rank"] // (ranks // len(members))], machine.kernels)
        if result["case"] not in older:
            assert memory.peak == pytest.approx(result["peak_bytes"], rel=0.05), result["case"]
        step = statistics.median(result["step_s"][2:])
        assert step_time(members, machine).total == pytest.approx(step, rel=0.10), result["case"]


@pytest.mark.parametrize("name", ["1b", "7b_a1b", "20b_a2b", "100b_a7b", "220b_a10b"])
def test_the_layout_of_every_aurora_script_fits(name: str) -> None:
    text = (ROOT / f"examples/aurora/mula_{name}.pbs").read_text()
    nodes = int(re.findall(r"--nodes (\d+)", text)[0])
    words = re.findall(r"--(?:preset|micro-batch-size|seq-length|recompute-modules) \S+", text)
    config = load(" ".join(words).split()).config
    made = plan(config, nodes * AURORA.devices_per_node, AURORA)
    assert made.fits, f"{made.worst.peak / 2**30:.1f} GiB of {made.usable / 2**30:.1f}"


def test_a_search_gives_runs_that_the_trainer_takes_and_that_fit_the_fastest_first() -> None:
    config = load("--preset mula-7b-a1b --global-batch-size 64 --seq-length 4096".split()).config
    found = search(config, 8, H200, fixed_options={"tensor_model_parallel_size"})
    assert found.best
    for made in found.best:
        check(made.config, 8)
        assert made.worst.peak <= made.usable
        assert made.config.parallel.tensor_model_parallel_size == 1
        assert made.config.training.global_batch_size == 64
    rates = [made.time.tokens_per_second for made in found.best]
    assert rates == sorted(rates, reverse=True)


def test_a_search_says_why_nothing_fits() -> None:
    config = load("--preset mula-220b-a10b --global-batch-size 64".split()).config
    found = search(config, 8, H200, fixed_options=set())
    assert not found.best
    assert "GiB" in found.examples["memory"]


def test_more_recomputation_needs_less_memory_and_more_time() -> None:
    def made(words: str) -> Any:
        words = f"--preset mula-7b-a1b --global-batch-size 64 --micro-batch-size 8 {words}"
        return plan(load(words.split()).config, 8, H200)

    whole, part, none = (made(w) for w in ("--recompute-modules moe attention norm", "--recompute-modules moe", ""))
    assert whole.worst.peak < part.worst.peak < none.worst.peak
    assert whole.time.total > part.time.total > none.time.total


def test_symmetric_memory_moves_what_all_to_all_moves_and_holds_what_all_gather_holds() -> None:
    words = (
        "--preset mula-20b-a2b --num-layers 1 --seq-length 4096 --micro-batch-size 4 --global-batch-size 16 "
        "--expert-model-parallel-size 4 --device cuda --moe-token-dispatcher-type"
    )

    def of(transport: str) -> tuple[float, int, int]:
        [share] = rank_plans(load([*words.split(), transport]).config, 4)
        sent = sum(one.sent for one in collectives(share, CUDA) if one.payload > 2**25 and one.axis == "experts")
        memory = memory_of(share)
        return sent, memory.buffers, sum(memory.saved_per_layer)

    (symmetric, more, saved), (alltoall, less, _) = of("symmetric"), of("alltoall")
    allgather, _, most = of("allgather")
    tokens, width, topk, element = 4 * 4096, 2048, 8, 2
    assert symmetric == pytest.approx(0.75 * alltoall + 0.25 * allgather)  # gradients are combined in whole blocks
    assert alltoall < allgather
    assert more - less == 4 * tokens * width * element + 3 * tokens * topk * 4
    assert saved - most == 4 * tokens * (1 + 4 * topk)


@pytest.mark.parametrize("transport", ["allgather", "alltoall"])
def test_exchange_hides_behind_shared_experts(transport: str) -> None:
    words = (
        "--preset mula-20b-a2b --num-layers 2 --seq-length 4096 --micro-batch-size 4 --global-batch-size 16 "
        f"--expert-model-parallel-size 4 --device cuda --moe-token-dispatcher-type {transport} "
        "--moe-shared-expert-intermediate-size "
    )
    beside = replace(H200, kernels=replace(H200.kernels, overlaps_collectives=True))
    none, narrow, wide = (rank_plans(load(f"{words}{inner}".split()).config, 4)[0] for inner in (0, 64, 65536))
    (_, exposed, total), (_, less, same), (_, least, again) = (busy(share, beside) for share in (none, narrow, wide))
    assert total == same == again
    assert exposed - less == pytest.approx(2 * compute_seconds(shared_work(narrow), narrow, beside) / 3)  # two layers
    there, combined = {"tokens", "tokens to experts"}, {"gradients from experts", "gradients of router weights"}
    sent = [one for one in collectives(wide, beside.kernels) if one.purpose in there | combined]
    assert again - least == pytest.approx(sum(seconds(one, wide, beside) for one in sent))
    _, exposed, total = busy(wide, H200)
    assert exposed == total  # on CUDA nothing is said to be hidden


@pytest.mark.parametrize("transport", ["allgather", "alltoall", "symmetric"])
def test_exchange_hides_behind_the_router_and_the_last_product(transport: str) -> None:
    words = (
        "--preset mula-20b-a2b --num-layers 2 --seq-length 4096 --micro-batch-size 4 --global-batch-size 16 "
        f"--expert-model-parallel-size 4 --device cuda --moe-token-dispatcher-type {transport}"
    )
    [share] = rank_plans(load(words.split()).config, 4)
    wide = dispatcher_traffic(share).rows(share)
    combine = 2 * 0.75 * wide * 2048 * 2 / H200.intra_node_bandwidth.value  # two layers, three of four ranks
    narrow = 2 * 0.75 * wide * 8 * 4 / H200.intra_node_bandwidth.value if transport != "symmetric" else 0.0
    calls = (1 if transport == "symmetric" else 2) * 2 * 2 * H200.latency.value
    beside = replace(H200, kernels=replace(H200.kernels, overlaps_collectives=True))
    whole_backward = replace(H200, kernels=replace(beside.kernels, splits_backward=False))
    (compute, exposed, total), (less, more, same) = busy(share, beside), busy(share, whole_backward)
    if transport == "symmetric":  # on CUDA only what copy engines carry is beside anything
        assert busy(share, H200) == (compute, exposed, total)
    else:
        slowed = (total - exposed) * H200.overlap_cost.value
        assert busy(share, H200) == pytest.approx((compute - slowed, total, total))
    assert same == total and more - exposed == pytest.approx(combine + narrow + calls)
    assert compute - less == pytest.approx((combine + narrow + calls) * H200.overlap_cost.value)
    behind_router = total - more  # what all-gather still hides, in no more than the router's time
    each = (2048 * 2 + 96 * 16) / H200.traffic.value + 2 * 2048 * 96 / H200.products.value
    router = 2 * 4 * 4096 * each  # two layers
    assert behind_router == pytest.approx(router if transport == "allgather" else 0.0, abs=1e-12)
    # Experts whose products are shorter than the transfer hide no more than they take.
    small = load(f"{words} --moe-ffn-hidden-size 32".split()).config
    [share] = rank_plans(small, 4)
    window = 2 * 4 * 4 * 4096 * 8 * 2048 * 32 / H200.experts.value
    gained = busy(share, whole_backward)[1] - busy(share, beside)[1]
    assert gained == pytest.approx(window) and window < combine


def test_parts_of_an_all_to_all_cost_kernels_and_hide_all_but_one_where_collectives_can() -> None:
    words = (
        "--preset mula-20b-a2b --num-layers 2 --seq-length 4096 --micro-batch-size 4 --global-batch-size 16 "
        "--expert-model-parallel-size 4 --device cuda --moe-token-dispatcher-type alltoall --moe-dispatch-chunks"
    )
    [whole], [parts] = (rank_plans(load([*words.split(), n]).config, 4) for n in ("1", "3"))
    (compute, exposed, total), (more, still, same) = busy(whole, H200), busy(parts, H200)
    latency = 2 * 2 * 2 * 4 * H200.latency.value  # two further parts, two layers, four exchanges, two hops
    assert same == pytest.approx(total + latency) and still == pytest.approx(exposed + latency)
    weights = 24 * 3 * 2048 * 1024  # read twice in bf16, their gradients read and written in fp32; once more for each
    again = 2 * 2 * (weights * (2 * 2 + 2 * 4) / H200.traffic.value + H200.layer_time.value)
    assert more - compute == pytest.approx(again)
    beside = replace(H200, kernels=replace(H200.kernels, overlaps_collectives=True))
    wide = 2 * 4 * 0.75 * rows_needed(parts) * 2048 * 2 / H200.intra_node_bandwidth.value
    hidden = busy(parts, beside)[2] - busy(parts, beside)[1]
    narrow = (
        2 * 0.75 * rows_needed(parts) * 8 * 4 / H200.intra_node_bandwidth.value
    )  # of router weights, beside the last product
    calls = 2 * (4 * 2 + 1) * 2 * H200.latency.value
    assert hidden == pytest.approx(wide * 2 / 3 + narrow + calls, rel=1e-6)


def test_times_add_up_and_mfu_follows_from_tokens() -> None:
    config = load("--preset mula-20b-a2b --global-batch-size 384".split()).config
    time = plan(config, 48, AURORA).time
    assert time.total == pytest.approx(time.compute + time.exposed + time.bubble + time.update)
    assert time.launching == 0.0  # large products
    assert time.tokens == 384 * 2048
    rate = time.tokens / time.total / 48
    assert time.mfu == pytest.approx(rate * flops_per_token(config.model, 2048) / AURORA.peak.value)


def test_a_pipeline_of_dense_layers_and_experts_has_the_programs_layers_and_all_its_operations() -> None:
    words = (
        "--preset mula-7b-a1b --moe-layer-freq [0]*6+[1]*10 --ffn-hidden-size 2048 --pipeline-model-parallel-size 4 "
        "--moe-shared-expert-intermediate-size 1024 --moe-shared-expert-gate --global-batch-size 16 --seq-length 4096"
    )
    config = load(words.split()).config
    members = rank_plans(config, 4)
    for rank, share in enumerate(members):
        assert share.layers == stage_plan(config.model, config.parallel, 4096, rank).layers
    assert [len(layers) for layers in members[0].layers] == [7, 4, 3, 2]
    work = sum((micro_batch_work(share) for share in members), OperationCounts())
    model, tokens = config.model, 4096 * config.training.micro_batch_size
    exact = (14 - 6) * 10 * model.hidden_size * model.num_experts  # the routers' backward, three products for one
    gates = 6.0 * 10 * model.hidden_size
    counted = (work.gemm_flops + work.attention + work.experts) / tokens - exact + gates
    assert counted == pytest.approx(flops_per_token(model, 4096), rel=1e-12)


def test_symmetric_memory_is_nobody_s_concern_where_nothing_travels() -> None:
    config = load(f"{SYMMETRIC.replace('--top 0', '')} 1".split()).config
    assert plan(config, 4, AURORA).time.total > 0


def test_a_configuration_error_of_the_trainer_is_the_planners() -> None:
    config = load("--preset mula-7b-a1b --expert-model-parallel-size 5 --global-batch-size 30".split()).config
    with pytest.raises(ConfigError) as planned:
        plan(config, 10, H200)
    with pytest.raises(ConfigError) as trained:
        check(config, 10)
    assert str(planned.value) == str(trained.value)
