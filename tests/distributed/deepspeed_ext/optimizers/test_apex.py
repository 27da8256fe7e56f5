"""apex's norms and FusedAdam equal ours, by a stand-in with its signatures; real apex was not run."""

from __future__ import annotations

import pytest
import torch

from deepspeed_ext.optimizers import Shard, StepScalars, shard_optimizer_for
from megatron.optimus.config.choices import KernelLibrary, OptimizerName, OptimizerStateDtype
from megatron.optimus.config.schema import ConfigError, DistributedBackend, ModelConfig, OptimizerConfig, RunConfig
from megatron.optimus.parallel.converters import apex_norms
from megatron.optimus.platform.device import start_line
from tests.apex_stand_in import installed
from tests.distributed.layouts import deviation
from tests.helpers import run_distributed
from tests.unit.parallel.converters.test_apex_norms import _Tiny

APEX = KernelLibrary.APEX


def trained(rank: int, world: int) -> dict[str, float]:
    """How far reports and weights of three steps with apex are from those of three of ours."""
    from tests.distributed import test_training_layouts as layouts
    from tests.distributed.training_cases import Case

    layouts._init()
    case = Case(dict(tensor_model_parallel_size=2, expert_model_parallel_size=2), "moe, shared experts")
    lines, weights = layouts.train(rank, world, case)
    kept = {name: weight.detach().clone() for name, weight in weights.items()}
    with installed() as calls:
        apex = case._replace(optimizer={"optimizer_backend": APEX})
        own = layouts.run_config
        layouts.run_config = lambda case: _with_norms(own(case))
        try:
            own_lines, found = layouts.train(rank, world, apex)
        finally:
            layouts.run_config = own
    assert calls.count("adam") > 0 and calls.count("rms") > 0
    differs = {name: deviation(weight.detach(), kept[name]) for name, weight in found.items()}
    return differs | {"lines": deviation(own_lines, lines, each=True)}


def _with_norms(config: RunConfig) -> RunConfig:
    config.training.norm_backend = APEX
    return config


def test_three_steps_at_tp_2_ep_2_equal_ours() -> None:
    for found in run_distributed(trained, 2):
        assert found and max(found.values()) < 2e-5, found


def test_a_run_goes_on_with_fused_adam_where_another_adamw_stopped() -> None:
    """States move between both; a skipped step changes nothing, also not the count of steps."""
    gradients = torch.randn(5, 40, generator=torch.Generator().manual_seed(2))
    weights = torch.linspace(-1, 1, 40)
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    expected = torch.nn.Parameter(weights.clone())
    adamw = torch.optim.AdamW([expected], **options)
    with installed() as calls:
        from apex.optimizers import FusedAdam

        shard = Shard(weights.clone(), torch.empty(40), torch.empty(40, dtype=torch.bfloat16))
        for number, gradient in enumerate(gradients, start=1):
            if number != 4:  # one optimizer for the first three steps; another one takes over their states
                optimizer = FusedAdam if number > 1 else torch.optim.AdamW
                made = optimizer([torch.empty(40)], **options)
                group = made.param_groups[0]
                runs = shard_optimizer_for(made, group)
                kept, shard.state = shard.state, runs.new_state(shard, group)
                for kind, value in kept.items():
                    shard.state[kind].copy_(value)
            for skip in (True, False):
                shard.grad = gradient * (torch.nan if skip else 4.0)
                runs.update_(shard, group, StepScalars.of(torch.device("cpu"), number, scale=0.25, skip=skip))
            expected.grad = gradient
            adamw.step()
            torch.testing.assert_close(shard.master, expected.detach(), rtol=1e-5, atol=1e-6)
            assert torch.equal(shard.param, shard.master.bfloat16())
        assert calls == ["adam"] * 4


def test_what_is_absent_or_does_not_fit_is_one_line() -> None:
    from megatron.optimus.training.engine import build_optimizer

    model = _Tiny(ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1))
    absent = "apex is not installed; build it from its source with its CUDA extension, or load its module"
    with pytest.raises(ConfigError, match=f"norm_backend=apex: {absent}; leave it out"):
        apex_norms.convert(model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"optimizer_backend=apex: {absent}; leave it out"):
        build_optimizer(model, OptimizerConfig(optimizer_backend=APEX))
    for options in (
        {"optimizer": OptimizerName.LION},
        {"zero_stage": 3},
        {"optimizer_state_dtype": OptimizerStateDtype.BF16},
    ):
        with pytest.raises(
            ConfigError, match=f"optimizer_backend=apex with {next(iter(options))}=.* its FusedAdam needs"
        ):
            OptimizerConfig(optimizer_backend=APEX, **options)  # type: ignore[arg-type]


def test_the_line_at_the_start_says_what_is_taken_from_apex() -> None:
    with installed():
        line = start_line(torch.device("cpu"), DistributedBackend.AUTO, ["fused norms", "FusedAdam"])
    assert line.endswith("collectives by gloo; apex unknown (fused norms, FusedAdam)")
