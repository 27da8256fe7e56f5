"""With a cache and padding, a sequence gets what the training forward gives it alone."""

from __future__ import annotations

import pytest
import torch

from megatron.optimus.inference.cache import KVCache
from megatron.optimus.layers.attention import causal_attention
from megatron.optimus.layers.rope import rope_table
from tests.unit.inference.cases import MODELS, decoder, prompts

PAD = 9


def padded(sequences: list[list[int]], pad: int = PAD) -> tuple[torch.Tensor, list[int]]:
    paddings = [max(map(len, sequences)) - len(sequence) for sequence in sequences]
    return torch.tensor([[pad] * n + sequence for n, sequence in zip(paddings, sequences, strict=True)]), paddings


@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch_in_steps_equals_each_sequence_in_one_forward(name: str) -> None:
    model = decoder(name)
    sequences = prompts(5)
    sequences[1] = sequences[1][:1]  # a single token beside longer ones
    continuation = torch.randint(0, 256, (5, 4), generator=torch.Generator().manual_seed(2))
    tokens, paddings = padded(sequences)
    cache = KVCache(model, paddings, tokens.shape[1] + 4, torch.device("cpu"))
    found = [model.lm_head(cache.forward(tokens)[:, -1])]
    found += [model.lm_head(cache.forward(continuation[:, step : step + 1])[:, -1]) for step in range(4)]
    for row, sequence in enumerate(sequences):
        whole = torch.tensor([sequence + continuation[row].tolist()])
        expected = model(whole).logits_BSV[0, len(sequence) - 1 :]
        torch.testing.assert_close(torch.stack([logits[row] for logits in found]), expected, rtol=1e-5, atol=1e-5)
    assert all(block.attention.core_attention is causal_attention for block in model.layers)


def test_tokens_have_the_positions_that_they_have_alone_and_every_position_sees_a_key() -> None:
    model = decoder("dense")
    ropes: list[tuple[torch.Tensor, torch.Tensor]] = []
    model.layers[0].register_forward_hook(lambda module, args, output: ropes.append(args[1]))
    tokens, paddings = padded([[1, 2, 3, 4], [5]])
    cache = KVCache(model, paddings, 6, torch.device("cpu"))
    for step in (tokens, tokens[:, :1], tokens[:, :1]):
        cache.forward(step)
        assert cache.mask_BSP is not None and cache.mask_BSP.any(dim=-1).all()  # without a key: NaN in some kernels
    for found, table in zip(zip(*ropes, strict=True), rope_table(6, model.config, torch.device("cpu")), strict=True):
        rows = torch.cat(found, dim=2)[:, 0]
        torch.testing.assert_close(rows[0], table, rtol=0, atol=0)
        torch.testing.assert_close(rows[1, 3:], table[:3], rtol=0, atol=0)


def test_what_stands_in_the_padding_does_not_matter() -> None:
    model = decoder("moe")
    sequences = prompts(3)
    results = []
    for pad in (0, 200):
        tokens, paddings = padded(sequences, pad)
        cache = KVCache(model, paddings, tokens.shape[1] + 1, torch.device("cpu"))
        results.append((cache.forward(tokens)[:, -1], cache.forward(tokens[:, :1] * 0)[:, -1]))
        assert not results[-1][0].isnan().any()
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("lengths", [(6, 6), (6, 3)])
def test_a_prompt_may_come_in_several_parts(lengths: tuple[int, int]) -> None:
    model = decoder("dense")
    sequences = [list(range(10, 10 + length)) for length in lengths]
    tokens, paddings = padded(sequences)
    whole = KVCache(model, paddings, 6, torch.device("cpu")).forward(tokens)[:, -1]
    cache = KVCache(model, paddings, 6, torch.device("cpu"))
    cache.forward(tokens[:, :4])
    torch.testing.assert_close(cache.forward(tokens[:, 4:])[:, -1], whole, rtol=1e-5, atol=1e-5)


def test_a_step_computes_its_own_tokens_only() -> None:
    model = decoder("dense")
    seen: list[int] = []
    model.layers[0].register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    cache = KVCache(model, [0], 12, torch.device("cpu"))
    cache.forward(torch.arange(8)[None])
    cache.forward(torch.tensor([[5]]))
    cache.forward(torch.tensor([[6]]))
    assert seen == [8, 1, 1]
    assert cache.length == 10


def test_the_training_attention_is_back_after_an_error() -> None:
    model = decoder("dense")
    with pytest.raises(IndexError):
        KVCache(model, [0], 4, torch.device("cpu")).forward(torch.tensor([[100_000]]))
    assert all(block.attention.core_attention is causal_attention for block in model.layers)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [("dense", torch.bfloat16, 0.1), *((name, torch.float32, 1e-3) for name in MODELS)],  # TF32 is off by default
)
def test_a_padded_batch_on_a_gpu_equals_the_training_forward(name: str, dtype: torch.dtype, tolerance: float) -> None:
    device = torch.device("cuda")
    model = decoder(name).to(device, dtype)
    tokens, paddings = padded(prompts(4))
    tokens = tokens.to(device)
    cache = KVCache(model, paddings, tokens.shape[1] + 1, device)
    found = model.lm_head(cache.forward(tokens)[:, -1]), model.lm_head(cache.forward(tokens[:, -1:])[:, -1])
    for row, padding in enumerate(paddings):
        whole = torch.cat([tokens[row, padding:], tokens[row, -1:]])[None]
        for step, logits in zip((-2, -1), found, strict=True):
            expected = model(whole).logits_BSV[0, step]
            torch.testing.assert_close(logits[row], expected, rtol=tolerance, atol=tolerance)
