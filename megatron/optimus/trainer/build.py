"""Model and data of a run, as its configuration describes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.optimus.config.schema import Precision, RunConfig
from megatron.optimus.data.dataset import InstanceSet, Split
from megatron.optimus.data.loader import BatchLoader
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights
from megatron.optimus.parallel.apply import parallelize
from megatron.optimus.parallel.mesh import Mesh

DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP32: torch.float32}


def build_model(config: RunConfig, mesh: Mesh, device: torch.device) -> Decoder:
    """This rank's share of the model with its initial weights, on the device."""
    with torch.device("meta"):
        model = Decoder(config.model)
    parallelize(model, mesh, config.parallel)
    initialize_weights(model, seed=config.training.seed, device=device, dtype=DTYPES[config.training.params_dtype])
    return model


@dataclass(frozen=True)
class RunData:
    train: BatchLoader
    valid: BatchLoader | None  # None when validation is off


def build_data(config: RunConfig, mesh: Mesh) -> RunData:
    """Loaders of this rank's training and validation batches; validation is one fixed set in file order."""
    validate = config.training.eval_interval > 0
    return RunData(_loader(config, mesh, Split.TRAIN), _loader(config, mesh, Split.VALID) if validate else None)


def _loader(config: RunConfig, mesh: Mesh, part: Split) -> BatchLoader:
    training, data = config.training, config.data
    return BatchLoader(
        InstanceSet(data.data_path, training.seq_length, split=data.split, part=part),
        seq_length=training.seq_length,
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        data_parallel_rank=mesh.index("dp"),
        data_parallel_size=mesh.size("dp"),
        seed=training.seed,
        shuffle=part is Split.TRAIN,
        max_batches=training.eval_iters if part is Split.VALID else None,
    )
