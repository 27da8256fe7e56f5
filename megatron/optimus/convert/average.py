"""Averages of the weights of several checkpoints (model soups, Wortsman et al. 2022, arXiv 2203.05482).

The checkpoints may be of any layout and format that a conversion reads. One matrix at a time is read from each of them,
summed in fp32 and written, so memory does not grow with the model or with the number of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.config.serialize import changed_options, to_dict
from megatron.optimus.convert import Conversion, check_destination, convert_source, open_source
from megatron.optimus.convert.formats import WEIGHT, Options, Source
from megatron.optimus.models.parameters import parameter_shapes

# Options of a model that say how it is trained and not what its weights compute.
_OF_TRAINING = {"init_method_std", "moe_router_bias_update_rate", "moe_router_load_balancing_type"}


class AverageSource(Source):
    """The weighted mean of several sources, as a source of fp32 weights.

    Args:
        sources: of the same model.
        weights: one above zero for each of them; they need not sum to one.

    Raises:
        CheckpointError: two models differ; the message names the first difference.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]) -> None:
        first = sources[0]
        for other in sources[1:]:
            _check_alike(first, other)
        super().__init__(
            first.path,
            "average",
            first.run,
            token_ids=first.token_ids,
            generation=first.generation,
            tokenizer=first.tokenizer,
            tokenizer_hashes=first.tokenizer_hashes,
            tokenizer_identity=first.tokenizer_identity,
        )
        self._sources, self._weights = sources, weights
        self.dtypes = {(name, WEIGHT): torch.float32 for name in parameter_shapes(self.model)}
        for name in first.buffers:
            self.buffers[name] = self._mean(lambda source, name=name: source.buffers[name])  # type: ignore[misc]

    def read(self, name: str, kind: str, start: int, stop: int) -> torch.Tensor:
        """See Source.read."""
        return self._mean(lambda source: source.read(name, source.weight_kind("fp32"), start, stop))

    def finish(self) -> None:
        """See Source.finish."""
        for source in self._sources:
            source.finish()

    def files_to_check(self) -> list[Path]:
        """See Source.files_to_check."""
        return [file for source in self._sources for file in source.files_to_check()]

    def _mean(self, tensor_of: Callable[[Source], torch.Tensor]) -> torch.Tensor:
        """Sums in the order of the sources, then divides: what numpy.average computes of fp32 arrays."""
        total: torch.Tensor | None = None
        for source, weight in zip(self._sources, self._weights, strict=True):
            part = tensor_of(source).to(torch.float32) * weight
            total = part if total is None else total.add_(part)
        assert total is not None
        return total / torch.tensor(self._weights, dtype=torch.float32).sum()


def average(
    sources: Sequence[Path],
    destination: Path,
    weights: Sequence[float] | None = None,
    *,
    options: Options = Options(),  # noqa: B008 - frozen
    overwrite: bool = False,
    show_progress: Callable[[float], None] | None = None,
) -> Conversion:
    """Writes a model-only checkpoint whose weights are the mean of those of other checkpoints.

    Args:
        sources: folders in any format that ``convert`` reads; of a full checkpoint the fp32 masters are read.
        destination: a folder; it appears in one step.
        weights: one above zero for each source; None: all alike.
        options: ``dtype`` (None: fp32) and ``max_shard_bytes`` are read.
        overwrite: replace an earlier result.
        show_progress: called with the fraction of the work that is done.

    Returns:
        What was written.

    Raises:
        CheckpointError: fewer than two sources, weights that do not fit, models that differ, or a damaged source.
        ConfigError: the configuration of a model is not understood.
    """
    weights = [1.0] * len(sources) if weights is None else list(weights)
    if len(sources) < 2:
        raise CheckpointError(f"an average needs two checkpoints or more, {len(sources)} given")
    if len(weights) != len(sources):
        raise CheckpointError(f"--weights: {len(weights)} numbers for {len(sources)} checkpoints; give one for each")
    if not all(0 < weight < float("inf") for weight in weights):
        raise CheckpointError(f"--weights {','.join(map(str, weights))}: each must be above zero and finite")
    opened: list[Source] = []
    try:
        opened += (open_source(path) for path in sources)
        for source in opened:
            check_destination(source.path, destination, overwrite)
        mean = AverageSource(opened, weights)
        return convert_source(mean, destination, "optimus", options, overwrite=overwrite, show_progress=show_progress)
    finally:
        for source in opened:
            source.close()


def _check_alike(first: Source, other: Source) -> None:
    """Raises CheckpointError for the first difference between the models of two sources."""
    where = f"{other.path} is another model than {first.path}"
    shapes, others = parameter_shapes(first.model), parameter_shapes(other.model)
    changes = changed_options(*({"model": to_dict(source.run)["model"]} for source in (first, other)))
    for change in changes:
        name = change.split()[0].removeprefix("model.")
        if name not in _OF_TRAINING and not name.endswith("loss_coeff"):
            raise CheckpointError(f"{where}: {change}; average checkpoints of one model")
    for name in shapes | others:
        if shapes.get(name) != others.get(name):
            raise CheckpointError(f"{where}: {name} has shape {shapes.get(name)} and {others.get(name)}")
    if first.buffers.keys() != other.buffers.keys():
        name = min(first.buffers.keys() ^ other.buffers.keys())
        raise CheckpointError(f"{where}: one of them alone has the buffer {name}")
    prints = [(source.tokenizer_identity or {}).get("fingerprint") for source in (first, other)]
    if None not in prints and prints[0] != prints[1]:
        raise CheckpointError(f"{where}: their tokenizers differ, {prints[0]} and {prints[1]}")
