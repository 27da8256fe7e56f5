"""The checkpoints of a training run: resuming, saving while the run trains, and finishing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from megatron.optimus.checkpoint import CheckpointError, Manifest, Saved, Saver, TensorSlice, commit, state, store
from megatron.optimus.checkpoint.errors import SaveError
from megatron.optimus.checkpoint.memory import MemoryCheckpoints
from megatron.optimus.checkpoint.mirror import Mirror, fetch_newest, is_url
from megatron.optimus.checkpoint.run_lock import RunLock
from megatron.optimus.checkpoint.tokenizer_files import HASHES_FIELD, IDENTITY_FIELD, files_of, hash_files
from megatron.optimus.checkpoint.verify import has_good
from megatron.optimus.config.choices import LRBatchRule
from megatron.optimus.config.schema import RunConfig, TokenizerType
from megatron.optimus.config.serialize import changed_options, to_dict
from megatron.optimus.context import RunContext
from megatron.optimus.convert import convert
from megatron.optimus.convert.formats import AVERAGE
from megatron.optimus.convert.optimus import GENERATION_FIELD, TOKEN_IDS_FIELD
from megatron.optimus.data.fingerprint import LINES_FIELD
from megatron.optimus.data.loader import position_after_change
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.platform import environment, memory_slots
from megatron.optimus.platform.device import device_name
from megatron.optimus.platform.files import delete_tree
from megatron.optimus.platform.intervals import is_multiple
from megatron.optimus.platform.memory import needs_memory
from megatron.optimus.platform.ranks import Ranks
from megatron.optimus.platform.seeding import rng_state, set_rng_state
from megatron.optimus.training.alerts import NO_ALERTS, SAVE_FAILED, UPLOAD_FAILED
from megatron.optimus.training.data_position import START_FIELD, STEPS_FIELD, check_position, position_start
from megatron.optimus.training.engine import Engine, draw_initial_weights, training_state
from megatron.optimus.training.last_checkpoint import LastCheckpoint
from megatron.optimus.training.lr_schedule import batch_factor_after
from megatron.optimus.version import __version__

BATCH_FACTOR_FIELD = "lr_batch_factor"  # of a manifest's metadata
_SHOWN_CHANGES = 4  # options that changed since a checkpoint, with their values
_PACKAGES = ("torch", "deepspeed", "numpy", "safetensors")

logger = logging.getLogger("optimus")


class Checkpoints:
    """The checkpoints of one run. Building it and every method are collective over all ranks, except where noted."""

    alerts = NO_ALERTS

    def __init__(self, run: RunContext, model: Decoder, engine: Engine, *, is_drawn: bool = True) -> None:
        """``is_drawn``: the model has its initial weights. Else ``resume`` draws them where they are needed."""
        config, mesh = run.config, run.mesh
        self._draw = None if is_drawn else partial(draw_initial_weights, run, model, engine)
        self._config, self._mesh, self._device, self._ranks = config, mesh, run.device, run.ranks
        self._model, self._state = model, training_state(engine)
        self._root = config.checkpoint_folder
        self._last = LastCheckpoint(Path(config.logging.run_dir), self._root)
        # Read at the start: training waits while a save reads them, and the files may be replaced during the run.
        self._packages = _packages()
        self._tokenizer = _tokenizer_hash(config.data.tokenizer_model) if mesh.rank == 0 else None
        self._tokenizer_files = hash_files(config.data.tokenizer_model) if mesh.rank == 0 else {}
        self._position_start = [0, 0]  # step and samples since which the batch sizes of this run hold
        self._identity = run.tokenizer
        self._drain_s: float | None = None
        self._tried: Manifest | None = None  # the last checkpoint that resume tried to load
        # JSON values that checkpoints hold; after resume, those of its checkpoint.
        self.extra_state: dict[str, Any] = {}
        self.warnings: list[str] = []  # of values that were saved; known to rank 0
        self.data_files_before: Any = None  # fingerprints in the checkpoint whose data position the run goes on from
        self.batch_factor = 1.0  # on learning rates, of batch sizes that were changed at resumes
        self.has_average = False  # resume has loaded a moving average of the weights
        self.found_none = False  # resume has kept the initial weights
        self._lock = self._ranks.run_on_all_ranks(
            lambda: RunLock(self._root) if mesh.rank == 0 else None, f"locking {self._root}", CheckpointError
        )
        url = config.checkpoint.checkpoint_mirror
        self._mirror = self._ranks.run_on_all_ranks(
            lambda: Mirror(url) if url is not None and mesh.rank == 0 else None, f"opening {url}", CheckpointError
        )
        self._last_step = -1  # the step whose save ends the run
        self._tokenizer_data = self._ranks.run_on_all_ranks(
            lambda: self._read_tokenizer() if mesh.rank == 0 else {}, "reading the tokenizer", CheckpointError
        )
        self._saver = Saver(
            self._root,
            ranks=run.ranks,
            asynchronous=config.checkpoint.async_save,
            local=config.checkpoint.save_local_dir,
            check_lock=self._lock.check if self._lock is not None else lambda: None,
            retry_seconds=60 * config.checkpoint.max_unsaved_minutes,
            on_failure=self._save_has_failed,
            tokenizer=self._tokenizer_data,
        )

        self._rng: list[TensorSlice] = []  # states of the random generators that were asked for
        self._keeps_average = self._loads_average = False  # a moving average of the weights
        self._memory = self._open_memory()
        self._postponed: list[int] = []  # steps whose save is still to be done
        self._to_upload: set[int] = set()  # steps whose full checkpoint is to be uploaded

    def _open_memory(self) -> MemoryCheckpoints | None:
        """The memory checkpoints of this run; None where it has none, or nobody would start it again."""
        interval, folder = self._config.checkpoint.memory_checkpoint_interval, environment.memory_folder()
        if interval == 0:
            return None
        if self._ranks.start_all_reduce_min(int(folder is not None))() == 0 or folder is None:
            logger.warning(
                "memory_checkpoint_interval=%d is ignored: nobody starts this run again when a rank fails; use "
                "optimus launch --max-restarts N",
                interval,
            )
            return None
        return MemoryCheckpoints(folder, self._ranks, interval)

    def _read_tokenizer(self) -> dict[str, bytes]:
        """The files of the run's tokenizer, which its checkpoints carry: an export needs nothing else."""
        data = self._config.data
        try:
            files = files_of(data.tokenizer_type or TokenizerType.HF, data.tokenizer_model)
            return {name: file.read_bytes() for name, file in files.items()}
        except OSError as error:
            raise CheckpointError(f"{error.filename}: the tokenizer cannot be read: {error.strerror}") from error

    # ---- saving

    @needs_memory("preparing checkpoints")
    def prepare(self) -> None:
        """Reserves what saves need, so that the first one does not hold up training. Call before the first save."""
        # Without an interval the only save is the last one, which nothing waits for: pinned memory of the whole state
        # would be held for all the time, and be taken again by each restart before its second step.
        options = self._config.checkpoint
        intervals = {"full": options.save_interval, "model": options.model_only_save_interval}
        for kind in (kind for kind, interval in intervals.items() if interval > 0):
            slices, _ = self._slices(kind)
            self._saver.prepare(slices, self._header(kind, 0, 0))
        if self._memory is not None:
            self._memory.prepare(self._memory_slices(), self._slices("full")[0])

    def before_update(self) -> None:
        """Makes the update wait for a copy of the state in flight. Call before the optimizer's step. Local."""
        self._saver.before_update()
        if self._memory is not None:
            self._memory.before_update()

    def is_due(self, step: int) -> bool:
        """Whether the save intervals ask for a checkpoint after ``step``, on disk or in memory. Local."""
        return self.full_is_due(step) or self._model_is_due(step) or self._memory_is_due(step)

    def full_is_due(self, step: int) -> bool:
        """Whether ``save_interval`` asks for a full checkpoint after ``step``, or one was postponed. Local."""
        return self._any_due(step, self._config.checkpoint.save_interval)

    def postpone(self, step: int) -> None:
        """Has the next step that is saved do what is due after ``step`` too. Local."""
        if not self._postponed:
            logger.info("step %d is not saved, as its gradients are not finite; the next one with finite ones is", step)
        self._postponed.append(step)

    def _any_due(self, step: int, interval: int) -> bool:
        return any(is_multiple(one, interval) for one in (*self._postponed, step))

    def _model_is_due(self, step: int) -> bool:
        return self._any_due(step, self._config.checkpoint.model_only_save_interval)

    def _memory_is_due(self, step: int) -> bool:
        return self._memory is not None and any(self._memory.is_due(one) for one in (*self._postponed, step))

    def after_step(self, step: int, consumed_samples: int, *, is_exiting: bool) -> None:
        """Saves what is due after ``step``; a run that ``is_exiting`` saves everything and waits until it is written.

        Raises CheckpointError on every rank when saves have failed for ``max_unsaved_minutes``, or one failed
        for another reason than the file system.
        """
        options = self._config.checkpoint
        self._last_step = step if is_exiting else -1
        self._note(self._saver.poll())
        if self._memory is not None and self._memory_is_due(step) and not is_exiting:
            began = self._memory.clock()
            self._memory.start(self._memory_slices(), self._header("full", step, consumed_samples), began)
        uploads = is_exiting or self._any_due(step, options.save_interval * options.checkpoint_mirror_interval)
        if uploads and self._mirror is not None:
            self._to_upload.add(step)
        if is_exiting or self.full_is_due(step):
            self._save("full", step, consumed_samples)
        if (is_exiting and options.model_only_save_interval > 0) or self._model_is_due(step):
            self._save("model", step, consumed_samples)
        self._postponed.clear()
        if is_exiting:
            self.finish()

    def save_again(self, step: int, consumed_samples: int) -> None:
        """Replaces the full checkpoint that training goes on from, with what ``extra_state`` has now."""
        if self._mirror is not None:
            self._to_upload.add(step)
        self._save("full", step, consumed_samples)
        self.finish()

    def finish(self) -> None:
        """Waits until every checkpoint in flight is written."""
        self._note(self._saver.drain())

    def forget_memory(self) -> None:
        """Has a restart go on from disk: the state in memory may hold what is wrong with the run. Local."""
        if self._memory is not None:
            self._memory.forget()

    def take_times(self) -> dict[str, float | None]:
        """The fields ``save_stall_s`` and ``save_drain_s`` of the next line of metrics. Local."""
        stalls = [self._saver.take_stall(), None if self._memory is None else self._memory.take_stall()]
        known = [stall for stall in stalls if stall is not None]
        times = {"save_stall_s": sum(known) if known else None, "save_drain_s": self._drain_s}
        self._drain_s = None
        return times

    def close(self) -> None:
        """Releases the run's lock file, and the memory of its checkpoints. Local."""
        if self._memory is not None:
            self._memory.close()
        if self._mirror is not None:
            self._mirror.close()
        if self._lock is not None:
            self._lock.release()

    def _note(self, saved: list[Saved]) -> None:
        for one in saved:
            self._drain_s = max(self._drain_s or 0.0, one.drain_s)
            self.warnings += [f"{one.path.name}: {line}" for line in one.warnings]
            if one.kind == "full" and self._mesh.rank == 0:
                self._last.record(one.step)
                self._upload(one)

    def _save_has_failed(self, step: int, text: str) -> None:
        if self._mesh.rank == 0:  # every attempt, for alerts are one a minute; pauses grow between attempts
            logger.warning("step %d: save failed: %s", step, text)
        self.alerts.send(SAVE_FAILED, step, text, is_logged=True)

    def _upload(self, saved: Saved) -> None:
        if self._mirror is None:
            return
        if saved.step == self._last_step:
            self._mirror.close()  # it must not be left out because of the one before
        if saved.step in self._to_upload:
            self._to_upload.discard(saved.step)
            self._mirror.start(saved.path, lambda text: self.alerts.send(UPLOAD_FAILED, saved.step, text))

    @needs_memory("saving a checkpoint")
    def _save(self, kind: str, step: int, consumed_samples: int) -> None:
        began = time.perf_counter()
        slices, retain = self._slices(kind)
        header = self._header(kind, step, consumed_samples)
        self._note(self._saver.start(slices, header, retain=retain, began=began))

    def _slices(self, kind: str) -> tuple[list[TensorSlice], int | None]:
        """The tensors that this rank writes to a checkpoint of this kind, and how many such checkpoints are kept."""
        optimizer, mesh = self._state, self._mesh
        is_first = mesh.index("dense") == 0 and mesh.index("tp") == 0  # of its pipeline stage; it stores the buffers
        if kind == "full":
            slices = state.training_slices(self._model, optimizer, buffers=is_first) + self._rng_slices()
            retain: int | None = self._config.checkpoint.save_retain
        else:
            slices, retain = state.weight_slices(self._model, optimizer, buffers=is_first), None
        if mesh.index("tp") > 0:  # the first tensor-parallel rank stores what all of them hold alike
            parts = {name for name, p in self._model.named_parameters() if hasattr(p, "tensor_model_parallel")}
            slices = [piece for piece in slices if piece.name in parts or piece.kind == "rng"]
        # The copy of a tied embedding on the last pipeline stage; the first stage stores it.
        repeated = {name for name, p in self._model.named_parameters() if getattr(p, "ds_pipe_replicated", False)}
        return [piece for piece in slices if piece.name not in repeated], retain

    def _memory_slices(self) -> list[TensorSlice]:
        """All that this rank needs to go on, also what other ranks hold alike."""
        slices = state.training_slices(self._model, self._state, buffers=True, all_copies=True)
        self._rng = self._rng_slices()  # restored where these are loaded
        self._keeps_average = self._loads_average = any(one.kind == AVERAGE for one in slices)
        return slices + self._rng

    def _header(self, kind: str, step: int, consumed_samples: int) -> Manifest:
        return Manifest(
            kind,
            step,
            consumed_samples,
            to_dict(self._config),
            {
                **self.extra_state,
                STEPS_FIELD: self._state.step_count,
                START_FIELD: self._position_start,
                HASHES_FIELD: self._tokenizer_files,
                **({IDENTITY_FIELD: self._identity} if self._identity else {}),
            },
            {},
            {},
            layout=asdict(self._mesh.layout)
            | {"zero_stage": self._config.optimizer.zero_stage, "device": device_name(self._device)},
            packages=self._packages,
            tokenizer_xxh3_128=self._tokenizer,
        )

    def _rng_slices(self) -> list[TensorSlice]:
        states = {self._device.type: rng_state(self._device)}
        return state.rng_slices(states, self._mesh.rank, self._mesh.layout.world_size)

    # ---- resuming

    def resume(self) -> tuple[int, int]:
        """Loads the newest good checkpoint of this run, else the one in ``load``, else keeps the initial weights.

        Returns (optimizer steps done, samples consumed).
        """
        try:
            with self._ranks.failing_alike():
                return self._resume()
        except CheckpointError as error:
            error.args = (str(error) + self._remedy(),)
            raise

    def _remedy(self) -> str:
        """For a checkpoint that does not fit: the options that changed since, and what to do."""
        before = self._tried.config if self._tried is not None else {}
        changes = changed_options(before, to_dict(self._config))
        shape = [text for text in changes if text.startswith(("model.", "optimizer.optimizer "))] if before else []
        if not shape:
            return ""
        return (
            f". Changed since that checkpoint: {', '.join(shape)}; go back to those values, or name another folder "
            "with --save and --run-dir, and where shapes are equal take its weights alone: --load with "
            "--no-load-optim, or with --finetune from step 0"
        )

    @needs_memory("loading the checkpoint")
    def _resume(self) -> tuple[int, int]:
        options = self._config.checkpoint
        found = self._load_own()
        if found is None and self._draw is not None:
            self._draw()
        has_moments, position_counts = True, True
        if found is None and options.load is not None:
            path = self._resolve(Path(options.load))
            has_moments, position_counts = options.load_optim and not options.finetune, not options.finetune
            requests = self._all_requests if has_moments else self._weight_requests
            found = path, store.load_together(path, requests, cast=True, ranks=self._ranks)
        if found is None and options.from_hf is not None:
            has_moments, position_counts = False, False
            found = self._load_hf(Path(options.from_hf))
        if found is None:
            self.found_none = True
            logger.info("starting from initial weights (seed %d)", self._config.training.seed)
            return 0, 0
        return self._take_over(*found, has_moments=has_moments, position_counts=position_counts)

    def roll_back(self, limits: Sequence[int]) -> tuple[int, int] | None:
        """Loads the newest good full checkpoint of this run below the first of ``limits`` that has any, and deletes
        those of later steps.

        Returns (steps done, samples consumed) as ``resume``; None where there is no such checkpoint, and then nothing
        has changed.
        """
        self.finish()
        self._postponed.clear()
        found = (store.load_newest(self._root, self._all_requests, ranks=self._ranks, below=one) for one in limits)
        newest = next((one for one in found if one is not None), None)
        if newest is None:
            return None
        position = self._take_over(*newest, has_moments=True, position_counts=True)
        self.discard_after(position[0])
        return position

    def discard_after(self, step: int) -> None:
        """Deletes the checkpoints of steps after ``step``, and those in memory: a start must not go on from them."""
        self.finish()
        self.forget_memory()

        def discard() -> None:
            for item in commit.discard_after(self._root, step):
                logger.warning("%s is deleted: it was saved in steps that went wrong", self._root / item.name)
            left = commit.list_committed(self._root)
            if left:
                self._last.record(left[-1].step)
            else:
                self._last.forget()
            if self._mirror is not None:
                try:
                    self._mirror.withdraw_after(step)
                except CheckpointError as error:  # the run itself goes on from its own disk
                    self.alerts.send(UPLOAD_FAILED, step, str(error))

        self._ranks.run_on_all_ranks(
            lambda: discard() if self._mesh.rank == 0 else None, f"deleting checkpoints in {self._root}", SaveError
        )

    def _take_over(
        self, path: Path, manifest: Manifest, *, has_moments: bool, position_counts: bool
    ) -> tuple[int, int]:
        """Goes on from a checkpoint whose tensors are loaded; returns (steps done, samples consumed)."""
        optimizer = self._state
        if has_moments and manifest.kind == "full":
            optimizer.step_count = int(manifest.metadata.get(STEPS_FIELD, manifest.step))
            self._restore_rng()
            self.has_average = self._loads_average
            if self._keeps_average and not self.has_average:
                optimizer.restart_average()
                logger.warning("%s holds no moving average of the weights: it begins at the weights", path)
            self.extra_state = manifest.metadata
        else:  # what a Hugging Face model says of its tokens and of generation stays with it
            fields = (TOKEN_IDS_FIELD, GENERATION_FIELD)
            self.extra_state = {name: manifest.metadata[name] for name in fields if manifest.metadata.get(name)}
            optimizer.restart_states()
        optimizer.sync_params_from_master()
        step = consumed_samples = 0
        if position_counts:
            step = manifest.step
            self.data_files_before = manifest.metadata.get(LINES_FIELD)
            now = self._config.training.seq_length
            lengths = manifest.config.get("training", {}).get("seq_length", now), now  # an import has no such section
            consumed_samples = position_after_change(manifest.consumed_samples, *lengths)
            training = to_dict(self._config)["training"]
            self._position_start = position_start(manifest, training, step, consumed_samples)
            self._follow_batch_size(manifest)
        what = "" if has_moments and manifest.kind == "full" else " (weights only: the moments start anew)"
        logger.info("resumed from %s: step %d, %d samples consumed%s", path, step, consumed_samples, what)
        self._log_changes(manifest, is_new=not position_counts)
        return step, consumed_samples

    def _follow_batch_size(self, manifest: Manifest) -> None:
        """Scales the learning rates as ``lr_batch_rule`` says where the global batch size is another one now."""
        rule, now = self._config.optimizer.lr_batch_rule, self._config.training.global_batch_size
        stored = manifest.metadata.get(BATCH_FACTOR_FIELD, 1.0)
        self.batch_factor = float(stored) if isinstance(stored, int | float) and 0 < stored < math.inf else 1.0
        before = manifest.config.get("training", {}).get("global_batch_size", now)
        if before != now:
            self.batch_factor = batch_factor_after(self.batch_factor, before, now, rule)
        if before != now and rule is not LRBatchRule.NONE:
            words = (before, now, self.batch_factor, rule.value)
            logger.info("global_batch_size %d -> %d: learning rates times %.6g from here on (lr_batch_rule=%s)", *words)
        self.extra_state.pop(BATCH_FACTOR_FIELD, None)
        if self.batch_factor != 1.0:
            self.extra_state[BATCH_FACTOR_FIELD] = self.batch_factor

    def _load_own(self) -> tuple[Path, Manifest] | None:
        """Loads the newest good checkpoint of this run, from memory or disk; None where it never had one, or is to
        begin from scratch.

        Raises CheckpointError on every rank where it had one and none can be read.
        """
        options, is_first = self._config.checkpoint, self._mesh.rank == 0
        if (manifest := self._load_memory()) is not None:
            return Path("host memory"), manifest
        if options.from_scratch and not has_good(self._root, self._ranks):
            self._ranks.run_on_all_ranks(
                lambda: self._set_aside() if is_first else None, "beginning from scratch", CheckpointError
            )
            return None
        found = store.load_newest(self._root, self._all_requests, ranks=self._ranks)
        if found is None:
            lost = self._ranks.run_on_all_ranks(
                lambda: self._last.what_is_lost(has_load=options.load is not None) if is_first else "",
                "looking for lost checkpoints",
                CheckpointError,
            )
            lost = self._ranks.broadcast_bytes(lost.encode()).decode()
            if lost:
                raise CheckpointError(
                    f"{lost}. Going on would begin again at step 0: put it back, or name its folder with --save; to "
                    "mean it, add --from-scratch, which keeps the old metrics.jsonl under another name"
                )
        return found

    def _load_memory(self) -> Manifest | None:
        """Loads the newest memory checkpoint, where it is not older than the newest on disk."""
        if self._memory is None:
            return None
        committed = store.list_together(self._root, self._ranks)
        newest = committed[0].step if committed else 0
        manifest = self._memory.restore(self._memory_slices(), newest, self._write_out)
        if manifest is not None:
            with self._ranks.failing_alike():
                self._check_fits(manifest)
        return manifest

    def _write_out(self, slices: list[TensorSlice], header: Manifest) -> None:
        """Saves a state that ranks of another layout left in host memory; all ranks then load it from disk."""
        saver = Saver(
            self._root,
            ranks=self._ranks,
            asynchronous=False,
            check_lock=self._lock.check if self._lock is not None else lambda: None,
            tokenizer=self._tokenizer_data,
        )
        self._note(saver.start(slices, header, retain=self._config.checkpoint.save_retain))

    def _set_aside(self) -> None:
        folder = commit.set_aside(self._root)
        if folder is not None:
            logger.warning("checkpoints that cannot be read are now in %s", folder)
        self._last.forget()

    def _load_hf(self, source: Path) -> tuple[Path, Manifest]:
        """Loads the weights of a Hugging Face folder, by way of a checkpoint that rank 0 makes of it and removes."""
        target = Path(self._config.logging.run_dir).absolute() / "from_hf"

        def make() -> None:
            if self._mesh.rank == 0:
                logger.info("converting the weights of %s", source)
                convert(source, target, to="optimus", overwrite=True)

        self._ranks.run_on_all_ranks(make, f"converting {source}", CheckpointError)
        manifest = store.load_together(target, self._weight_requests, cast=True, ranks=self._ranks)
        self._ranks.run_on_all_ranks(
            lambda: delete_tree(target) if self._mesh.rank == 0 else None, f"removing {target}", CheckpointError
        )
        return source, manifest

    def _resolve(self, path: Path) -> Path:
        """The checkpoint that ``load`` names, as rank 0 finds it."""
        name = self._ranks.run_on_all_ranks(
            lambda: str(store.resolve(path)) if self._mesh.rank == 0 else "", f"loading {path}", CheckpointError
        )
        return Path(self._ranks.broadcast_bytes(name.encode()).decode())

    def _all_requests(self, manifest: Manifest) -> list[TensorSlice]:
        self._tried = manifest
        if manifest.kind == "model":
            return self._weight_requests(manifest)
        self._check_fits(manifest)
        slices = state.training_slices(self._model, self._state, buffers=True, to_load=True)
        self._keeps_average = any(one.kind == AVERAGE for one in slices)
        self._loads_average = self._keeps_average and any(kind == AVERAGE for _, kind in manifest.tensors)
        if not self._loads_average:
            slices = [one for one in slices if one.kind != AVERAGE]
        self._rng = []
        for piece in self._rng_slices():
            stored = manifest.tensors.get((piece.name, "rng"))
            if stored is not None and stored.shape == piece.global_shape:
                self._rng.append(piece)
        return slices + self._rng

    def _check_fits(self, manifest: Manifest) -> None:
        """Raises CheckpointError for a full checkpoint of another optimizer, or of samples that are not its steps'."""
        check_position(manifest, warn=self._mesh.rank == 0)
        before, now = manifest.config.get("optimizer", {}).get("optimizer"), self._config.optimizer.optimizer.value
        if before not in (None, now):  # states of the same name would be mistaken
            raise CheckpointError(f"it holds the states of optimizer={before}, this run has optimizer={now}")

    def _weight_requests(self, manifest: Manifest) -> list[TensorSlice]:
        if not self._config.checkpoint.finetune:
            check_position(manifest, warn=self._mesh.rank == 0)
        return state.weight_requests(self._model, self._state, manifest)

    def _restore_rng(self) -> None:
        for piece in self._rng:
            set_rng_state(piece.tensor, self._device)
        if not self._rng:
            logger.info("random generators start anew: the checkpoint is of other ranks or another kind of device")

    def _log_changes(self, manifest: Manifest, *, is_new: bool) -> None:
        config = to_dict(self._config)
        # A run that starts from weights alone has only the model in common with what it loads.
        changes = changed_options(manifest.config, {"model": config["model"]} if is_new else config)
        if len(changes) > _SHOWN_CHANGES:
            names = ", ".join(change.split()[0] for change in changes)
            logger.info("changed since that checkpoint: %d options (--verbose shows values): %s", len(changes), names)
            for change in changes:
                logger.debug("changed since that checkpoint: %s", change)
        elif changes:
            logger.info("changed since that checkpoint: %s", ", ".join(changes))
        if self._mesh.rank > 0:
            return
        now = self._tokenizer
        if manifest.tokenizer_xxh3_128 is not None and now is not None and now != manifest.tokenizer_xxh3_128:
            logger.warning("the tokenizer's file has changed since that checkpoint; token ids may mean other words")


def fetch_from_mirror(config: RunConfig, ranks: Ranks) -> None:
    """Downloads what a run whose folder has no checkpoint goes on from, where that is at a URL. Collective.

    That is the newest of ``checkpoint_mirror``, else the newest of ``load``, which is then the folder of the download.
    Raises CheckpointError on every rank where a URL cannot be read, or ``load`` has no whole checkpoint.
    """
    options, root = config.checkpoint, config.checkpoint_folder
    has_own = bool(store.list_together(root, ranks))
    if not has_own and options.checkpoint_mirror is not None and not options.from_scratch:
        has_own = fetch_newest(options.checkpoint_mirror, root, ranks) is not None
    if options.load is None or not is_url(options.load):
        return
    url, folder = options.load, Path(config.logging.run_dir) / "loaded"
    options.load = str(folder)
    if not has_own:
        fetch_newest(url, folder, ranks)
        if not store.list_together(folder, ranks):
            with ranks.failing_alike():
                raise CheckpointError(f"load={url}: has no whole checkpoint; name the URL that was a checkpoint_mirror")


def has_own_checkpoint(run: RunContext) -> bool:
    """Whether this run will probably resume from a full checkpoint of its own, on disk or in host memory. Collective.

    Then its weights need not be drawn. DeepSpeed's ZeRO-3 has no way to draw them later, so the answer is False.
    """
    options = run.config.checkpoint
    is_there = False
    with contextlib.suppress(OSError):  # the load tells of it
        is_there = run.mesh.rank == 0 and bool(commit.list_committed(run.config.checkpoint_folder))
    if options.memory_checkpoint_interval != 0:
        is_there = is_there or memory_slots.newest_step(environment.memory_folder()) >= 0
    return run.ranks.start_all_reduce_min(-int(is_there))() < 0 and run.config.optimizer.zero_stage < 3


def _packages() -> dict[str, Any]:
    versions = {"optimus": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions


def _tokenizer_hash(location: str | None) -> str | None:
    """xxh3-128 of the tokenizer's file, in a folder of its tokenizer.json; None where there is none."""
    if location is None:
        return None
    path = Path(location)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        return xxhash.xxh3_128_hexdigest(path.read_bytes())
    except OSError:
        return None
