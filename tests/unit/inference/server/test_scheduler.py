"""Continuous batching gives every request what `generate` gives it, whatever else is in the batch."""

from __future__ import annotations

import math
import random
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.optimus.inference.generate import Completion, Limits, generate
from megatron.optimus.inference.load import TextModel
from megatron.optimus.inference.sampling import Sampling
from megatron.optimus.inference.score import score
from megatron.optimus.inference.server.engine import Engine
from megatron.optimus.inference.server.metrics import Metrics
from megatron.optimus.inference.server.scheduler import Draining, QueueFull, Scheduler, ServedRequest, Token, Update
from megatron.optimus.platform.ranks import Ranks
from tests.unit.inference.cases import MODELS, checkpoint, loaded, prompts

GREEDY = Sampling(temperature=0)
SAMPLINGS = [
    GREEDY,
    Sampling(temperature=0.9, top_p=0.95, seed=3),
    Sampling(top_k=20, min_p=0.01, seed=11),
    Sampling(repetition_penalty=1.4, seed=5),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextModel]:
    return {name: loaded(checkpoint(tmp_path_factory.mktemp(name), name)) for name in MODELS}


class Result:
    """What a request got, put together again."""

    def __init__(self) -> None:
        self.text, self.error, self.finish_reason = "", None, None
        self.prompt: list[Token] = []
        self.tokens: list[Token] = []
        self.experts: list[list[list[int]]] = []

    def __call__(self, update: Update) -> None:
        assert self.finish_reason is None, "an update after the end"
        self.text += update.text
        self.prompt += update.prompt
        self.tokens += update.tokens
        self.experts += update.experts
        self.finish_reason, self.error = update.finish_reason, update.error


def scheduler(model: TextModel, pages: int = 64, **limits: int) -> Scheduler:
    options = dict(max_batch=8, max_step_tokens=64, max_waiting=500) | limits
    return Scheduler(Engine(model, Ranks.alone(), pages), Metrics(), **options)


def request(model: TextModel, ids: list[int], number: int = 0, **options: Any) -> tuple[ServedRequest, Result]:
    result = Result()
    limits = options.pop("limits", Limits(8))
    return ServedRequest(model, ids, options.pop("sampling", GREEDY), limits, number, result, **options), result


def run(server: Scheduler, requests: list[ServedRequest], joins: random.Random | None = None) -> None:
    """Lets requests join at random steps, or all at once, and computes until all are done."""
    waiting = list(requests)
    while waiting or not server.is_idle:
        count = len(waiting) if joins is None else joins.choice([0, 0, 1, 2, 5])
        if waiting:
            server.submit(waiting[:count])
        waiting = waiting[count:]
        server.step()
    assert server.load == (0, 0, 0)


@pytest.mark.parametrize("name", MODELS)
def test_requests_that_join_at_random_times_get_what_generate_gives(name: str, models: dict[str, TextModel]) -> None:
    model, joins = models[name], random.Random(3)
    ids = prompts(14, longest=40, seed=9)
    for sampling in SAMPLINGS:
        limits = [Limits(joins.randint(1, 20), ignore_end=True) for _ in ids]
        made = [request(model, prompt, number, sampling=sampling, limits=limit)
                for number, (prompt, limit) in enumerate(zip(ids, limits, strict=True))]  # fmt: skip
        # Few pages and small steps: requests wait for pages, and prompts come in parts.
        run(scheduler(model, pages=14, max_batch=6, max_step_tokens=17), [one for one, _ in made], joins)
        whole = list(generate(model, ids, sampling, Limits(20, ignore_end=True), batch_size=5))
        for (_, result), limit, expected in zip(made, limits, whole, strict=True):
            assert [token.id for token in result.tokens] == expected.token_ids[: limit.max_new_tokens]
            logprobs = [token.logprob for token in result.tokens]
            assert logprobs == pytest.approx(expected.logprobs[: limit.max_new_tokens], abs=1e-5)


def test_requests_with_different_options_share_a_batch(models: dict[str, TextModel]) -> None:
    model, ids = models["moe"], [72, 101, 108]
    made = [request(model, ids, 2, sampling=sampling, limits=Limits(12)) for sampling in SAMPLINGS]
    run(scheduler(model), [one for one, _ in made])
    for (_, result), sampling in zip(made, SAMPLINGS, strict=True):
        expected = list(generate(model, [ids] * 3, sampling, Limits(12)))[2]
        assert [token.id for token in result.tokens] == expected.token_ids
        assert (result.text, result.finish_reason) == (expected.text, expected.finish_reason)


def test_a_completion_ends_where_that_of_generate_ends(models: dict[str, TextModel]) -> None:
    model = models["dense"]
    [whole] = generate(model, [[65, 66]], Sampling(seed=2), Limits(40, ignore_end=True))
    end, stop = whole.token_ids[9], whole.text[7:9]
    ending = replace(model, end_ids=frozenset([end]))
    cases: list[tuple[list[int], Limits]] = [
        ([65, 66], Limits(40)),
        ([65, 66], Limits(40, stops=(stop,))),
        ([65] * 60, Limits(1000, ignore_end=True)),  # the model has 64 positions
        ([65] * 63, Limits(5)),
    ]
    for ids, limits in cases:
        served, result = request(ending, ids, sampling=Sampling(seed=2), limits=limits)
        run(scheduler(ending), [served])
        [expected] = generate(ending, [ids], Sampling(seed=2), limits)
        found = Completion([token.id for token in result.tokens], [], result.text, result.finish_reason)
        assert found == replace(expected, logprobs=[])


@pytest.mark.parametrize("step_tokens", [5, 64])
def test_a_prompt_is_scored_as_by_score_and_the_likeliest_tokens_are_told(
    step_tokens: int, models: dict[str, TextModel]
) -> None:
    model = models["shared"]
    ids = prompts(6, longest=30, seed=2)
    made = [request(model, prompt, scores_prompt=True, top_logprobs=3, completes=False) for prompt in ids]
    run(scheduler(model, max_step_tokens=step_tokens), [one for one, _ in made])
    for (_, result), prompt, expected in zip(made, ids, score(model, ids), strict=True):
        assert [token.id for token in result.prompt] == prompt
        assert result.prompt[0].logprob is None and result.tokens == [] and result.finish_reason == "length"
        found = result.prompt[1:]
        assert [token.logprob for token in found] == pytest.approx(expected.logprobs, abs=1e-5)
        assert [token.logprob == max(value for _, value in token.top) for token in found] == expected.is_greedy
        assert all(len(token.top) == 3 and token.top[0][1] >= token.top[2][1] for token in found)
    full = [request(model, prompt, scores_prompt=True, top_logprobs=1) for prompt in ids]
    run(scheduler(model, max_step_tokens=step_tokens), [one for one, _ in full])
    for (_, result), (_, alone), expected in zip(full, made, generate(model, ids, GREEDY, Limits(8)), strict=True):
        assert [token.logprob for token in result.prompt[1:]] == pytest.approx(
            [token.logprob for token in alone.prompt[1:]], abs=1e-5
        )
        assert [token.id for token in result.tokens] == expected.token_ids


def test_the_experts_of_every_token_are_those_of_the_training_forward(models: dict[str, TextModel]) -> None:
    model = models["moe"]
    other, _ = request(model, [1, 2, 3])
    served, result = request(model, [65, 66, 67, 68], wants_experts=True)
    run(scheduler(model, max_step_tokens=3), [other, served])
    whole = torch.tensor([[65, 66, 67, 68, *(token.id for token in result.tokens)]])[:, :-1]
    found: list[torch.Tensor] = []
    hooks = [layer.router.register_forward_hook(lambda module, args, out: found.append(out[0].indices_TK))
             for layer in model.model.moe_layers()]  # fmt: skip
    model.model(whole)
    for hook in hooks:
        hook.remove()
    assert [[sorted(layer) for layer in token] for token in result.experts] == (
        torch.stack(found, dim=1).sort(dim=-1).values.tolist()
    )


def test_the_queue_has_a_limit_and_cancelled_requests_leave(models: dict[str, TextModel]) -> None:
    model = models["dense"]
    server = scheduler(model, max_batch=2, max_waiting=3)
    made = [request(model, [65, 66], limits=Limits(50, ignore_end=True)) for _ in range(4)]
    server.submit([made[0][0], made[1][0]])
    server.step()
    with pytest.raises(QueueFull, match=r"0 prompts are waiting and 4 came; at most 3"):
        server.submit([request(model, [65])[0] for _ in range(4)])
    server.submit([made[2][0], made[3][0]])
    assert server.load[:2] == (2, 2)
    server.cancel([made[0][0], made[3][0]])
    server.step()
    assert server.load[:2] == (2, 0) and len(made[2][1].tokens) == 1
    server.drain()
    with pytest.raises(Draining):
        server.submit([request(model, [65])[0]])
    run(server, [])
    assert [len(result.tokens) for _, result in made] == [1, 50, 50, 0]


def test_a_failed_step_fails_its_requests_alone(
    models: dict[str, TextModel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = models["dense"]
    server = scheduler(model)
    broken, result = request(model, [65])
    compute = Engine.compute
    monkeypatch.setattr(Engine, "compute", lambda *args: 1 / 0)
    server.submit([broken])
    server.step()
    assert result.error == "the server failed: ZeroDivisionError: division by zero" and server.load == (0, 0, 0)
    monkeypatch.setattr(Engine, "compute", compute)
    good, result = request(model, [65])
    run(server, [good])
    assert result.finish_reason == "length" and result.error is None


def test_weights_that_are_not_finite_are_an_error(models: dict[str, TextModel]) -> None:
    model = models["dense"]
    weight = model.model.final_norm.weight
    before = weight.clone()
    weight.fill_(math.nan)
    found = [request(model, [65], sampling=sampling) for sampling in SAMPLINGS]
    run(scheduler(model), [served for served, _ in found])
    weight.copy_(before)
    assert all(result.error is not None and "not finite" in result.error for _, result in found)


def test_the_thread_computes_and_stops(models: dict[str, TextModel]) -> None:
    model = models["dense"]
    server, done = scheduler(model), threading.Event()
    server.start()
    served, result = request(model, [65, 66])
    served.update = lambda update: (result(update), done.set() if update.finish_reason else None)[0]
    server.submit([served])
    assert done.wait(30)
    endless, cut = request(model, [65], limits=Limits(60, ignore_end=True))
    server.submit([endless])
    server.stop()
    assert cut.error == "the server is shutting down" or cut.finish_reason == "length"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_thread_accepts_no_requests(models: dict[str, TextModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of several ranks end with the first error; the server is about to end too."""
    server = scheduler(models["dense"])
    monkeypatch.setattr(Engine, "is_alone", False)
    monkeypatch.setattr(Engine, "compute", lambda *args: 1 / 0)
    server.start()
    served, result = request(models["dense"], [65])
    server.submit([served])
    server._thread.join(30)
    assert isinstance(server.failure, ZeroDivisionError) and result.error == "the server is shutting down"
    with pytest.raises(Draining):
        server.submit([request(models["dense"], [65])[0]])
