"""Attention over parts of the keys, merged, is attention over all of them, whichever kernel does the parts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.optimus.layers import partial_attention as module
from megatron.optimus.layers.partial_attention import Kernel, attend_part, attend_part_backward, choose_kernel, merge

OPS = {
    Kernel.CUDNN: "_scaled_dot_product_cudnn_attention",
    Kernel.FLASH: "_scaled_dot_product_flash_attention",
}
CUDA_KERNELS = list(OPS)


def rand(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def force(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    monkeypatch.setattr(module, "choose_kernel", lambda *args: kernel)


def by_name(schema: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call as the operator will take them; none missing, none unknown."""
    names = [argument.name for argument in schema.arguments]
    given = dict(zip(names, args, strict=False)) | options
    assert len(given) == len(args) + len(options) and set(given) <= set(names)
    assert all(argument.has_default_value() or argument.name in given for argument in schema.arguments)
    return given


def stand_in(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> list[str]:
    """Puts what torch's operators promise in their places, and their argument names; notes the calls."""
    calls: list[str] = []
    forward, backward = OPS[kernel], f"{OPS[kernel]}_backward"
    forward_schema, backward_schema = (getattr(module.aten, name).default._schema for name in (forward, backward))
    lse_shape = (lambda lse: lse[..., None]) if kernel is Kernel.CUDNN else (lambda lse: lse)

    def heads(given: dict[str, Any]) -> list[Tensor]:
        count = given["query"].shape[1]
        return [module._for_heads(given[name], count) for name in ("key", "value")]

    def run(*args: Any, **options: Any) -> list[Any]:
        given = by_name(forward_schema, args, options)
        calls.append("forward")
        assert given["dropout_p"] == 0.0 and given.get("attn_bias") is None and given.get("scale") is None
        assert given.get("compute_log_sumexp", True) is True
        out, lse = module._attend_plain(given["query"], *heads(given), given["is_causal"])
        results = {"output": out, "logsumexp": lse_shape(lse)}
        return [results.get(value.name) for value in forward_schema.returns]

    def run_backward(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        given = by_name(backward_schema, args, options)
        calls.append("backward")
        assert given["dropout_p"] == 0.0 and given.get("attn_bias") is None and given.get("scale") is None
        assert given["cum_seq_q"] is None and given["cum_seq_k"] is None
        assert (given["max_q"], given["max_k"]) == (given["query"].shape[2], given["key"].shape[2])
        lse = given["logsumexp"]
        assert lse.shape == lse_shape(torch.empty(given["query"].shape[:3])).shape
        tensors = [given[name] for name in ("grad_out", "query", "key", "value", "out", "logsumexp")]
        assert all(x.is_contiguous() for x in tensors)
        lse = lse.reshape(given["query"].shape[:3])
        args = (given["grad_out"], given["query"], *heads(given), given["out"], lse)
        dq, dk, dv = module._attend_plain_backward(args, given["is_causal"])
        groups = given["key"].shape[1]
        return dq, module._of_groups(dk, groups), module._of_groups(dv, groups)

    force(monkeypatch, kernel)
    monkeypatch.setattr(module, "aten", SimpleNamespace(**{forward: run, backward: run_backward}))
    return calls


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("kernel", list(Kernel))
def test_parts_make_up_the_whole(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, groups: int) -> None:
    """Seven causal keys after six that all see, in two steps; gradients from the merged result."""
    calls = ["forward", "forward", "backward", "backward"]
    if kernel in OPS:
        calls = stand_in(monkeypatch, kernel)
    elif kernel is Kernel.PLAIN:  # in pieces of two queries
        force(monkeypatch, kernel)
        monkeypatch.setattr(module, "MAX_SCORES", 2 * 2 * 4 * 7)
    keys = (2, groups, 13, 8)
    q, k, v, grad = rand((2, 4, 7, 8), keys, keys, (2, 4, 7, 8))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    mask = torch.cat((torch.ones(7, 6, dtype=torch.bool), torch.ones(7, 7, dtype=torch.bool).tril()), dim=1)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    expected.backward(grad)
    with torch.no_grad():
        out, lse = attend_part(q, k[:, :, 6:], v[:, :, 6:], True)
        out, lse = out.clone(), lse.clone()
        merge(out, lse, *attend_part(q, k[:, :, :6], v[:, :, :6], False))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        dq1, dk1, dv1 = attend_part_backward(grad, q, k[:, :, 6:], v[:, :, 6:], out, lse, True)
        dq0, dk0, dv0 = attend_part_backward(grad, q, k[:, :, :6], v[:, :, :6], out, lse, False)
    torch.testing.assert_close(dq0 + dq1, q.grad, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(torch.cat((dk0, dk1), dim=2), k.grad, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(torch.cat((dv0, dv1), dim=2), v.grad, rtol=1e-5, atol=2e-6)
    assert calls == ["forward", "forward", "backward", "backward"]


@pytest.mark.parametrize("kernel", CUDA_KERNELS)
def test_operators_take_the_arguments(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    """The real operators, on tensors without memory; where they are not for CPU tensors they say so, and only that."""
    force(monkeypatch, kernel)
    q, k = (torch.empty(2, n, s, 16, dtype=torch.bfloat16, device="meta") for n, s in ((4, 8), (2, 6)))
    out, lse = attend_part(q, k, k, False)
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    grads = attend_part_backward(out, q, k, k, out, lse, False)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]
    q, k = torch.zeros(2, 4, 8, 16), torch.zeros(2, 2, 6, 16)
    with pytest.raises(NotImplementedError, match="CPU"):
        attend_part(q, k, k, False)
    with pytest.raises(NotImplementedError, match="CPU"):
        attend_part_backward(q, q, k, k, q, q[..., 0], False)


def test_choice_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    preferred = [SDPBackend.CUDNN_ATTENTION]

    def choice(*args: Any, **options: Any) -> int:
        asked.append((*args[3:], *options.values()))
        return preferred[0].value

    class OnCuda(torch.Tensor):
        is_cuda = True
        device = torch.device("cuda", 0)

    def inputs(dtype: torch.dtype, width: int = 64, groups: int = 4) -> list[Tensor]:
        shapes = [(1, n, 8, width) for n in (4, groups, groups)]
        return [torch.zeros(shape, dtype=dtype).as_subclass(OnCuda) for shape in shapes]

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    half = inputs(torch.bfloat16)
    assert choose_kernel(*half, True, False) is Kernel.CUDNN
    assert choose_kernel(*inputs(torch.float16, groups=2), False, False) is Kernel.CUDNN
    assert asked == [(None, 0.0, True, False), (None, 0.0, False, True)]
    assert choose_kernel(*half, True, True) is Kernel.FLASH
    for preferred[0] in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        assert choose_kernel(*half, True, False) is Kernel.FLASH
    for other in (inputs(torch.float32), inputs(torch.bfloat16, width=20), inputs(torch.bfloat16, width=264)):
        assert choose_kernel(*other, True, False) is Kernel.PLAIN
    assert choose_kernel(*(torch.zeros(1, 4, 8, 64) for _ in range(3)), True, False) is Kernel.CPU


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(skip(test))


def close(found: Tensor, expected: Tensor, limit: float = 1e-2) -> None:
    """Within ``limit`` of the largest value."""
    assert found.dtype == torch.bfloat16
    assert float((found.float() - expected).abs().max() / expected.abs().max()) < limit


def can_run(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
    can = {Kernel.CUDNN: "can_use_cudnn_attention", Kernel.FLASH: "can_use_flash_attention"}[kernel]
    return getattr(torch.backends.cuda, can)(params)


@on_gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize(("num_keys", "causal"), [(192, True), (192, False), (328, False)])
@pytest.mark.parametrize("kernel", CUDA_KERNELS)
def test_kernels_on_a_device(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel, num_keys: int, causal: bool, groups: int, width: int
) -> None:
    """Output, log-sum-exp and gradients of a part, with more keys in ``out`` and ``lse`` than the part has."""
    queries, keys, others = (2, 4, 192, width), (2, groups, num_keys, width), (2, groups, 64, width)
    q, k, v, k_more, v_more, grad = (x.bfloat16().cuda() for x in rand(queries, keys, keys, others, others, queries))
    if not can_run(kernel, q, k, v, causal):
        pytest.skip(f"torch cannot use {kernel.value} here")
    wide, wide_more = ([q.float(), *(module._for_heads(x, 4).float() for x in kv)] for kv in ((k, v), (k_more, v_more)))
    expected, expected_lse = module._attend_plain(*wide, causal)
    out, lse = expected.clone(), expected_lse.clone()
    merge(out, lse, *module._attend_plain(*wide_more, False))
    wide_grads = module._attend_plain_backward((grad.float(), *wide, out, lse), causal)
    force(monkeypatch, kernel)
    found, found_lse = attend_part(q, k, v, causal)
    close(found, expected)
    torch.testing.assert_close(found_lse, expected_lse, rtol=0, atol=1e-3)
    assert found_lse.dtype == torch.float32
    grads = attend_part_backward(grad, q, k, v, out.bfloat16(), lse, causal)
    for got, whole in zip(grads, wide_grads, strict=True):
        close(got, module._of_groups(whole, got.shape[1]))


@on_gpu
def test_choice_on_a_device() -> None:
    """What torch takes itself, and never cuDNN where algorithms must be deterministic."""
    q, k, v = (torch.randn(1, 4, 256, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    major, _ = torch.cuda.get_device_capability()
    if major == 9 and torch.backends.cudnn.version() > 91500:
        assert choose_kernel(q, k, v, True, False) is Kernel.CUDNN
    for backend, kernel in ((SDPBackend.CUDNN_ATTENTION, Kernel.CUDNN), (SDPBackend.FLASH_ATTENTION, Kernel.FLASH)):
        if can_run(kernel, q, k, v, True):
            with sdpa_kernel(backend):
                assert choose_kernel(q, k, v, True, False) is kernel
    torch.use_deterministic_algorithms(True)
    try:
        assert choose_kernel(q, k, v, True, False) is Kernel.FLASH
        grads = [attend_part_backward(q, q, k, v, *attend_part(q, k, v, True), True) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
