"""Plans, searches and the command line; predictions against what was measured on H200."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron.optimus.commands import plan as plan_command
from megatron.optimus.config.checks import check
from megatron.optimus.config.costs import OperationCounts, flops_per_token
from megatron.optimus.config.load import load
from megatron.optimus.config.rank_plan import rank_plans
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.models.activations import CUDA
from megatron.optimus.models.parameters import num_parameters
from megatron.optimus.models.work import shared_work
from megatron.optimus.moe.traffic import dispatcher_traffic, rows_needed
from megatron.optimus.parallel.pipeline_stages import stage_plan
from megatron.optimus.planner.communication import collectives
from megatron.optimus.planner.hardware import AURORA, H200, MACHINES
from megatron.optimus.planner.memory import memory_of
from megatron.optimus.planner.plan import plan
from megatron.optimus.planner.report import figures
from megatron.optimus.planner.search import search
from megatron.optimus.planner.step_time import busy, compute_seconds, micro_batch_work, seconds, step_time
from megatron.optimus.planner.weak_scaling import PAPER, weak_scaling
from megatron.optimus.platform.device import peak_flops

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


def test_gradients_that_wait_in_stage_2s_first_backward_are_a_peak_where_activations_are_few() -> None:
    words = "--preset mula-7b-a1b --zero-stage 2 --seq-length 4096 --global-batch-size 128 --micro-batch-size "
    [share], [larger] = (rank_plans(load(f"{words}{size}".split()).config, 16) for size in (1, 8))
    few, many = memory_of(share), memory_of(larger)
    bf16 = 2 * num_parameters(share)
    assert few.pool == many.pool
    assert few.worst.name == "first backward, end"
    assert bf16 < few.peak - few.states.total - few.buffers < bf16 + few.pool
    assert many.worst.name == "layer 16 of 16, experts, backward"
    moments = [moment for moment in few.moments if moment.name.startswith("first backward, layer")]
    layer = bf16 // share.num_layers
    waiting = [after.temporaries - before.temporaries for before, after in itertools.pairwise(moments)]
    assert len(moments) == 16 and all(0.8 * layer < more < layer for more in waiting)  # without the vocabulary's


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


def test_weak_scaling_falls_and_levels_off() -> None:
    points = weak_scaling(load("--preset mula-220b-a10b".split()).config, AURORA)
    efficiencies = [point.efficiency for point in points]
    assert [point.plan.world_size for point in points] == list(PAPER)
    assert efficiencies[0] == 1.0
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert efficiencies[-1] > 0.85
    assert all(point.plan.ranks[0].micro_batches == 8 for point in points)


def test_every_constant_has_a_source_and_peaks_agree_with_the_trainers() -> None:
    for machine in MACHINES.values():
        assert all(figure.value > 0 and figure.source for figure in figures(machine).values())
        device = {"aurora": "Intel(R) Data Center GPU Max 1550"}.get(machine.name, machine.device)
        if machine.name != "max1550":  # whose devices have the name of Aurora's, which have fewer cores
            assert machine.peak.value == peak_flops(device, torch.bfloat16)
    assert not any(figure.is_measured for figure in figures(AURORA).values())


def test_symmetric_memory_is_nobody_s_concern_where_nothing_travels() -> None:
    config = load(f"{SYMMETRIC.replace('--top 0', '')} 1".split()).config
    assert plan(config, 4, AURORA).time.total > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            f"{SYMMETRIC} 16 --world-size 16",
            "symmetric needs the 16 ranks that share the experts on one node of 8; use allgather or alltoall",
        ),
        (f"{SYMMETRIC} 4 --world-size 4 --system aurora", "symmetric needs GPUs of CUDA, which aurora has not; use"),
        (
            f"{SYMMETRIC.replace('symmetric', 'hierarchical')} 8 --world-size 8",
            "hierarchical needs experts over several nodes: the 8 ranks of a node must be 2 or more",
        ),
        ("--preset mula-1b --system summit", "--system='summit' is unknown; use a100, aurora, b200, h100, h200,"),
        ("--preset mula-1b --nodes none", "--nodes='none' must be a whole number of 1 or more"),
        ("--preset mula-1b --nodes \N{SUPERSCRIPT TWO}", "must be a whole number"),
        ("--preset mula-1b --nodes", "--nodes needs a value"),
        ("--preset mula-1b --world-size 99999999999", "99,999,999,999 ranks are more than the 1,000,000"),
        ("--preset mula-1b --nodes 2 --world-size 8", "--nodes=2 of h200 are 16 ranks, but --world-size=8"),
        ("--preset mula-1b --wolrd-size 8", "did you mean --world-size?"),
        ("--preset mula-tiny --world-size 7 --check-build", "could not be built: global_batch_size=16 must be"),
        ("--preset mula-1b --hidden 4", "unknown option --hidden"),
        (
            "--preset mula-1b --global-batch-size 8 --pipeline-model-parallel-size 3 --top 0",
            "must divide the number of",
        ),
        ("--preset mula-1b --zero-stage 3 --global-batch-size 8 --top 0", "zero_stage=3 is not planned here"),
        ("--preset mula-220b-a10b --weak-scaling /dev/null/x", "/dev/null/x.md cannot be written: Not a directory"),
    ],
)
def test_bad_input_is_one_clear_error(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command.main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_the_command_line_shows_a_plan_and_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    main = plan_command.main
    words = "--preset mula-220b-a10b --nodes 1024 --system aurora --global-batch-size 12288 --top 0".split()
    words += "--recompute-modules moe attention norm".split()
    assert main([*words, "--explain"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].endswith("recompute moe+attention+norm")
    for part in ("pp 8, ep 12, dp 1536", "not measured by us", "optimizer states", "tokens to experts", "MFU"):
        assert part in text
    assert main([*words, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["plan"]
    assert made["fits"] and len(made["memory"]) == 8 and made["time"]["step_s"] > 0
    assert made["memory"][0]["in_flight"] == 8 and made["memory"][7]["in_flight"] == 1


def test_the_best_layout_comes_as_options_that_give_it(capsys: pytest.CaptureFixture[str]) -> None:
    main = plan_command.main
    words = "--preset mula-20b-a2b --nodes 2 --system aurora --global-batch-size 96".split()  # stages, chunks, experts
    main([*words, "--top", "1"])
    best, options = capsys.readouterr().out.split("\n  1. ")[1].split("\n")[:2]
    assert main([*words, "--top", "0", *options.removeprefix("the first as options: ").split()]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(best.rsplit(": ", 1)[1])


def test_sizes_that_leave_nothing_to_try_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--preset mula-7b-a1b --nodes 1 --pipeline-model-parallel-size 5"
    assert plan_command.main(words.split()) == 2
    assert "the sizes named on the command line do not divide 8 ranks" in capsys.readouterr().out


def test_the_papers_curve_stands_beside_its_own_model_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for preset, paper in (("mula-220b-a10b", "97%"), ("mula-7b-a1b", "")):
        assert plan_command.main(["--preset", preset, "--weak-scaling", str(tmp_path / "v1.2")]) == 0
        assert capsys.readouterr().out.splitlines()[3].split("|")[-2].strip() == paper
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v1.2.md", "v1.2.png"]


def test_no_plan_needs_torch() -> None:
    import subprocess

    code = (
        "import sys; from megatron.optimus.commands import plan; "
        "plan.main('--preset mula-7b-a1b --nodes 1 --system aurora --top 1'.split()); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60)


def test_a_configuration_error_of_the_trainer_is_the_planners() -> None:
    config = load("--preset mula-7b-a1b --expert-model-parallel-size 5 --global-batch-size 30".split()).config
    with pytest.raises(ConfigError) as planned:
        plan(config, 10, H200)
    with pytest.raises(ConfigError) as trained:
        check(config, 10)
    assert str(planned.value) == str(trained.value)
