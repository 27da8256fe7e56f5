"""Model and data of a run, as its configuration describes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from megatron.optimus.config.schema import DataConfig, Precision, RunConfig
from megatron.optimus.data.dataset import InstanceSet, Split
from megatron.optimus.data.files import TokenFiles
from megatron.optimus.data.loader import BatchLoader
from megatron.optimus.data.mixture import CorpusPlan, Mixture, log_plan
from megatron.optimus.data.samples import SampleOptions
from megatron.optimus.data.sources import Sources, read_sources
from megatron.optimus.data.tokenizer import build_tokenizer
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights
from megatron.optimus.parallel.apply import connect, parallelize
from megatron.optimus.parallel.mesh import Mesh

DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP32: torch.float32}


def build_model(config: RunConfig, mesh: Mesh, device: torch.device) -> Decoder:
    """This rank's share of the model with its initial weights, on the device."""
    with torch.device("meta"):
        model = Decoder(config.model)
    parallelize(model, mesh, config.parallel)
    initialize_weights(model, seed=config.training.seed, device=device, dtype=DTYPES[config.training.params_dtype])
    connect(model, mesh)
    return model


@dataclass(frozen=True)
class RunData:
    train: BatchLoader
    valid: BatchLoader | None  # None when validation is off


def build_data(config: RunConfig, mesh: Mesh, device: torch.device) -> RunData:
    """Loaders of this rank's training and validation batches; validation is one fixed set."""
    sources = read_sources(config.data)
    files = TokenFiles(sources.prefixes)
    train = _instances(config, sources, files, Split.TRAIN)
    total = config.training.train_iters * config.training.global_batch_size
    if isinstance(train, Mixture):
        plan = train.plan(total)
    else:
        plan = [CorpusPlan("all", len(files), train.num_tokens, len(train), total)]
    log_plan(plan, total, config.data.max_data_epochs)
    valid = _instances(config, sources, files, Split.VALID) if config.training.eval_interval > 0 else None
    loader = partial(_loader, config, mesh, device, sample_options(config.data))
    return RunData(loader(train, Split.TRAIN), None if valid is None else loader(valid, Split.VALID))


def _instances(config: RunConfig, sources: Sources, files: TokenFiles, part: Split) -> InstanceSet | Mixture:
    training, data, vocab_size = config.training, config.data, config.model.vocab_size
    if sources.is_blend:
        seed = training.seed
        return Mixture(
            sources, training.seq_length, split=data.split, part=part, seed=seed, files=files, vocab_size=vocab_size
        )
    return InstanceSet(
        sources.prefixes, training.seq_length, split=data.split, part=part, files=files, vocab_size=vocab_size
    )


def sample_options(data: DataConfig) -> SampleOptions:
    """Raises DataError if the tokenizer that knows the end of a document cannot be read."""
    return SampleOptions(
        eod_id=build_tokenizer(data.tokenizer_type, data.tokenizer_model).eod_id if data.needs_eod else None,
        reset_attention_mask=data.reset_attention_mask,
        reset_position_ids=data.reset_position_ids,
        eod_mask_loss=data.eod_mask_loss,
    )


def _loader(
    config: RunConfig,
    mesh: Mesh,
    device: torch.device,
    options: SampleOptions,
    instances: InstanceSet | Mixture,
    part: Split,
) -> BatchLoader:
    training = config.training
    return BatchLoader(
        instances,
        seq_length=training.seq_length,
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        data_parallel_rank=mesh.index("dp"),
        data_parallel_size=mesh.size("dp"),
        seed=training.seed,
        shuffle=part is Split.TRAIN,
        max_batches=training.eval_iters if part is Split.VALID else None,
        options=options,
        pin_for=device if config.data.pin_memory else None,
    )
