"""The planner's buffer pool of ZeRO stage 2 against that of the real optimizer, event by event."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.optimus.config.choices import PipelineSchedule
from megatron.optimus.config.load import load
from megatron.optimus.config.rank_plan import RankPlan, rank_plans
from megatron.optimus.context import RunContext
from megatron.optimus.models.parameters import EMBEDDING
from megatron.optimus.planner.buffer_pool import BackwardReplay, buffer_pool, chunks_in_order, gradients_of, replay
from megatron.optimus.planner.memory import memory_of
from tests.distributed.layouts import refusal
from tests.helpers import run_distributed
from tests.unit.planner.cases import MIXED, MOE, SHARED, batch_of, run

Event = tuple[Any, ...]
STEPS = 3
WORLD = 4
TIED = "--no-untie-embeddings-and-output-weights "
STAGES = "--pipeline-model-parallel-size 2 "
CHUNKS = STAGES + "--pipeline-schedule interleaved-1f1b --virtual-pipeline-model-parallel-size 2 "
# In a bucket of 3,000 elements lies a part of a matrix of experts or of an MLP, in one of 20,000 half a layer.
CASES = [
    MOE + "--ddp-bucket-size 3000",
    MOE + "--ddp-bucket-size 20000 --expert-model-parallel-size 2 --micro-batch-size 4",
    MOE + "--ddp-bucket-size 9000 --expert-model-parallel-size 4",  # experts have no replicas
    SHARED + TIED + "--ddp-bucket-size 7000 --no-weight-decay-biases",
    MIXED + "--ddp-bucket-size 5000 --grad-reduce-in-bf16",
    MOE + "--ddp-bucket-size 9000 --no-overlap-grad-reduce",
    MOE + "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --ddp-bucket-size 5000",
    STAGES + MIXED + TIED + "--ddp-bucket-size 5000",
    CHUNKS + MOE + "--ddp-bucket-size 9000",
]

if refusal(PipelineSchedule.ONE_F_ONE_B, num_stages=2):
    CASES = [words for words in CASES if not words.startswith(STAGES)]


def real_events(rank: int, world: int, cases: list[str]) -> list[list[Event]]:
    return [_real_events(rank, world, words) for words in cases]


def _real_events(rank: int, world: int, words: str) -> list[Event]:
    """What happens to the buffers of this rank in some steps: lent, sent, given back; and at the start of each layer's
    backward how many are lent and how many there are. In the end: bytes of all buffers, and the most that buffers and
    waiting gradients had in a backward at whose end all are moved."""
    from deepspeed_ext.zero.bucket import BufferPool
    from deepspeed_ext.zero.gradient_hooks import GradientReducer
    from megatron.optimus.platform.mesh import Mesh
    from megatron.optimus.training.engine import build_engine, build_model
    from megatron.optimus.training.pipeline_schedule import build_schedule

    config = run(words)
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    steps = config.training.global_batch_size // config.training.micro_batch_size // mesh.size("dp")
    context = RunContext.of(config, mesh, torch.device("cpu"))
    engine = build_engine(context, build_model(context))
    schedule = build_schedule(context, engine)
    reducer = engine.optimizer._reducer
    pool, place = reducer._pool, {bucket: number for number, bucket in enumerate(reducer.buckets)}
    events: list[Event] = []
    at_ends, parameters, open_bucket = [0], list(engine.module.parameters()), GradientReducer._open

    def count() -> tuple[int, int]:
        lent = sum(state.buffer is not None for state in reducer._queue)
        return lent, lent + len(pool.free_buffers())

    def noting(kind: str, method: str) -> Any:
        function = getattr(BufferPool, method)

        def call(self: BufferPool, entry: Any) -> None:
            function(self, entry)
            events.append((kind, place[entry.bucket]))

        return call

    def opening(self: GradientReducer, entry: Any) -> None:
        open_bucket(self, entry)
        if not self._launches_in_backward:
            waiting = sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
            at_ends.append(waiting + count()[1] * pool._numel * engine.optimizer.options.communication_dtype.itemsize)

    def watch(number: int, layer: torch.nn.Module) -> None:
        def reached(gradient: torch.Tensor) -> None:
            events.append(("layer", number, *count()))

        layer.register_forward_hook(lambda module, args, output: output[0].register_hook(reached) and None)

    for name, layer in engine.module.layers.named_children():
        watch(int(name), layer)
    with pytest.MonkeyPatch.context() as patch:
        methods = {"lend": "acquire", "sent": "mark_in_flight", "keep": "keep", "_give_back": "release"}
        for kind, method in methods.items():
            patch.setattr(BufferPool, method, noting(kind, method))
        patch.setattr(GradientReducer, "_open", opening)
        for _ in range(STEPS):
            schedule.forward_backward([batch_of(config, mesh) for _ in range(steps)], 1)
            engine.step()
            engine.optimizer.wait_for_params()
            events.append(("step", *count()))
    events.append((sum(buffer.nbytes for buffer in pool.free_buffers()), max(at_ends)))
    dist.barrier()
    return events


class Noting(BackwardReplay):
    """The planner's pool, with the same events."""

    def __init__(self, share: RankPlan) -> None:
        super().__init__(gradients_of(share))
        self._share = share
        self.events: list[Event] = []

    @property
    def acquired(self) -> int:
        """Buffers that buckets have, on their way or not."""
        return self.made - self._free

    def backward(self, chunk: int) -> None:
        self._chunk_layers = list(reversed(self._share.chunks[chunk]))
        super().backward(chunk)

    def _note_layers(self, reached: int | None) -> None:
        """Those whose backward begins before the next gradient comes; None: all that are left."""
        while self._chunk_layers and (reached is None or self._chunk_layers[0] >= reached):
            self.events.append(("layer", self._chunk_layers.pop(0), self.acquired, self.made))

    def _arrive(self, slot: int) -> None:
        number, name = self.gradients.names[slot]
        if number is not None or (name == EMBEDDING and self._share.has_embedding):  # else it comes before all layers
            self._note_layers(number)
        super()._arrive(slot)

    def _end(self, waiting: set[int]) -> None:
        self._note_layers(None)
        super()._end(waiting)

    def _acquire(self, bucket: Any) -> None:
        super()._acquire(bucket)
        self.events.append(("lend", self.buckets.index(bucket)))

    def _keep(self, bucket: Any) -> None:
        super()._keep(bucket)
        self.events.append(("keep", self.buckets.index(bucket)))

    def _launch(self, bucket: Any) -> None:
        super()._launch(bucket)
        if bucket.has_peers:
            self.events.append(("sent", self.buckets.index(bucket)))

    def _release(self) -> None:
        bucket = self._sent[0]
        super()._release()
        self.events.append(("_give_back", self.buckets.index(bucket)))

    def step(self) -> None:
        super().step()
        self.events.append(("step", self.acquired, self.made))


@pytest.fixture(scope="module")
def measured() -> list[list[list[Event]]]:
    return run_distributed(real_events, WORLD, [words + " --zero-stage 2" for words in CASES], timeout=200)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_buffers_are_lent_as_the_program_lends_them(measured: list[list[list[Event]]], case: int) -> None:
    members = rank_plans(run(CASES[case] + " --zero-stage 2"), WORLD)
    for rank, of_cases in enumerate(measured):
        share = members[rank // (WORLD // len(members))]
        replayed = Noting(share)
        for _ in range(STEPS):
            for chunk in chunks_in_order(share, share.micro_batches):
                replayed.backward(chunk)
            replayed.step()
        *events, (size, at_end) = of_cases[case]
        assert replayed.events == events, (CASES[case], rank)
        assert replayed.made * replayed.buffer_bytes == size == memory_of(share).pool
        assert 0 < size < len(replayed.buckets) * replayed.buffer_bytes
        assert replayed.first_end == at_end, (CASES[case], rank)


@pytest.mark.parametrize(
    "layers", ["", STAGES, CHUNKS, STAGES.replace("2", "4"), CHUNKS.replace("size 2", "size 4", 1)]
)
@pytest.mark.parametrize("bucket", [2**20, 2**24, 2**26])
def test_further_micro_batches_need_no_further_buffers(layers: str, bucket: int) -> None:
    """A step of two micro-batches, of two rounds with several chunks, is enough to find all that 16 need."""
    words = (
        "--preset mula-7b-a1b --expert-model-parallel-size 1 --zero-stage 2 --micro-batch-size 1 "
        f"--ddp-bucket-size {bucket} {layers}"
    )
    config = load([*words.split(), "--global-batch-size", "32"]).config
    for share in rank_plans(config, 2 * config.parallel.pipeline_model_parallel_size):
        assert share.micro_batches == 16
        assert buffer_pool(share) == replay(gradients_of(share), tuple(chunks_in_order(share, 16)))
