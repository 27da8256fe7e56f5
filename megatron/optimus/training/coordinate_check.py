"""The coordinate check of a parametrization: how far a few steps move activations, at several widths and depths.

With muP the change of every activation is as large in a wide model as in a narrow one; with standard parametrization it
grows with the width, which is why the best rate falls (arXiv 2203.03466, appendix D.1). The tokens are random and the
same in every step, so no data is needed. Models run whole, on one device, without clipping.

Shapes: B sequences, S positions, V vocabulary rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.optimus.config.schema import ConfigError, ModelConfig, RunConfig
from megatron.optimus.context import DTYPES
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.seeding import generator_for
from megatron.optimus.training.engine import build_optimizer

RESIDUAL, LOGITS = "residual stream", "logits"


@dataclass(frozen=True)
class Coordinates:
    """Root mean squares of activations by name; those of layers are means over the layers."""

    start: dict[str, float]
    change: dict[str, float]  # of the difference to the start, after the steps


def scaled(model: ModelConfig, *, width: int | None = None, depth: int | None = None) -> ModelConfig:
    """The model with another width or depth: heads and inner widths in proportion, the width of a head as it is.

    Raises:
        ConfigError: a size would not be a whole number.
    """
    sizes: dict[str, Any] = {} if depth is None else {"num_layers": depth}
    if width is not None:
        sizes |= {"hidden_size": width, "kv_channels": model.head_dim}
        for name in (
            "num_attention_heads",
            "num_query_groups",
            "ffn_hidden_size",
            "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
        ):
            value = getattr(model, name)
            if value is not None:
                sizes[name], rest = divmod(value * width, model.hidden_size)
                if rest:
                    raise ConfigError(
                        f"width {width}: {name}={value} x {width} / hidden_size={model.hidden_size} is no whole "
                        f"number; use multiples of {model.hidden_size // math.gcd(model.hidden_size, value)}"
                    )
    return replace(model, **sizes)


def measure(config: RunConfig, num_steps: int, num_seeds: int = 1) -> Coordinates:
    """Trains the model of a run for a few steps on one batch of random tokens.

    Args:
        config: the run; of training it reads micro_batch_size, seq_length, params_dtype and seed.
        num_steps: optimizer steps.
        num_seeds: models over whose squares the mean is taken.
    """
    squares: list[dict[tuple[str, bool], float]] = []
    for seed in range(num_seeds):
        start, end = _activations(config, config.training.seed + seed, num_steps)
        found = {(name, False): _mean_square(values) for name, values in start.items()}
        for name, values in end.items():
            found[name, True] = _mean_square([now - was for now, was in zip(values, start[name], strict=True)])
        squares.append(found)
    roots = {key: math.sqrt(sum(one[key] for one in squares) / num_seeds) for key in squares[0]}
    return Coordinates(*({name: size for (name, of), size in roots.items() if of is kind} for kind in (False, True)))


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The exponent p of the power law size^p that fits the values best; 0 where one of them is 0."""
    if len(sizes) < 2 or not all(math.isfinite(value) and value > 0 for value in values):
        return 0.0 if all(math.isfinite(value) for value in values) else math.inf
    x, y = ([math.log(one) for one in row] for row in (sizes, values))
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    spread = sum((one - x_mean) ** 2 for one in x)
    return sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / spread


Activations = dict[str, list[Tensor]]  # by name, one of each layer


def _activations(config: RunConfig, seed: int, num_steps: int) -> tuple[Activations, Activations]:
    """Those of the first forward, and of one after the steps."""
    device = devices.device_for_rank(config.parallel.device, 0)
    with torch.device("meta"):
        model = Decoder(config.model)
    initialize_weights(model, seed=seed, device=device, dtype=DTYPES[config.training.params_dtype])
    shape = (config.training.micro_batch_size, config.training.seq_length + 1)
    draw = generator_for(seed, "coordinate check")
    tokens_BS = torch.randint(config.model.vocab_size, shape, generator=draw).to(device)
    optimizer = build_optimizer(model, config.optimizer)
    found: Activations = {}
    start: Activations = {}
    taps = _tap(model, found)
    for step in range(num_steps + 1):
        found.clear()
        logits_BSV = model(tokens_BS[:, :-1]).logits_BSV
        found[LOGITS] = [logits_BSV.detach().float()]
        if step == 0:
            start = dict(found)
        if step < num_steps:
            F.cross_entropy(logits_BSV.float().flatten(0, 1), tokens_BS[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for tap in taps:
        tap.remove()
    return start, found


def _tap(model: Any, found: Activations) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that add activations to ``found`` in every forward."""

    def add(name: str, value: Callable[[Any, Any, Any], Tensor]) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            found.setdefault(name, []).append(value(module, inputs, output).detach().float())

        return hook

    def first(module: Any, inputs: Any, output: Any) -> Tensor:
        return output[0] if isinstance(output, tuple) else output

    def router_logits(module: Any, inputs: Any, output: Any) -> Tensor:
        return F.linear(inputs[0].float(), module.weight.float())

    taps = [model.embedding.register_forward_hook(add("embedding", first))]
    for layer in model.layers:
        taps.append(layer.attention.register_forward_hook(add("attention", first)))
        if layer.is_moe:
            taps.append(layer.moe.router.register_forward_hook(add("router logits", router_logits)))
            taps.append(layer.moe.register_forward_hook(add("experts", first)))
        else:
            taps.append(layer.mlp.register_forward_hook(add("MLP", first)))
    return [*taps, model.final_norm.register_forward_hook(add(RESIDUAL, lambda module, inputs, output: inputs[0]))]


def _mean_square(values: Sequence[Tensor]) -> float:
    return sum(value.double().square().mean().item() for value in values) / len(values)
