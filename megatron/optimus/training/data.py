"""The data of a run: loaders of its training, validation and test batches, and what a step needs to know of a batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.optimus.checkpoint import store
from megatron.optimus.config.duration import total_samples
from megatron.optimus.config.schema import Packing, RunConfig, SplitBy, parse_split
from megatron.optimus.context import RunContext
from megatron.optimus.data.dataset import InstanceSet, SampleOptions, Split, split_range
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.files import TokenFiles, open_on_all_ranks
from megatron.optimus.data.fim import FillInTheMiddle
from megatron.optimus.data.fingerprint import changes, lines_of
from megatron.optimus.data.loader import Batch, BatchLoader
from megatron.optimus.data.mixture import CorpusPlan, Mixture, log_plan
from megatron.optimus.data.ordered import is_ordered
from megatron.optimus.data.sources import Sources, read_sources
from megatron.optimus.data.splits import NO_HASH_SPLITS, HashSplits, hash_range
from megatron.optimus.data.tokenize.tokenizer import build_tokenizer
from megatron.optimus.layers import NO_LABEL
from megatron.optimus.parallel.context import own_positions
from megatron.optimus.platform.device import sum_dtype
from megatron.optimus.platform.memory import needs_memory
from megatron.optimus.platform.mesh import Mesh

logger = logging.getLogger("optimus")


_JUDGED_FILES = 8  # that are looked at for their order: it costs some 200 reads each
VALIDATION, TEST = "validation", "test"  # names of the shares of ``split``, beside those of the named sets


@dataclass(frozen=True)
class RunData:
    """The loaders of a training run on this rank."""

    train: BatchLoader
    valid: dict[str, BatchLoader]  # by name: VALIDATION, and further sets; none when validation is off
    test: dict[str, BatchLoader]  # by name
    fingerprints: list[str]  # a line for each token file (data/fingerprint.py)
    train_prefixes: list[str]


@needs_memory("opening the data")
def build_data(run: RunContext) -> RunData:
    """Builds the loaders of a training run; every validation reads the same batches. Collective.

    Raises DataError on every rank if the data cannot be used on any rank.
    """
    sources, files = _open(run, fingerprints=True)
    return run.ranks.run_on_all_ranks(lambda: _loaders(run, sources, files), "opening the data", DataError)


def _open(run: RunContext, *, fingerprints: bool = False) -> tuple[Sources, TokenFiles]:
    """Opens the files of the training data and of the named validation and test sets, each once.

    Replaces ``split_by`` "auto" by what it means for these files and this run, which checkpoints then record.
    """
    config, ranks = run.config, run.ranks
    sources = ranks.run_on_all_ranks(lambda: read_sources(config.data), "reading what the data is", DataError)
    sets = config.data.valid_sets | config.data.test_sets
    further = [prefix for prefixes in sets.values() for prefix in prefixes]
    prefixes = list(dict.fromkeys([*sources.prefixes, *further]))
    files = open_on_all_ranks(prefixes, ranks, config.data.split, fingerprints=fingerprints)

    def decide() -> bool:
        if ranks.rank > 0:
            return False
        split_by = decide_split(config, sources, files, _data_options_of_checkpoint(config))
        if split_by is SplitBy.POSITION and 0 < parse_split(config.data.split)[Split.TRAIN] < 1:
            _warn_of_ordered_files(sources.prefixes)
        return split_by is SplitBy.HASH

    [by_hash] = ranks.broadcast([int(ranks.run_on_all_ranks(decide, "opening the data", DataError))])
    config.data.split_by = SplitBy.HASH if by_hash else SplitBy.POSITION
    return sources, files


def _data_options_of_checkpoint(config: RunConfig) -> dict[str, Any] | None:
    """The section ``data`` of the checkpoint that this run will resume from; None where it begins anew."""
    options = config.checkpoint
    load = None if options.finetune or not options.load else Path(options.load)
    manifest = store.newest_manifest(config.checkpoint_folder, load)
    if manifest is None or not manifest.consumed_samples:  # an import has trained on nothing
        return None
    return dict(manifest.config.get("data", {}))


def decide_split(config: RunConfig, sources: Sources, files: TokenFiles, recorded: Mapping[str, Any] | None) -> SplitBy:
    """Decides what ``split_by`` means for a run.

    Args:
        config: of the run
        sources: its training data
        files: all files of its data
        recorded: the section ``data`` of the checkpoint that it resumes from; None: it begins anew

    Returns:
        HASH or POSITION.
    """
    data = config.data
    if data.split_by is not SplitBy.AUTO:
        return data.split_by
    if recorded is not None:
        before = recorded.get("split_by", SplitBy.POSITION.value)  # the only way before the option existed
        is_same = (recorded.get("data_path"), recorded.get("data_file_list")) == (data.data_path, data.data_file_list)
        if before == SplitBy.POSITION.value or (before == SplitBy.HASH.value and is_same):
            return SplitBy(before)
    splits = [files.splits[files.number[prefix]] for prefix in sources.prefixes]
    lacking = [prefix for prefix, one in zip(sources.prefixes, splits, strict=True) if one == NO_HASH_SPLITS]
    if lacking:
        if len(lacking) < len(splits):
            logger.warning(
                "splits are by position: %d of %d files, such as %s, were not preprocessed with --split-by hash",
                *(len(lacking), len(splits), lacking[0]),
            )
        return SplitBy.POSITION
    by_hash, by_position = _num_instances(config, sources, files, splits)
    batch = config.training.global_batch_size
    if any(found < min(batch, other) for found, other in zip(by_hash, by_position, strict=True)):
        logger.warning(
            "splits are by position: by hash, these few documents give %d samples to training and %d to validation, "
            "and a global batch has %d",
            *(*by_hash, batch),
        )
        return SplitBy.POSITION
    if len({one.seed for one in splits}) > 1:
        logger.warning(
            "the files were shuffled with different seeds (%s), so documents that several of them have may be in two "
            "splits; preprocess all with one --seed",
            ", ".join(str(seed) for seed in sorted({one.seed for one in splits})),
        )
    return SplitBy.HASH


def _num_instances(
    config: RunConfig, sources: Sources, files: TokenFiles, splits: Sequence[HashSplits]
) -> tuple[list[int], list[int]]:
    """Instances of the training and validation split, by hash and by position."""
    data, length = config.data, config.training.seq_length
    tokens = [int(files.tokens[files.number[prefix]]) for prefix in sources.prefixes]
    by_hash, by_position = [], []
    for part in (Split.TRAIN, Split.VALID):
        ranges = [hash_range(one, total, part) for one, total in zip(splits, tokens, strict=True)]
        by_hash.append(sum(max(0, stop - start - 1) // length for start, stop in ranges))
        ranges = [split_range(total, data.split, part) for total in tokens]
        by_position.append(sum(max(0, stop - start - 1) // length for start, stop in ranges))
    return by_hash, by_position


def _warn_of_ordered_files(prefixes: Sequence[str]) -> None:
    """Warns where a file's end, which splits by position validate on, is unlike the rest of it."""
    for prefix in prefixes[:: -(-len(prefixes) // _JUDGED_FILES) or 1]:
        if is_ordered(prefix):
            logger.warning(
                "%s is ordered: the documents at an end of it, where splits by position lie, are unlike the others; "
                "preprocess it again with --split-by hash, which shuffles, or name sets with --valid-data-path",
                prefix,
            )


def build_evaluation_data(run: RunContext) -> dict[str, BatchLoader]:
    """Builds the loaders of an evaluation, by name. Collective.

    They are VALIDATION and TEST, where the share of ``split`` holds a global batch, and the named validation and test
    sets. Raises DataError on every rank if there are none, if a named set is too small, or if the data cannot be used.
    """
    config = run.config
    sources, files = _open(run)

    def loaders() -> dict[str, BatchLoader]:
        options, _ = _documents(config)
        shares = parse_split(config.data.split)
        parts = {name: part for name, part in ((VALIDATION, Split.VALID), (TEST, Split.TEST)) if shares[part] > 0}
        parts = parts if sources.prefixes else {}
        found, problems = {}, []
        for name, part in parts.items():
            try:
                instances = _instances(config, sources, files, part)
                found[name] = _loader(run, options, None, instances, part)
            except DataError as error:
                problems.append(f"{name}: {error}")
        for option, sets in (("valid_data_path", config.data.valid_sets), ("test_data_path", config.data.test_sets)):
            found.update(_further_sets(run, sets, option, options, files))
        if not found:
            raise DataError("; ".join(problems))
        for problem in problems:
            logger.warning("not evaluated: %s", problem)
        return found

    return run.ranks.run_on_all_ranks(loaders, "opening the data", DataError)


def _loaders(run: RunContext, sources: Sources, files: TokenFiles) -> RunData:
    config = run.config
    train = _instances(config, sources, files, Split.TRAIN)
    total = total_samples(config.training)
    if isinstance(train, Mixture):
        plan = train.plan(total)
    else:
        plan = [CorpusPlan("all", len(sources.prefixes), train.num_tokens, len(train), total)]
    log_plan(plan, total, config.data.max_data_epochs)
    options, fim = _documents(config)
    loader = partial(_loader, run, options)
    valid = {}
    if config.training.eval_interval > 0:
        if parse_split(config.data.split)[Split.VALID] > 0:
            valid[VALIDATION] = loader(None, _instances(config, sources, files, Split.VALID), Split.VALID)
        valid.update(_further_sets(run, config.data.valid_sets, "valid_data_path", options, files))
    test = _further_sets(run, config.data.test_sets, "test_data_path", options, files)
    return RunData(loader(fim, train, Split.TRAIN), valid, test, lines_of(files), list(sources.prefixes))


def check_unchanged(run: RunContext, data: RunData, before: object) -> None:
    """Compares the token files with those of the checkpoint that a run goes on from. The same on every rank.

    Args:
        run: its configuration says whether changed training files are a warning; other files always are.
        data: of this run.
        before: the checkpoint's lines of fingerprints, if it has any.

    Raises:
        DataError: on every rank, if a training file has changed and that is not allowed; names the first.
    """
    trained = changes(before, data.fingerprints, data.train_prefixes)
    others = {line.split(" ", 2)[2] for line in data.fingerprints} - set(data.train_prefixes)
    if trained and not run.config.data.allow_changed_data:
        more = f" ({len(trained) - 1} more files have changed)" if len(trained) > 1 else ""
        raise DataError(f"{trained[0]}{more}. Restore it, or go on with the data as they are with --allow-changed-data")
    for text in [*trained, *changes(before, data.fingerprints, sorted(others))]:
        if run.mesh.rank == 0:
            logger.warning("%s", text)


def _further_sets(
    run: RunContext, sets: dict[str, list[str]], option: str, options: SampleOptions, files: TokenFiles
) -> dict[str, BatchLoader]:
    """Loaders of the sets that an option names; each reads whole files in their order."""
    loaders, config = {}, run.config
    for name, prefixes in sets.items():
        try:
            instances = InstanceSet(
                prefixes, config.training.seq_length, split="0,1,0", **_reading(config, files, Split.VALID)
            )
            loaders[name] = _loader(run, options, None, instances, Split.VALID)
        except DataError as error:
            raise DataError(f"{option}, set {name}: {error}") from error
    return loaders


def _instances(config: RunConfig, sources: Sources, files: TokenFiles, part: Split) -> InstanceSet | Mixture:
    training, options = config.training, _reading(config, files, part) | {"split_by": config.data.split_by}
    if sources.is_blend:
        return Mixture(sources, training.seq_length, split=config.data.split, seed=training.seed, **options)
    return InstanceSet(sources.prefixes, training.seq_length, split=config.data.split, **options)


def _reading(config: RunConfig, files: TokenFiles, part: Split) -> dict[str, Any]:
    """Options of cutting and reading instances that do not depend on the files."""
    return {
        "part": part,
        "files": files,
        "vocab_size": config.model.vocab_size,
        "packing": config.data.packing is Packing.BEST_FIT,
        "extra_token": config.data.add_extra_token_to_sequence,
    }


def _documents(config: RunConfig) -> tuple[SampleOptions, FillInTheMiddle | None]:
    """How documents are treated. Raises DataError if the tokenizer cannot be read or lacks a token."""
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
    run: RunContext,
    options: SampleOptions,
    fim: FillInTheMiddle | None,
    instances: InstanceSet | Mixture,
    part: Split,
) -> BatchLoader:
    config, mesh, training = run.config, run.mesh, run.config.training
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
        select=partial(context_parallel_slice, positions_S=own_positions(training.seq_length, config.parallel, mesh)),
        pin_for=run.device if config.data.pin_memory else None,
    )


def context_parallel_slice(batch: Batch, positions_S: Tensor | None) -> Batch:
    """The part of a micro-batch that a context-parallel rank works on.

    ``positions_S``: the positions of this rank in each sequence; None: all of them. Documents stay whole.
    """
    if positions_S is None:
        return batch
    tokens_BS, labels_BS = batch.tokens_BS[:, positions_S], batch.labels_BS[:, positions_S]
    if batch.positions_BS is None:
        places_BS = positions_S.expand_as(tokens_BS).contiguous()
    else:
        places_BS = batch.positions_BS[:, positions_S]
    num_labels = batch.num_labels
    if batch.has_equal_label_counts and num_labels is not None:
        # The mean over the parts, whose sum is the number of labels.
        num_labels *= positions_S.numel() / batch.labels_BS.shape[1]
    elif num_labels is not None:
        num_labels = int((labels_BS != NO_LABEL).sum())
    return Batch(tokens_BS, labels_BS, batch.documents, places_BS, num_labels, batch.has_equal_label_counts)


def num_labels(batch: Batch) -> float:
    """Labels that count in a micro-batch; a fraction where context-parallel ranks share them out evenly."""
    return batch.tokens_BS.numel() if batch.num_labels is None else batch.num_labels


def labels_per_micro_batch(batches: Sequence[Batch], mesh: Mesh) -> float | Tensor:
    """Labels that count in a micro-batch, averaged over all micro-batches of all ranks.

    Collective where samples differ in their labels; else every rank knows it.
    """
    if batches[0].num_labels is None:
        return batches[0].labels_BS.numel()
    if batches[0].has_equal_label_counts:
        return batches[0].num_labels
    own, device = sum(batch.num_labels or 0 for batch in batches), batches[0].labels_BS.device
    mean = torch.full((), own / len(batches), dtype=sum_dtype(device), device=device)
    group, ranks = mesh.group("dense"), mesh.size("dense")
    if group is not None:
        dist.all_reduce(mean, group=group)
        mean /= ranks
    return mean.clamp(min=1 / (len(batches) * ranks)).float()  # a batch without any label has the loss 0, not 0 / 0
