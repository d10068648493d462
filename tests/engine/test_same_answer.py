"""The same answer: a request's tokens do not depend on who shares the batch, on chunks, on the cache, on preemption, on
drafts or on the order of arrival. On tiny models of every family; on the default model see test_default_model.py."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from quire.core.drafts import Drafts
from quire.core.params import SamplingParams
from quire.core.policy import Policy, Static
from quire.core.request import Request
from quire.kernels.cache_spec import CacheSpec, KVCacheSpec, StateSpec
from quire.models.config import ModelConfig
from tests.tools.tiny import FAMILIES, LLAMA, MIXTURES, TinyEngine, tiny_model

pytestmark = pytest.mark.cpu

KINDS = FAMILIES | {"gemma4": MIXTURES["gemma4"]}
TINY_CACHE = {
    "mistral": 11,
    "gemma3": 40,
    "gemma4": 40,
}  # just enough for the longest request; windows need less, groups more
MODELS = {family: tiny_model(config) for family, config in KINDS.items()}


def questions(sampled: bool, count: int = 12, seed: int = 1) -> list[Request]:
    """Prompts of mixed length; some begin alike, some are samples of one prompt."""
    rng = random.Random(seed)
    common = [rng.randrange(97) for _ in range(21)]
    requests: list[Request] = []
    for number in range(count):
        prompt = (common if number % 3 == 0 else []) + [rng.randrange(97) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(
            temperature=rng.choice([0.5, 1.0, 2.0]) if sampled else 0.0,
            top_p=rng.choice([0.8, 1.0]),
            top_k=rng.choice([0, 20]),
            presence_penalty=rng.choice([0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            max_tokens=None,
        )
        length = rng.randint(1, 20)
        leader = None
        for sample in range(2 if number % 5 == 0 else 1):
            request = Request(f"{number}#{sample}", prompt, params, seed=number + 99 * sample, max_tokens=length)
            request.leader, leader = leader, leader or request
            requests.append(request)
    return requests


def alone(family: str, requests: list[Request]) -> list[list[int]]:
    config = KINDS[family]
    return [
        TinyEngine(config, model=MODELS[family], prefix_cache=False, max_tokens=512).answer([fresh(request)])[0]
        for request in requests
    ]


def fresh(request: Request) -> Request:
    return Request(request.id, request.prompt, request.params, seed=request.seed, max_tokens=request.max_tokens)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", KINDS)
def test_batch_chunks_order_preemption_and_cache(family: str, sampled: bool) -> None:
    config, model = KINDS[family], MODELS[family]
    expected = alone(family, questions(sampled))
    shapes: dict[str, Callable[[], TinyEngine]] = {
        "one batch": lambda: TinyEngine(config, model=model),
        "chunks of 5": lambda: TinyEngine(config, model=model, max_tokens=5, max_requests=5),
        "blocks of 1": lambda: TinyEngine(
            config, model=model, num_blocks=2048, block_size=1, max_tokens=17, max_requests=9
        ),
        "static": lambda: TinyEngine(config, model=model, policy=Policy(Static(4))),
        "tiny cache": lambda: TinyEngine(
            config, model=model, num_blocks=TINY_CACHE.get(family, 22), max_tokens=24, max_requests=16
        ),
    }
    for name, build in shapes.items():
        engine = build()
        assert engine.answer(questions(sampled)) == expected, name
        if name == "one batch":  # once more, now out of the cache
            hits = engine.scheduler.counters.cached_tokens
            assert engine.answer(questions(sampled)) == expected
            assert engine.scheduler.counters.cached_tokens > hits + 100


@pytest.mark.parametrize("family", KINDS)
def test_preempted_at_random_moments(family: str) -> None:
    requests = questions(sampled=True)
    expected = alone(family, requests)
    engine = TinyEngine(KINDS[family], model=MODELS[family], max_tokens=24, max_requests=16)
    assert engine.answer_preempted(requests, seed=4) == expected
    assert engine.scheduler.counters.preemptions > 5


@pytest.mark.parametrize("family", KINDS)
def test_preempted_and_kept_on_the_host(family: str) -> None:
    requests = questions(sampled=True)
    expected = alone(family, requests)
    options = {"max_tokens": 24, "max_requests": 16, "prefix_cache": False, "num_host_blocks": 1000}
    engine = TinyEngine(KINDS[family], model=MODELS[family], **options)
    assert engine.answer_preempted(requests, seed=4) == expected
    assert engine.scheduler.counters.swaps > 5
    assert engine.scheduler.swap.num_free == 1000


@pytest.mark.parametrize("seed", range(8))
def test_in_any_order_with_any_chunk(seed: int) -> None:
    rng = random.Random(seed)
    requests = questions(sampled=True, count=32, seed=seed)
    expected = {r.id: tokens for r, tokens in zip(requests, alone("llama", requests), strict=True)}
    shuffled = [fresh(request) for request in requests]
    rng.shuffle(shuffled)
    max_requests = rng.randint(1, 32)
    engine = TinyEngine(
        LLAMA,
        model=MODELS["llama"],
        num_blocks=rng.randint(40, 400),
        block_size=rng.choice([2, 4, 16]),
        max_tokens=max_requests + rng.randint(0, 60),
        max_requests=max_requests,
    )
    answers = engine.answer(shuffled)
    assert {r.id: tokens for r, tokens in zip(shuffled, answers, strict=True)} == expected


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_drafts_change_nothing(sampled: bool) -> None:
    """Right and wrong guesses, in random numbers, next to requests without any."""
    rng = random.Random(5)
    requests = questions(sampled)
    expected = alone("llama", requests)
    answers = {r.id: tokens for r, tokens in zip(requests, expected, strict=True)}
    engine = TinyEngine(LLAMA, model=MODELS["llama"])
    again = questions(sampled)
    for request in again:
        engine.scheduler.add(request)
    num_drafts = 0
    while engine.scheduler.has_work:
        for request in engine.scheduler.running:
            ahead = answers[request.id][request.num_output :][: rng.randint(0, 3)]
            request.drafts = Drafts([token if rng.random() < 0.8 else 3 for token in ahead[:-1]])
            num_drafts += len(request.drafts)
        engine.step()
    assert num_drafts > 20
    assert [request.tokens[request.num_prompt :] for request in again] == expected


def test_the_answer_depends_on_the_seed() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=None)
    engine = TinyEngine(LLAMA, model=MODELS["llama"])
    requests = [Request(str(seed), [1, 2, 3], params, seed=seed, max_tokens=12) for seed in range(6)]
    assert len({tuple(tokens) for tokens in engine.answer(requests)}) == 6


def test_logits_are_the_same_in_one_chunk_and_token_by_token() -> None:
    """Not only the tokens: what they are chosen from agrees to rounding."""
    prompt = list(range(1, 60))
    scores = []
    for max_tokens in (64, 1):
        engine = TinyEngine(LLAMA, model=MODELS["llama"], max_tokens=max_tokens, max_requests=1)
        request = Request("a", prompt, SamplingParams(prompt_logprobs=0), max_tokens=1)
        engine.scheduler.add(request)
        found: list[float] = []
        while plan := engine.scheduler.schedule():
            sampled = engine.runner.launch(plan).wait()
            found += [entry.chosen[1] for entry in sampled.prompt_logprobs.get(0, [])]
            engine.scheduler.commit(plan, sampled)
        scores.append(found)
    assert len(scores[0]) == len(scores[1]) == 58
    torch.testing.assert_close(torch.tensor(scores[0]), torch.tensor(scores[1]), atol=1e-5, rtol=0)


def draft_specs(config: ModelConfig) -> list[CacheSpec]:
    """Of layers that look as far back as the model's last."""
    window = config.windows[-1]
    return [KVCacheSpec(1, 24, window=window), KVCacheSpec(1, 40, is_latent=True, window=window, dtype="bfloat16")]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_groups_that_do_not_grow_beside_those_that_do(family: str) -> None:
    config, model = KINDS[family], MODELS[family]
    more = [KVCacheSpec(1, 16, is_cross=True), StateSpec((3, 5), "float32")]
    expected = TinyEngine(config, model=model).answer(questions(sampled=True))
    requests = questions(sampled=True)
    for request in requests:
        request.encoder_tokens = range(len(request.prompt))
    engine = TinyEngine(config, model=model, more_specs=more, num_blocks=200, max_requests=16, num_host_blocks=60)
    assert engine.answer_preempted(requests, seed=3) == expected
    assert engine.scheduler.counters.swaps
    assert engine.scheduler.kv.pool.num_free == 200


@pytest.mark.parametrize("family", KINDS)
def test_layers_of_others_in_the_same_blocks(family: str) -> None:
    """A draft model's, of another shape: where there are windows, blocks of the model's own layers lie apart then."""
    config, model = KINDS[family], MODELS[family]
    more = draft_specs(config)
    expected = TinyEngine(config, model=model).answer(questions(sampled=True))
    engine = TinyEngine(config, model=model, more_specs=more, num_blocks=100, max_requests=16, num_host_blocks=20)
    assert all(layer.k.is_contiguous() == (family not in ("gemma3", "gemma4")) for layer in engine.runner.cache.layers)
    assert engine.answer_preempted(questions(sampled=True), seed=3) == expected
    assert engine.scheduler.counters.swaps
