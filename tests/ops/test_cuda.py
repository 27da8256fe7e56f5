"""The CUDA layer: its operations, its agreement with Triton's, and where it cannot run."""

from __future__ import annotations

import pytest
import torch

from megatron.optimus import ops
from tests.ops.cases import (
    CASES,
    NAMES,
    TOLERANCE,
    Case,
    make_inputs,
    mismatches,
    values_and_gradients,
)
from tests.ops.targets import ON_GPU, needs_hopper


@pytest.mark.gpu
@needs_hopper
def test_cuda_operations_pass_opcheck() -> None:
    ops.set_backend("cuda")
    inputs = [t.cuda() for t in make_inputs(Case(90, 32, 16, 4, 3, "some_foreign"), torch.bfloat16)]
    values_and_gradients(ops.moe_mlp, inputs)
    leaves = [t.requires_grad_() for t in inputs[:4]]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.optimus.cuda_moe_mlp.default, (*leaves, inputs[4]), test_utils=checks)
    plain = [t.detach() for t in leaves]
    _, hidden, order = torch.ops.optimus.cuda_moe_mlp(*plain, inputs[4])
    assert hidden.shape == (90 * 3, 2 * 16)  # no row of padding waits for the backward
    saved = (inputs[5], *plain, hidden, order)
    torch.library.opcheck(torch.ops.optimus.cuda_moe_mlp_backward.default, saved, test_utils=checks)
    dgate_up, ddown = (torch.zeros(t.shape, device="cuda") for t in plain[1:3])
    into = torch.ops.optimus.cuda_moe_mlp_backward_into.default
    for add in (True, False):
        torch.library.opcheck(into, (*saved, dgate_up, ddown, add, add), test_utils=checks)
    first_half = torch.ops.optimus.cuda_moe_mlp_backward_inputs.default
    torch.library.opcheck(first_half, (*saved, ddown, True), test_utils=checks)
    *_, dhidden, x_rows = first_half(*saved, ddown, True)
    second_half = torch.ops.optimus.cuda_moe_mlp_backward_up_weights.default
    torch.library.opcheck(second_half, (dhidden, x_rows, order, 90, 3, dgate_up, True), test_utils=checks)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    "case",
    [
        Case(3000, 320, 640, 5, 2),
        Case(700, 1032, 136, 20, 4, "some_foreign"),
        Case(70_000, 64, 64, 64, 4),  # more slots, and more counts of slots, than blocks look at in one go
        Case(20_000, 64, 64, 1000, 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cuda_agrees_with_triton_on_many_tiles(case: Case, dtype: torch.dtype) -> None:
    """Pairs of tiles and odd ones, several tiles of columns, depths that are no multiple of a stage."""
    inputs = make_inputs(case, dtype, "cuda")
    results = []
    for backend in ON_GPU:
        ops.set_backend(backend)
        results.append(values_and_gradients(ops.moe_mlp, inputs))
    assert not mismatches(results[1], {n: t.cpu() for n, t in results[0].items()}, TOLERANCE[dtype] / 3)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_cuda_runs_on_any_device_of_a_process() -> None:
    ops.set_backend("cuda")
    inputs = make_inputs(Case(300, 64, 48, 8, 2), torch.bfloat16, "cuda:0")
    first, second = (
        values_and_gradients(ops.moe_mlp, [t.to(device) for t in inputs]) for device in ("cuda:0", "cuda:1")
    )
    assert all(torch.equal(t.cpu(), second[name].cpu()) for name, t in first.items())


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("case", [Case(300, 64, 48, 8, 2), Case(90, 20, 12, 4, 3, "some_foreign")], ids=str)
def test_cuda_backward_in_halves(case: Case) -> None:
    """dx, ddown and dweights are complete without the second half; both halves give autograd's bits."""
    ops.set_backend("cuda")  # loads the compiled operations, which the module registers
    from megatron.optimus.ops import cuda

    inputs = make_inputs(case, torch.bfloat16, "cuda")
    want = values_and_gradients(ops.moe_mlp, inputs)
    arguments = inputs[:5]
    _, saved = cuda.moe_mlp_forward(*arguments)
    dx, ddown, dweights, pending = cuda.moe_mlp_backward_inputs(inputs[5], arguments, saved, None, False)
    got = [t.clone() for t in (dx, ddown, dweights)]
    buffer = torch.ones(arguments[1].shape, device="cuda")
    assert cuda.moe_mlp_backward_up_weights(arguments, saved, pending, buffer, True) is None
    dgate_up = cuda.moe_mlp_backward_up_weights(arguments, saved, pending, None, False)
    names = dict(zip(NAMES[1:], (got[0], dgate_up, got[1], got[2]), strict=True))
    assert all(torch.equal(t, want[n].to(t)) for n, t in names.items())
    assert not mismatches({"buffer": buffer - 1}, {"buffer": want[NAMES[2]].cpu()}, TOLERANCE[torch.bfloat16])


def test_cuda_asked_for_where_it_cannot_run_is_an_error() -> None:
    inputs = make_inputs(CASES["one_token"], torch.bfloat16)
    ops.set_backend("cuda")
    with pytest.raises(ops.BackendUnavailableError, match="backend 'cuda' cannot run on cpu bfloat16: it runs on cuda"):
        ops.moe_mlp(*inputs[:5])
