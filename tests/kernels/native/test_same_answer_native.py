"""The same answer, bit for bit: with the C++ kernels the logits of every sampled position, and so the tokens, do not
depend on the batch, chunks, order, cache, preemption, threads or block size. Tiny models of every family; the default
model is in test_default_model_native.py."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.kernels.cache_spec import KVCacheSpec, StateSpec
from tests.tools.native import FITTING, ISAS, each_isa, kernels_of, native_model
from tests.tools.scores import Scores
from tests.tools.tiny import MIXTURES, TinyEngine

pytestmark = pytest.mark.cpu

CACHE_TYPES = ("float32", "bfloat16", "int8", "bfloat16", "float32", "fp8", "bfloat16", "int8", "fp8")
CACHE_OF = dict(zip(FITTING, CACHE_TYPES, strict=True))
CACHE_OF |= {"experts": "float32", "sinks": "int8", "latent": "fp8", "gemma4": "bfloat16"}
CONFIGS = FITTING | MIXTURES


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "fp8"])
def test_layers_of_others_in_the_same_blocks(kind: str) -> None:
    """Of a draft model, an encoder and a state. Blocks of the model's own layers lie apart then."""
    ops, config = kernels_of(), FITTING["gemma3"]
    model = native_model(config, ops)
    expected = TinyEngine(config, model=model, ops=ops, kv_dtype=kind).answer(questions())
    more = [KVCacheSpec(1, 48), KVCacheSpec(1, 16, is_cross=True), StateSpec((3, 5), "float32")]
    engine = TinyEngine(
        config, model=model, ops=ops, kv_dtype=kind, more_specs=more, num_blocks=120, num_host_blocks=60
    )
    assert not any(layer.k.flags.c_contiguous for layer in engine.runner.cache.layers)
    assert engine.answer_preempted(questions(), seed=3) == expected
    assert engine.scheduler.counters.swaps


def questions(seed: int = 1) -> list[Request]:
    """Prompts of mixed length, some of which begin alike; every other one is greedy."""
    rng = random.Random(seed)
    common = [rng.randrange(97) for _ in range(21)]
    requests = []
    for number in range(9):
        prompt = (common if number % 3 == 0 else []) + [rng.randrange(97) for _ in range(rng.randint(1, 50))]
        params = SamplingParams(temperature=rng.choice([0.7, 1.5]) if number % 2 else 0.0, max_tokens=None)
        requests.append(Request(str(number), prompt, params, seed=number, max_tokens=rng.randint(1, 12)))
    return requests


class Family:
    """Engines on one family's model, with the kernels of an instruction set."""

    def __init__(self, family: str, name: str) -> None:
        self.config, self.kind, self.name = CONFIGS[family], CACHE_OF[family], name
        self.model = native_model(self.config, kernels_of(name))

    def engine(self, threads: int = 2, **options: Any) -> TinyEngine:
        ops = kernels_of(self.name, threads)
        model = self.model if threads == 2 else native_model(self.config, ops)
        return TinyEngine(self.config, model=model, ops=ops, kv_dtype=self.kind, **options)


@each_isa
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_bit_for_bit(family: str, name: str, scores: list[Scores]) -> None:
    own = Family(family, name)
    expected = [own.engine(1, prefix_cache=False, max_tokens=512).answer([request])[0] for request in questions()]
    alone = scores[-1]
    assert len(alone.found) > 40
    engines = {
        "one batch": own.engine(),
        "five threads": own.engine(5),
        "one thread, blocks of 16": own.engine(1, block_size=16, max_tokens=40, max_requests=7),
        "chunks of 3": own.engine(max_tokens=3, max_requests=3),
        "chunks of 17": own.engine(max_tokens=17, max_requests=9, block_size=3),
    }
    for way, engine in engines.items():
        scores.append(Scores())
        assert engine.answer(questions()) == expected, way
        scores[-1].check(alone)
    scores.append(Scores())
    hits = engines["one batch"].scheduler.counters.cached_tokens
    assert engines["one batch"].answer(questions()) == expected
    assert engines["one batch"].scheduler.counters.cached_tokens > hits + 50
    scores[-1].check(alone)
    scores.append(Scores())
    assert own.engine().answer(questions()[::-1]) == expected[::-1]
    scores[-1].check(alone)
    scores.append(Scores())
    crowded = own.engine(max_tokens=24, max_requests=16)
    assert crowded.answer_preempted(questions(), seed=4) == expected
    assert crowded.scheduler.counters.preemptions > 2
    scores[-1].check(alone)
    scores.append(Scores())
    swapping = own.engine(max_tokens=24, max_requests=16, num_host_blocks=1000, prefix_cache=False)
    assert swapping.answer_preempted(questions(), seed=4) == expected
    assert swapping.scheduler.counters.swaps > 2
    scores[-1].check(alone)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_and_chunk(seed: int, scores: list[Scores]) -> None:
    rng = random.Random(seed)
    own = Family(rng.choice(list(CONFIGS)), rng.choice(ISAS))
    alone: dict[str, list[int]] = {}
    for request in questions(seed):
        alone[request.id] = own.engine(prefix_cache=False, max_tokens=512).answer([request])[0]
    expected = scores[-1]
    requests = questions(seed)
    rng.shuffle(requests)
    max_requests = rng.randint(1, 9)
    options = {"block_size": rng.choice([2, 4, 16]), "max_tokens": max_requests + rng.randint(0, 60)}
    scores.append(Scores())
    answers = own.engine(max_requests=max_requests, **options).answer(requests)
    assert {request.id: tokens for request, tokens in zip(requests, answers, strict=True)} == alone
    scores[-1].check(expected)
