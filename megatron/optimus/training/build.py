"""Model and data of a run, as its configuration describes them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron.optimus.config.duration import total_samples
from megatron.optimus.config.schema import Packing, RunConfig, parse_split
from megatron.optimus.data.dataset import InstanceSet, SampleOptions, Split
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.files import TokenFiles, open_on_all_ranks
from megatron.optimus.data.fim import FillInTheMiddle
from megatron.optimus.data.loader import BatchLoader
from megatron.optimus.data.mixture import CorpusPlan, Mixture, log_plan
from megatron.optimus.data.sources import Sources, read_sources
from megatron.optimus.data.tokenize.tokenizer import build_tokenizer
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights
from megatron.optimus.moe.dispatch.ownership import read_placements
from megatron.optimus.moe.dispatch.select import settle_transport
from megatron.optimus.parallel.apply import connect, parallelize
from megatron.optimus.parallel.context import own_positions
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.ranks import Ranks
from megatron.optimus.training.engine import DTYPES
from megatron.optimus.training.kernel_tuning import settle_tiles
from megatron.optimus.training.step import own_part

logger = logging.getLogger("optimus")


def build_model(config: RunConfig, mesh: Mesh, device: torch.device) -> Decoder:
    """This rank's share of the model with its initial weights, on the device. Collective."""
    dtype = DTYPES[config.training.params_dtype]
    with torch.device("meta"):
        model = Decoder(config.model)
    placements = read_placements(config, mesh, device)
    parallel = settle_transport(config, mesh, device, dtype)
    settle_tiles(replace(config, parallel=parallel), device, dtype)
    parallelize(model, mesh, parallel, config.training.seq_length, placements)
    initialize_weights(model, seed=config.training.seed, device=device, dtype=dtype)
    connect(model, mesh)
    return model


VALIDATION, TEST = "validation", "test"  # the shares of ``split`` beside the names of further validation sets


@dataclass(frozen=True)
class RunData:
    train: BatchLoader
    valid: dict[str, BatchLoader]  # by name: VALIDATION, and further sets; none when validation is off
    test: dict[str, BatchLoader]  # by name


def build_data(config: RunConfig, mesh: Mesh, device: torch.device) -> RunData:
    """Loaders of this rank's training and validation batches; each validation is one fixed set. Collective.

    Raises DataError on every rank if the data cannot be used on any.
    """
    ranks = Ranks(None, device)
    sources, files = _open(config, ranks)
    return ranks.together(lambda: _loaders(config, mesh, device, sources, files), "opening the data", DataError)


def _open(config: RunConfig, ranks: Ranks) -> tuple[Sources, TokenFiles]:
    """What the training data are, and the files of these and of the validation and test sets, each once."""
    sources = ranks.together(lambda: read_sources(config.data), "reading what the data is", DataError)
    sets = config.data.valid_sets | config.data.test_sets
    further = [prefix for prefixes in sets.values() for prefix in prefixes]
    return sources, open_on_all_ranks(list(dict.fromkeys([*sources.prefixes, *further])), ranks)


def build_evaluation_data(config: RunConfig, mesh: Mesh, device: torch.device) -> dict[str, BatchLoader]:
    """Loaders of VALIDATION and TEST, those of the two whose share holds a global batch, and of the further validation
    and test sets. Collective.

    Raises DataError on every rank if there are none, if a further set is too small, or if the data cannot be used.
    """
    ranks = Ranks(None, device)
    sources, files = _open(config, ranks)

    def loaders() -> dict[str, BatchLoader]:
        options, _ = _documents(config)
        shares = parse_split(config.data.split)
        parts = {name: part for name, part in ((VALIDATION, Split.VALID), (TEST, Split.TEST)) if shares[part] > 0}
        parts = parts if sources.prefixes else {}
        found, problems = {}, []
        for name, part in parts.items():
            try:
                instances = _instances(config, sources, files, part)
                found[name] = _loader(config, mesh, device, options, None, instances, part)
            except DataError as error:
                problems.append(f"{name}: {error}")
        for option, sets in (("valid_data_path", config.data.valid_sets), ("test_data_path", config.data.test_sets)):
            found.update(_further_sets(sets, option, config, mesh, device, options, files))
        if not found:
            raise DataError("; ".join(problems))
        for problem in problems:
            logger.warning("not evaluated: %s", problem)
        return found

    return ranks.together(loaders, "opening the data", DataError)


def _loaders(config: RunConfig, mesh: Mesh, device: torch.device, sources: Sources, files: TokenFiles) -> RunData:
    train = _instances(config, sources, files, Split.TRAIN)
    total = total_samples(config.training)
    if isinstance(train, Mixture):
        plan = train.plan(total)
    else:
        plan = [CorpusPlan("all", len(sources.prefixes), train.num_tokens, len(train), total)]
    log_plan(plan, total, config.data.max_data_epochs)
    options, fim = _documents(config)
    loader = partial(_loader, config, mesh, device, options)
    valid = {}
    if config.training.eval_interval > 0:
        if parse_split(config.data.split)[Split.VALID] > 0:
            valid[VALIDATION] = loader(None, _instances(config, sources, files, Split.VALID), Split.VALID)
        valid.update(_further_sets(config.data.valid_sets, "valid_data_path", config, mesh, device, options, files))
    test = _further_sets(config.data.test_sets, "test_data_path", config, mesh, device, options, files)
    return RunData(loader(fim, train, Split.TRAIN), valid, test)


def _further_sets(
    sets: dict[str, list[str]],
    option: str,
    config: RunConfig,
    mesh: Mesh,
    device: torch.device,
    options: SampleOptions,
    files: TokenFiles,
) -> dict[str, BatchLoader]:
    """Loaders of the sets that an option names, each of whole files in their order."""
    loaders = {}
    for name, prefixes in sets.items():
        try:
            instances = InstanceSet(
                prefixes, config.training.seq_length, split="0,1,0", **_reading(config, files, Split.VALID)
            )
            loaders[name] = _loader(config, mesh, device, options, None, instances, Split.VALID)
        except DataError as error:
            raise DataError(f"{option}, set {name}: {error}") from error
    return loaders


def _instances(config: RunConfig, sources: Sources, files: TokenFiles, part: Split) -> InstanceSet | Mixture:
    training, options = config.training, _reading(config, files, part)
    if sources.is_blend:
        return Mixture(sources, training.seq_length, split=config.data.split, seed=training.seed, **options)
    return InstanceSet(sources.prefixes, training.seq_length, split=config.data.split, **options)


def _reading(config: RunConfig, files: TokenFiles, part: Split) -> dict[str, Any]:
    """How instances are cut and read, whatever the files."""
    return {
        "part": part,
        "files": files,
        "vocab_size": config.model.vocab_size,
        "packing": config.data.packing is Packing.BEST_FIT,
        "extra_token": config.data.add_extra_token_to_sequence,
    }


def _documents(config: RunConfig) -> tuple[SampleOptions, FillInTheMiddle | None]:
    """What is done to documents. Raises DataError if the tokenizer cannot be read or lacks a token."""
    data = config.data
    tokenizer = build_tokenizer(data.tokenizer_type, data.tokenizer_model) if data.needs_eod else None
    options = SampleOptions(
        None if tokenizer is None else tokenizer.eod_id,
        reset_attention_mask=data.reset_attention_mask,
        reset_position_ids=data.reset_position_ids,
        eod_mask_loss=data.eod_mask_loss,
    )
    if tokenizer is None or not data.fim_rate:
        return options, None
    known, limit = tokenizer, config.model.vocab_size

    def sentinel(option: str) -> int:
        name = getattr(data, option)
        found = known.token_id(name)
        if found is None or found >= limit:
            has = "no such token" if found is None else f"it as {found}, outside vocab_size={limit}"
            raise DataError(f"{option}={name!r}: the tokenizer {data.tokenizer_model} has {has}")
        return found

    sentinels = sentinel("fim_prefix_token"), sentinel("fim_middle_token"), sentinel("fim_suffix_token")
    return options, FillInTheMiddle(data.fim_rate, data.fim_spm_rate, sentinels, tokenizer)


def _loader(
    config: RunConfig,
    mesh: Mesh,
    device: torch.device,
    options: SampleOptions,
    fim: FillInTheMiddle | None,
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
        max_batches=None if part is Split.TRAIN else training.eval_iters,
        ramp=tuple(training.rampup_batch_size) if part is Split.TRAIN else (),
        options=options,
        fim=fim,
        keep=partial(own_part, positions_S=own_positions(training.seq_length, config.parallel, mesh)),
        pin_for=device if config.data.pin_memory else None,
    )
