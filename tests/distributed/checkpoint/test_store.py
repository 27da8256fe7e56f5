"""Saves and loads by real gloo ranks: any layout to any other, and a failure on one rank known to all."""

import errno
import logging
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import deepspeed_ext
from deepspeed_ext.optimizers import states
from megatron.optimus.checkpoint import (
    CheckpointError,
    Manifest,
    Saver,
    TensorSlice,
    latest,
    load,
    load_newest,
    save,
    store,
    training_slices,
    weight_slices,
    writer,
)
from megatron.optimus.checkpoint.snapshot import Snapshot, coalesce
from megatron.optimus.checkpoint.verify import has_good
from megatron.optimus.config.load import load as config_of
from megatron.optimus.context import RunContext
from megatron.optimus.platform import files
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.ranks import Ranks
from tests.allocations import Allocations
from tests.distributed.zero_stack import sharded
from tests.helpers import run_distributed, run_on_gpus
from tests.integration.conftest import TINY, write_corpus
from tests.unit.checkpoint.helpers import (
    CONFIG,
    assert_holds,
    find_loadable,
    layout_slices,
    whole_requests,
    whole_state,
)


def _save(root, step, rank, world, ep, interleaved=False):
    slices = layout_slices(whole_state(step), rank, world, ep, interleaved=interleaved, loading=False)
    return save(root, step, slices, kind="full", consumed_samples=step, config=CONFIG, metadata={}, retain=2)


def _load(path, step, rank, world, ep, interleaved=False):
    slices = layout_slices(whole_state(step), rank, world, ep, interleaved=interleaved, loading=True)
    load(path, slices)
    assert_holds([s for s in slices if s.start < s.stop], whole_state(step))


def _save_all(rank, world, root, ep, interleaved):
    return [_save(root, step, rank, world, ep, interleaved) for step in (1, 2, 3)]


def _load_and_save_again(rank, world, root, path, again):
    for ep in (1, 2, 4):
        if world % ep == 0:
            for interleaved in (False, True):
                _load(path, 3, rank, world, ep, interleaved)
    found = find_loadable(root)
    _save(again, 3, rank, world, world)
    return found


@pytest.mark.parametrize("ep, interleaved", [(1, False), (2, False), (2, True), (4, True)])
def test_four_ranks_to_any_other_layout_and_back(tmp_path, ep, interleaved):
    root = tmp_path / "a"
    paths = run_distributed(_save_all, 4, root, ep, interleaved)
    expected = [root / f"step-{step:08d}" for step in (1, 2, 3)]
    assert paths == [expected] * 4
    assert sorted(root.iterdir()) == expected[1:]
    requests = whole_requests(whole_state(3))
    load(expected[2], requests)
    assert_holds(requests, whole_state(3))
    found = run_distributed(_load_and_save_again, 2, root, expected[2], tmp_path / "b")
    assert found == [expected[2]] * 2
    requests = whole_requests(whole_state(3))
    load(latest(tmp_path / "b"), requests)
    assert_holds(requests, whole_state(3))


def _save_with_full_disk(rank, world, root, failing, function):
    _save(root, 1, rank, world, 2)
    if rank == failing:

        def full(*args, **kwargs):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        setattr(files, function, full)
    try:
        _save(root, 2, rank, world, 2)
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("failing, function", [(3, "write_at"), (0, "write_at"), (0, "write_new")])
def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path, failing, function):
    answers = run_distributed(_save_with_full_disk, 4, tmp_path, failing, function)
    for answer in answers:
        assert f"failed on rank {failing}" in answer and "No space left on device" in answer
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    requests = whole_requests(whole_state(1))
    load(find_loadable(tmp_path), requests)
    assert_holds(requests, whole_state(1))


def _save_with_bad_slices(rank, world, root):
    slices = layout_slices(whole_state(1), rank, world, 1, interleaved=False, loading=False)
    if rank == 2:
        slices = slices[1:]
    try:
        save(root, 1, slices, kind="full", consumed_samples=1, config=CONFIG, metadata={})
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_part_that_nobody_writes_is_an_error_on_all(tmp_path):
    answers = run_distributed(_save_with_bad_slices, 4, tmp_path)
    assert "tensor dense.weight (master): pieces: elements" in answers[0] and "missing" in answers[0]
    assert all("failed on rank 0" in answer for answer in answers)
    assert list(tmp_path.iterdir()) == []


def _find(rank, world, root):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("optimus").addHandler(handler)
    try:
        return find_loadable(root), messages
    except CheckpointError as error:
        return str(error), messages


def test_ranks_share_the_verification_and_agree_on_the_fallback(tmp_path):
    run_distributed(_save_all, 4, tmp_path, 2, False)
    for shard in sorted((tmp_path / "step-00000003").glob("node-*.safetensors")):
        data = shard.read_bytes()
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
        answers = run_distributed(_find, 2, tmp_path)
        assert [path for path, _ in answers] == [tmp_path / "step-00000002"] * 2
        assert any("damaged" in m and "tensor " in m and shard.name in m for _, messages in answers for m in messages)
        shard.write_bytes(data)
    Path(tmp_path / "step-00000003" / "manifest.json").unlink()
    Path(tmp_path / "step-00000002" / "manifest.json").unlink()
    answers = run_distributed(_find, 2, tmp_path)
    assert all("none of its 2 checkpoints" in text for text, _ in answers)


# -- asynchronous, a few files per node, every byte read once ----------------------------------------------------------


def _save_async(rank, world, root, failing, name):
    """Four saves beside "training", one step twice; the last fails on one rank, in ``name``. What each rank saw."""
    saver = Saver(root, node=f"node {rank // 3}", files_per_node=2)
    seen = []
    for step in (1, 2, 2, 3):
        if step == 3 and rank == failing:

            def full(*args):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            pytest.MonkeyPatch().setattr(f"megatron.optimus.{name}", full)
        state = whole_state(step)
        slices = layout_slices(state, rank, world, 2, interleaved=False, loading=False)
        try:
            saver.start(slices, Manifest("full", step, step, CONFIG, {}, {}, {}), retain=3)
            for piece in slices:
                piece.tensor.zero_()  # what training would do meanwhile
            saver.before_update()
            boundaries = 0
            while not (saved := saver.poll()):
                boundaries += 1  # the same number on every rank: all follow the same reduced numbers
            seen.append((saved[0].path.name, boundaries))
        except CheckpointError as error:
            seen.append(str(error))
    return seen


@pytest.mark.parametrize("failing, name", [(0, "platform.files.write_at"), (3, "checkpoint.snapshot.Snapshot.take")])
def test_saving_beside_training(tmp_path, failing, name):
    """A disk that is full while it is written, or host memory that fails while it is filled."""
    answers = run_distributed(_save_async, 4, tmp_path, failing, name)
    names = ["step-00000001", "step-00000002", "step-00000002.r1"]
    for seen in answers:
        assert seen[:3] == answers[0][:3] and [name for name, _ in seen[:3]] == names
        assert f"saving step 3 to {tmp_path} failed on rank {failing}" in seen[3]
        assert "No space left on device" in seen[3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [names[0], names[2]]
    files = sorted(path.name for path in (tmp_path / names[-1]).iterdir())
    assert files == ["manifest.json", *(f"node-0000{where}.safetensors" for where in ("0-0", "0-1", "1-0"))]
    requests = whole_requests(whole_state(2))
    load(find_loadable(tmp_path), requests)
    assert_holds(requests, whole_state(2))


def _count_copies(rank, world, folder):
    """Of a run's full and model-only state after two steps: slices, copies, flat buffers, whether they are equal."""
    from megatron.optimus.training.engine import init_engine, shutdown_engine
    from megatron.optimus.training.trainer import Trainer

    init_engine(timedelta(seconds=60))
    words = [*TINY, "--expert-model-parallel-size", "2", "--moe-router-enable-expert-bias", "--params-dtype", "bf16"]
    words += ["--train-iters", "2", "--run-dir", f"{folder}/run", "--data-path", f"{folder}/counting"]
    config = config_of(words).config
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    trainer = Trainer(RunContext.of(config, mesh, torch.device("cpu")))
    trainer.fit()
    optimizer = trainer.engine.optimizer
    buffers = sum(1 + len(f.shard_optimizer.state_kinds) for f in optimizer.flat_buffers for _ in f.buckets)
    found = []
    for kind in ("full", "model"):
        slices = [piece for piece in trainer.checkpoints._slices(kind)[0] if piece.start < piece.stop]
        expected = [piece.tensor.to(piece.dtype, copy=True) for piece in slices]
        snapshot = Snapshot("cpu")
        views = snapshot.take(slices)
        equal = all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(views, expected, strict=True))
        others = sum(piece.kind in ("buffer", "rng") for piece in slices)
        found.append((len(slices), len(coalesce(slices)) - others, buffers, equal))
    trainer.close()
    trainer.engine.destroy()
    shutdown_engine()
    return found


def test_a_runs_state_is_as_many_copies_as_it_has_buffers(tmp_path):
    """Thousands of tensors would fill a stream's queue, and the host would wait: training stands still meanwhile."""
    write_corpus(tmp_path / "counting")
    for full, model in run_distributed(_count_copies, 2, str(tmp_path)):
        num_slices, num_copies, buffers, equal = full
        assert equal and num_copies == buffers < num_slices / 4
        num_slices, num_copies, _, equal = model
        assert equal and num_copies == buffers / 3 < num_slices / 4


_NUMEL = 3_000_000


def _large(rank, world, *, columns, loading):
    """One matrix of 24 MB and a replicated buffer, cut into rows or into columns with rows of the flattened cut."""
    shape = (1000, 2 * _NUMEL // 1000)
    whole = torch.arange(2 * _NUMEL, dtype=torch.float32)
    if columns:
        width = shape[1] // world
        box = ((0, shape[0]), (rank * width, (rank + 1) * width))
        values = whole.view(shape)[:, rank * width : (rank + 1) * width].reshape(-1)
        slices = [TensorSlice("w", "master", shape, 0, len(values), values.clone(), box)]
    else:
        low, high = 2 * _NUMEL * rank // world, 2 * _NUMEL * (rank + 1) // world
        slices = [TensorSlice("w", "master", shape, low, high, whole[low:high].clone())]
    if rank == 0 or loading:
        slices.append(TensorSlice("b", "buffer", (5000,), 0, 5000, torch.arange(5000.0)))
    return slices


def _save_large(rank, world, root, columns):
    slices = _large(rank, world, columns=columns, loading=False)
    save(root, 1, slices, kind="full", consumed_samples=0, config=CONFIG, metadata={})


def _load_counting(rank, world, root, columns):
    """(bytes read from files, whether everything arrived)."""
    expected = _large(rank, world, columns=columns, loading=True)
    requests = [TensorSlice(s.name, s.kind, s.global_shape, s.start, s.stop, s.tensor * 0 - 1, s.box) for s in expected]
    count = 0
    preadv, read_small_file = os.preadv, store.read_small_file

    def counting_preadv(*args):
        nonlocal count
        got = preadv(*args)
        count += got
        return got

    def counting_read_small_file(*args):
        nonlocal count
        data = read_small_file(*args)
        count += len(data)
        return data

    os.preadv, store.read_small_file = counting_preadv, counting_read_small_file
    path, _ = load_newest(root, lambda manifest: requests)
    assert path.name == "step-00000001"
    return count, all(torch.equal(a.tensor, b.tensor) for a, b in zip(requests, expected, strict=True))


@pytest.mark.parametrize("savers, columns", [(1, False), (4, True)])
@pytest.mark.parametrize("loaders, other", [(1, False), (4, False), (5, True)])
def test_every_byte_is_read_once_by_some_rank(tmp_path, savers, columns, loaders, other):
    """At most 1.05 times the checkpoint, whatever the number of ranks and the cut; each rank gets what it asked for."""
    run_distributed(_save_large, savers, tmp_path, columns)
    size = sum(path.stat().st_size for path in (tmp_path / "step-00000001").iterdir())
    answers = run_distributed(_load_counting, loaders, tmp_path, other)
    assert all(good for _, good in answers)
    total = sum(count for count, _ in answers)
    assert size <= total <= 1.05 * size, f"{total} bytes read of {size}"
    if loaders == savers == 4:
        assert max(count for count, _ in answers) < 0.5 * size, "the reading is spread over the ranks"


def _load_damaged(rank, world, root):
    """Loads after damage, then where rank 1 has no memory, then where rank 0 cannot list the folder."""
    found, said = load_newest(root, store.everything)[0].name, []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="failed on rank 1"):
        if rank == 1:
            patch.setattr(store.reader, "ReadAhead", without_memory)
        load_newest(root, store.everything)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="step-00000002 failed on rank 1"):
        if rank == 1:  # no damage: an older checkpoint must not be taken for it
            patch.setattr(store.reader, "_next_filled", without_memory)
        load_newest(root, store.everything, below=3)
    if rank == 0:
        store.commit.list_committed = failing_scan
    for listing in (lambda: load_newest(root, store.everything), lambda: has_good(root, Ranks(None, "cpu"))):
        try:
            listing()
        except CheckpointError as error:
            said.append(str(error))
    return found, said


def without_memory(*args):
    raise RuntimeError("cannot pin memory")


def failing_scan(*args):
    raise OSError(errno.EIO, "Input/output error")


def test_a_wrong_hash_sends_all_ranks_to_the_checkpoint_before(tmp_path):
    run_distributed(_save_all, 4, tmp_path, 2, False)
    shard = tmp_path / "step-00000003" / "node-00000-0.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    for found, said in run_distributed(_load_damaged, 3, tmp_path):
        assert found == "step-00000002" and len(said) == 2
        assert all(f"listing {tmp_path} failed on rank 0: " in line and "Input/output error" in line for line in said)


# -- states in fewer than 32 bits --------------------------------------------------------------------------------------


def _reduced(dtype, optimizer=torch.optim.AdamW, seed=0, device="cpu", width=40, depth=4):
    """A sharded optimizer in bf16 whose states are not zero, and its model."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(width, width, dtype=torch.bfloat16, device=device) for _ in range(depth)]
    model = torch.nn.Sequential(*layers)
    group = {"params": list(model.parameters()), "state_dtype": dtype}
    sharded_optimizer = sharded(model, optimizer([group], lr=1e-2), bucket_numel=1 << 26)
    for flat_buffer in sharded_optimizer.flat_buffers:
        for bucket in flat_buffer.buckets:
            for kind in flat_buffer.shard_optimizer.state_kinds:
                value = torch.zeros(len(bucket.shard.master), device=device)
                for part in bucket.layout.shard_ranges(flat_buffer.rank):
                    value[part.where] = torch.rand(part.numel, device=device)
                flat_buffer.shard_optimizer.write_state(bucket.shard, kind, value)
    return model, sharded_optimizer


def _kept(optimizer):
    buckets = [(flat, bucket) for flat in optimizer.flat_buffers for bucket in flat.buckets]
    return [tensor.clone() for _, bucket in buckets for tensor in bucket.shard.state.values()]


def _decoded(optimizer):
    """The states as they were stored before anything was done in steps: whole buckets, decoded at once."""
    found = {}
    for flat in optimizer.flat_buffers:
        for bucket in flat.buckets:
            for kind in flat.shard_optimizer.state_kinds:
                whole = flat.shard_optimizer.read_state(bucket.shard, kind)
                for part in bucket.layout.shard_ranges(flat.rank):
                    found[part.name, kind, part.start] = whole[part.where].cpu()
    return found


def _save_reduced(rank, world, root, dtype, asynchronous):
    patch = pytest.MonkeyPatch()
    patch.setattr(states, "STAGING_BYTES", 128 * states.BLOCK)
    patch.setattr(writer, "BLOCK_BYTES", 1 << 14)
    model, optimizer = _reduced(dtype)
    saver = Saver(root, asynchronous=asynchronous)
    slices = training_slices(model, optimizer, buffers=False)
    header = Manifest("full", 1, 1, CONFIG, {}, {}, {})
    with Allocations() as made:
        slices = training_slices(model, optimizer, buffers=False)
        memory = [one for piece in slices for one in piece.memory()]
        if not asynchronous and world == 1:  # else it takes host memory, or exchanges plans
            saver.prepare(slices, header)
    assert made.largest <= 64, "nothing is decoded to prepare a save"
    kept = sum(one.tensor.nbytes for one in memory if one.kind != "master")
    assert kept <= sum(piece.stop - piece.start for piece in slices if piece.kind != "master") * (
        2 if dtype == "bf16" else 1.1
    ), "a copy in host memory takes states as they are kept"
    saver.prepare(slices, header)
    saver.start(slices, header, retain=1)
    saver.drain()

    _, other = _reduced(dtype, seed=1)
    requests = training_slices(model, other, buffers=False, to_load=True)
    store.load_together(root / "step-00000001", lambda manifest: requests)
    with Allocations() as made:
        other.sync_params_from_master()
    assert made.largest <= states.STAGING_BYTES
    same = all(torch.equal(a, b) for a, b in zip(_kept(optimizer), _kept(other), strict=True))
    patch.undo()
    return _decoded(optimizer), same


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_states_in_fewer_bits_are_stored_in_fp32_without_a_copy_of_them(tmp_path, dtype, asynchronous):
    for world in (1, 3):
        root = tmp_path / f"{world}"
        answers = run_distributed(_save_reduced, world, root, dtype, asynchronous)
        manifest = store.load_manifest(root / "step-00000001")
        requests = store.everything(manifest)
        load(root / "step-00000001", requests)
        whole = {(one.name, one.kind): one.tensor for one in requests}
        assert {one.tensor.dtype for one in requests} == {torch.float32}
        for decoded, same in answers:
            assert same, "what is loaded is encoded to the same bits"
            assert decoded
            for (name, kind, start), values in decoded.items():
                assert torch.equal(whole[name, kind][start : start + len(values)], values), (name, kind)


def _memory_on_a_gpu(rank, world, root, dtype):
    """Device memory beyond the optimizer's, of preparing, saving and loading; and the same of a model-only save."""
    deepspeed_ext.init_distributed()
    device = torch.device("cuda", torch.cuda.current_device())
    model, optimizer = _reduced(dtype, device=device, width=8192, depth=3)  # 201 M parameters
    [flat] = optimizer.flat_buffers
    decoded = _decoded(optimizer)
    saver, ranks = Saver(root, ranks=Ranks(None, device)), Ranks(None, device)
    extra = {}

    def measure(name, action):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        torch.cuda.synchronize()
        extra[name] = torch.cuda.max_memory_allocated() - before

    def save_all():
        for kind, slices in (("full", training_slices), ("model", weight_slices)):
            pieces = slices(model, optimizer, buffers=False)
            header = Manifest(kind, 1, 1, CONFIG, {}, {}, {})
            saver.prepare(pieces, header)
            saver.start(pieces, header, retain=1)
            saver.before_update()
        saver.drain()

    def load_all():
        store.load_together(
            root / "step-00000001",
            lambda manifest: training_slices(model, optimizer, buffers=False, to_load=True),
            ranks=ranks,
        )
        optimizer.sync_params_from_master()

    measure("save", save_all)
    before = _kept(optimizer)
    for bucket in flat.buckets:
        for tensor in bucket.shard.state.values():
            tensor.zero_()
    measure("load", load_all)
    same = all(torch.equal(a, b) for a, b in zip(before, _kept(optimizer), strict=True))
    requests = store.everything(store.load_manifest(root / "step-00000001"))
    load(root / "step-00000001", requests)
    whole = {(one.name, one.kind): one.tensor for one in requests}
    exact = all(torch.equal(whole[n, k][s : s + len(v)], v) for (n, k, s), v in decoded.items())
    deepspeed_ext.shutdown()
    return extra, same, exact


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_saving_and_loading_take_a_constant_of_device_memory(tmp_path, dtype):
    """The states decoded would be 1.5 GiB, one parameter in bf16 128 MiB."""
    [(extra, same, exact)] = run_on_gpus(_memory_on_a_gpu, 1, tmp_path, dtype, timeout=300)
    assert same and exact
    assert all(size <= states.STAGING_BYTES + (1 << 20) for size in extra.values()), extra
