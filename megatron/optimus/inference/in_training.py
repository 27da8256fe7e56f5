"""Tasks of lm-eval's harness on a model in training, between two steps and at the layout of the run.

The model computes as the one that `optimus evaluate` loads: every rank has all tokens of its texts, and tokens travel
to experts by all-gather, whose buffers do not depend on the lengths of texts. Afterwards it is as before, generators of
random numbers included, so that training goes on as without.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.optimus.config.choices import LoadBalancing, TokenDispatcherType, TokenizerType
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.context import RunContext
from megatron.optimus.convert.optimus import GENERATION_FIELD, TOKEN_IDS_FIELD
from megatron.optimus.data.errors import DataError
from megatron.optimus.inference.cache import core_attentions
from megatron.optimus.inference.load import TextModel, end_ids, model_tokenizer, on_all_ranks
from megatron.optimus.inference.tasks import (
    find_tasks,
    kept_random_numbers,
    load_tasks,
    run_tasks,
    scores,
    short_name,
)
from megatron.optimus.layers.attention import causal_attention
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.moe.dispatch.base import TokenDispatcher
from megatron.optimus.moe.dispatch.select import build_dispatcher
from megatron.optimus.parallel.tensor import whole_tokens
from megatron.optimus.platform.ranks import attempt

logger = logging.getLogger("optimus")


class TasksInTraining:
    """Evaluates the tasks of ``eval_tasks`` on a model in training. Every method is collective over all ranks."""

    def __init__(self, run: RunContext) -> None:
        """Loads tokenizer and data. Raises ConfigError or DataError on every rank where one cannot."""
        data, training = run.config.data, run.config.training
        kind = data.tokenizer_type or TokenizerType.HF
        build = partial(model_tokenizer, kind, data.tokenizer_model, run.config.model)
        folder = training.eval_tasks_include_path
        path = None if folder is None else Path(folder)
        self._run, self._has_failed = run, False
        self._tokenizer = on_all_ranks(run.ranks, build, "reading the tokenizer for eval_tasks", DataError)

        def load() -> Any:
            return load_tasks(find_tasks(training.eval_task_names, path, "eval_tasks"))

        with kept_random_numbers(run.device):
            self._tasks = on_all_ranks(run.ranks, load, "loading eval_tasks", ConfigError)
        self._dispatchers: list[TokenDispatcher] | None = None

    def evaluate(self, model: Decoder, step: int, metadata: Mapping[str, Any]) -> dict[str, float]:
        """Evaluates the model on every task.

        Args:
            model: this rank's part, in training.
            step: steps done, for the log.
            metadata: that of the run's checkpoints; an imported model's says which tokens end a text.

        Returns:
            Scores by NAME/METRIC, on every rank; empty from the first error of a task on, which is logged once.
        """
        if self._has_failed:
            return {}
        run, training = self._run, self._run.config.training
        ends = end_ids(metadata.get(GENERATION_FIELD), metadata.get(TOKEN_IDS_FIELD), self._tokenizer)
        text_model = TextModel(model, self._tokenizer, ends, run.mesh, run.device)
        size, limit = training.micro_batch_size, training.eval_tasks_limit
        with self._as_loaded(model):
            found, error = attempt(partial(run_tasks, text_model, self._tasks, batch_size=size, limit=limit))
        if error is not None and not isinstance(error, ConfigError):
            raise error
        if run.ranks.first_failure(error) is not None:
            self._has_failed = True
            logger.error("%s; training goes on without eval_tasks", error or "eval_tasks failed on another rank")
            return {}
        assert found is not None
        values = {
            f"{task}/{short_name(key)}": value for task, own in scores(found).items() for key, value in own.items()
        }
        logger.info("tasks at step %d: %s", step, ", ".join(f"{key} {value:.4g}" for key, value in values.items()))
        return values

    @contextlib.contextmanager
    def _as_loaded(self, model: Decoder) -> Iterator[None]:
        """Makes the model compute as one that is loaded for inference."""
        layers = model.moe_layers()
        if self._dispatchers is None:
            self._dispatchers = self._build_dispatchers(model)
        before = [(layer.dispatcher, layer.router.balancing) for layer in layers]
        is_training = model.training
        model.eval()
        try:
            for layer, dispatcher in zip(layers, self._dispatchers, strict=True):
                layer.dispatcher, layer.router.balancing = dispatcher, LoadBalancing.NONE
            # Context parallelism has put another core attention in.
            with core_attentions(model, [causal_attention] * len(model.layers)), whole_tokens(model):
                yield
        finally:
            for layer, (dispatcher, balancing) in zip(layers, before, strict=True):
                layer.dispatcher, layer.router.balancing = dispatcher, balancing
            model.train(is_training)

    def _build_dispatchers(self, model: Decoder) -> list[TokenDispatcher]:
        run, layers = self._run, model.moe_layers()
        if run.mesh.group("experts") is None:
            return [layer.dispatcher for layer in layers]
        parallel = replace(run.config.parallel, moe_token_dispatcher_type=TokenDispatcherType.ALLGATHER)
        parallel = replace(parallel, moe_dispatch_chunks=1)
        return [build_dispatcher(parallel, run.mesh, layer.dispatcher.ownership) for layer in layers]  # type: ignore[attr-defined]
