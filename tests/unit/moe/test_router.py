"""Router choices, balancing losses, expert bias and statistics against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.optimus import ops
from megatron.optimus.config.schema import LoadBalancing, ModelConfig, ScoreFunction
from megatron.optimus.moe.router import Router, load_balancing_loss, updated_expert_bias

transformers = pytest.importorskip("transformers")


def config(**changes: object) -> ModelConfig:
    small = dict(
        num_layers=1, hidden_size=12, num_attention_heads=2, vocab_size=32, num_experts=8, moe_ffn_hidden_size=6
    )
    return ModelConfig(**{**small, "moe_router_topk": 2, **changes})


def router(**changes: object) -> Router:
    torch.manual_seed(0)
    made = Router(config(**changes))
    torch.nn.init.normal_(made.weight)
    return made


def test_weights_are_not_renormalised_by_default() -> None:
    routing, *_ = router()(torch.randn(20, 12))
    scores_TE = routing.scores_TE
    assert torch.equal(routing.weights_TK, scores_TE.topk(2, dim=-1).values)
    assert (routing.weights_TK.sum(-1) < 1).all()


def test_renormalised_and_sigmoid_scores() -> None:
    routing, *_ = router(moe_router_norm_topk_prob=True, moe_router_score_function=ScoreFunction.SIGMOID)(
        torch.randn(20, 12)
    )
    torch.testing.assert_close(routing.weights_TK.sum(-1), torch.ones(20))
    assert (routing.scores_TE.sum(-1) != 1).any()


def test_router_computes_in_fp32_whatever_the_weights() -> None:
    low = router().to(torch.bfloat16)
    routing, losses, _ = low(torch.randn(5, 12, dtype=torch.bfloat16))
    assert routing.weights_TK.dtype == losses.aux_loss.dtype == losses.z_loss.dtype == torch.float32


def test_forced_uniform_routing_is_perfectly_even_but_trains_the_router() -> None:
    forced = router(moe_router_force_load_balancing=True)
    routing, *_ = forced(torch.randn(16, 12))
    assert forced.step_counts_E.tolist() == [4] * 8
    assert all(len(set(row)) == 2 for row in routing.indices_TK.tolist())
    routing.weights_TK.sum().backward()
    assert forced.weight.grad.abs().sum() > 0


def test_balanced_load_gives_topk_and_collapse_gives_num_experts_times_topk_share() -> None:
    assert load_balancing_loss(torch.full((4,), 0.25), torch.full((4,), 4), 8) == pytest.approx(2.0)
    assert load_balancing_loss(torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([0, 8, 0, 0]), 8) == pytest.approx(4.0)


def test_global_loss_uses_the_whole_step() -> None:
    """Two micro-batches seen one after the other: the second one's loss knows both loads."""
    both = router(moe_router_load_balancing_type=LoadBalancing.GLOBAL_AUX_LOSS)
    first_TD, second_TD = torch.randn(10, 12), torch.randn(30, 12)
    both(first_TD)
    with torch.no_grad():
        both(second_TD)  # an evaluation does not count
    assert both.step_counts_E.sum() == 2 * 10
    routing, second, _ = both(second_TD)
    expected = load_balancing_loss(routing.scores_TE.mean(0), both.step_counts_E, 40)
    torch.testing.assert_close(second.aux_loss, expected)
    both.finish_step(both.step_counts_E, 0.1)
    assert both.step_counts_E.sum() == 0


def test_z_loss_and_entropy_closed_forms() -> None:
    indices_TK = torch.zeros(5, 1, dtype=torch.int64)
    even = ops.router_statistics(torch.zeros(5, 5), torch.full((5, 5), 0.2), indices_TK)
    assert even.z_loss.item() == pytest.approx(math.log(5) ** 2)
    assert even.entropy.item() == pytest.approx(math.log(5))
    assert ops.router_statistics(torch.zeros(5, 5), torch.eye(5), indices_TK).entropy.item() == 0.0


def test_expert_bias_steers_choice_but_not_weights() -> None:
    biased = router(moe_router_enable_expert_bias=True)
    x_TD = torch.randn(50, 12)
    biased.expert_bias[3] = 10.0
    routing, *_ = biased(x_TD)
    assert (routing.indices_TK == 3).any(dim=-1).all()
    torch.testing.assert_close(routing.weights_TK, routing.scores_TE.gather(-1, routing.indices_TK))
    moved = updated_expert_bias(torch.zeros(4), torch.tensor([10, 2, 6, 6]), 0.5)
    assert moved.tolist() == [-0.5, 0.5, 0.0, 0.0]


def test_expert_bias_evens_out_a_skewed_router() -> None:
    skewed = router(moe_router_enable_expert_bias=True)
    skewed.weight.data[0] *= 4
    torch.manual_seed(5)
    x_TD = torch.randn(400, 12)

    def imbalance() -> float:
        skewed(x_TD)
        counts_E = skewed.step_counts_E.clone()
        skewed.finish_step(counts_E, 0.001)
        return (counts_E.max() / counts_E.float().mean()).item()

    loads = [imbalance() for _ in range(1000)]
    assert loads[0] > 1.6
    assert sum(loads[-200:]) / 200 < 1.4  # a mean, because sign steps hunt around the even load


def test_expert_bias_keeps_fp32_when_the_model_is_cast() -> None:
    cast = router(moe_router_enable_expert_bias=True).to(torch.bfloat16)
    assert cast.expert_bias.dtype == torch.float32
    assert cast.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fp32_product_keeps_the_tokens_in_their_own_dtype(dtype: torch.dtype) -> None:
    """Same numbers as with fp32 copies, and no such copy among what is kept for the backward."""
    layer = router().to(dtype)
    x_TD = torch.randn(5, 12).to(dtype).requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        routing, *_ = layer(x_TD)
    routing.weights_TK.square().sum().backward()
    assert not any(t.shape == x_TD.shape and t.dtype != dtype for t in kept)
    twin, weight = x_TD.detach().requires_grad_(), layer.weight.detach().requires_grad_()
    logits_TE = torch.nn.functional.linear(twin.float(), weight.float())
    ops.route(logits_TE, torch.eye(logits_TE.shape[1]), 2)[0].weights_TK.square().sum().backward()
    assert torch.equal(x_TD.grad, twin.grad)
    assert torch.equal(layer.weight.grad, weight.grad)


def test_auxiliary_loss_equals_transformers_for_one_layer() -> None:
    """transformers pools layers; for a single layer its loss and ours are the same quantity."""
    from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

    from megatron.optimus.moe.router import load_balancing_loss
    from megatron.optimus.ops import router_statistics
    from megatron.optimus.ops.reference import router_topk

    torch.manual_seed(1)
    logits_TE = torch.randn(50, 8)
    routing = router_topk(logits_TE, 3)
    statistics = router_statistics(logits_TE, routing.scores_TE, routing.indices_TK)
    ours = load_balancing_loss(statistics.share_E, statistics.counts_E, 50)
    torch.testing.assert_close(ours, load_balancing_loss_func((logits_TE,), 8, 3))
