"""With speculation every request has the same tokens and log probabilities as without: 2,000 requests with random
parameters, in batches of 1, 7 and 32, with chains and trees of right and wrong drafts, prefix hits, few blocks, swap
and every type of cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quire.core.drafts import Drafts
from quire.core.params import SamplingParams, StructuredOutputs
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder
from quire.speculative.controller import Controller
from quire.speculative.proposer import Proposer
from quire.speculative.step_times import EqualTimes
from quire.speculative.suffix import SuffixProposer
from quire.text.grammar.constraint import GrammarBackend
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level
from tests.tools.native import FITTING, kernels_of, mixed, native_model
from tests.tools.oracle import Answer, Oracle, make_chain, make_tree, run
from tests.tools.tiny import TinyEngine

pytestmark = pytest.mark.cpu

TOKENIZER = Tokenizer.from_gguf(byte_level())
VOCAB_SIZE = TOKENIZER.vocab_size + 15
GRAMMARS = GrammarBackend(TOKENIZER, VOCAB_SIZE, TOKENIZER.end_token_ids)
GRAMMAR = StructuredOutputs(
    json={"type": "object", "properties": {"hello": {"type": "integer"}}, "required": ["hello"]}
)
OPS = kernels_of()
CONFIGS = {name: replace(FITTING[name], vocab_size=VOCAB_SIZE) for name in ("llama", "gemma3")}
MODELS: dict[str, Decoder] = {name: native_model(config, OPS, mixed) for name, config in CONFIGS.items()}

Settings = dict[str, Any]


def choose_params(rng: random.Random) -> SamplingParams:
    """Any of the fields, alone and together."""

    def maybe(chance: float, value: Any, default: Any) -> Any:
        return value if rng.random() < chance else default

    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.3, 0.8, 1.2]),
        top_p=maybe(0.3, 0.9, 1.0),
        top_k=maybe(0.2, 12, 0),
        min_p=maybe(0.2, 0.05, 0.0),
        presence_penalty=maybe(0.2, 0.7, 0.0),
        frequency_penalty=maybe(0.2, 0.5, 0.0),
        repetition_penalty=maybe(0.2, 1.3, 1.0),
        logit_bias=maybe(0.1, {7: 3.0, 9: -5.0}, None),
        allowed_token_ids=maybe(0.05, list(range(5, 60)), None),
        min_tokens=maybe(0.2, 6, 0),
        stop_token_ids=maybe(0.3, [11, 30, 41, 50], []),
        logprobs=maybe(0.4, rng.choice([0, 3]), None),
        prompt_logprobs=maybe(0.05, 1, None),
        max_tokens=None,
    )


def make_requests(seed: int, count: int) -> list[Request]:
    rng = random.Random(seed)
    common = [rng.randrange(5, 90) for _ in range(23)]
    requests: list[Request] = []
    while len(requests) < count:
        number = len(requests)
        phrase = [rng.randrange(5, 90) for _ in range(rng.randint(2, 9))]
        prompt = (common if rng.random() < 0.4 else []) + phrase * rng.randint(1, 4)
        params, length = choose_params(rng), rng.randint(1, 24)
        constrained = rng.random() < 0.1
        bad_words = ((7,), (8, 9), (10, 11, 12)) if rng.random() < 0.1 else ()
        leader = None
        for sample in range(3 if rng.random() < 0.15 else 1):  # n
            request = Request(
                f"{number}#{sample}",
                prompt,
                params,
                end_token_ids=frozenset([3]),
                seed=97 * number + sample,
                max_tokens=max(length, params.min_tokens),
                bad_word_ids=bad_words,
                constraint=GRAMMARS.make_constraint(GRAMMAR) if constrained else None,
                leader=leader,
            )
            leader = leader or request
            requests.append(request)
    return requests[:count]


PROPOSERS: dict[str, Callable[[dict[str, Answer]], Proposer]] = {
    "suffix": lambda answers: SuffixProposer(),
    "chains": lambda answers: Oracle(answers, make_chain, VOCAB_SIZE),
    "trees": lambda answers: Oracle(answers, make_tree, VOCAB_SIZE),
}
ENGINES: dict[str, Settings] = {
    "roomy": {},
    "few blocks": {"num_blocks": 70, "block_size": 4},
    "swap": {"num_blocks": 70, "block_size": 4, "num_host_blocks": 300},
    "int8": {"kv_dtype": "int8", "block_size": 16},
    "fp8": {"kv_dtype": "fp8", "block_size": 16},
    "bfloat16": {"kv_dtype": "bfloat16", "block_size": 3},
}


def make_engine(config: ModelConfig, batch: int, settings: Settings) -> Engine:
    tiny = TinyEngine(config, model=MODELS[config.family], ops=OPS, max_requests=batch, max_tokens=96, **settings)
    return Engine(tiny.scheduler, tiny.runner, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", ENGINES)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("batch", [1, 7, 32])
def test_tokens_and_log_probabilities_are_the_same(batch: int, family: str, settings: str) -> None:
    config, seed = CONFIGS[family], 100 * batch + len(settings)
    count = 12 if batch == 1 else 27
    kv_dtype = {name: value for name, value in ENGINES[settings].items() if name == "kv_dtype"}
    expected = run(make_engine(config, 32, kv_dtype), make_requests(seed, count))
    for name, make_proposer in PROPOSERS.items():
        engine = make_engine(config, batch, ENGINES[settings])
        engine.controller = controller = Controller([make_proposer(expected)], 96, VOCAB_SIZE, 12.0)
        controller.times, controller._clock = EqualTimes(12.0), lambda: 0.0
        found = run(engine, make_requests(seed, count))
        assert found == expected, name
        assert controller.drafted.total() > 0, name
        assert controller.proposers, "the proposer failed"
        if name != "suffix":
            assert controller.accepted.total() > 20, name


def test_all_drafts_of_a_step_that_are_right_are_accepted() -> None:
    def questions() -> list[Request]:
        params = SamplingParams(temperature=0.8, max_tokens=None, ignore_eos=True)
        return [Request(f"{number}", [7, number, 9], params, seed=number, max_tokens=25) for number in range(3)]

    def make_right(ahead: list[int], rng: random.Random, vocab_size: int) -> Drafts:
        return Drafts(ahead[:5], None, [0.9] * len(ahead[:5]))

    expected = run(make_engine(CONFIGS["llama"], 32, {}), questions())
    engine = make_engine(CONFIGS["llama"], 32, {})
    engine.controller = controller = Controller([Oracle(expected, make_right, VOCAB_SIZE)], 96, VOCAB_SIZE, 12.0)
    controller.times, controller._clock = EqualTimes(12.0), lambda: 0.0
    assert run(engine, questions()) == expected
    assert controller.accepted.total() == controller.drafted.total() >= 3 * 20
