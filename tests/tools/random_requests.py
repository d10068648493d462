"""Requests with random parameters: every field of SamplingParams that a step can see, alone and together.

Ids name a request and its sample. The same seed gives the same requests, so they can be run several times.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from quire.core.params import SamplingParams, StructuredOutputs
from quire.core.request import Request
from quire.text.grammar.constraint import GrammarBackend
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level

TOKENIZER = Tokenizer.from_gguf(byte_level())
VOCAB_SIZE = TOKENIZER.vocab_size + 15
GRAMMARS = GrammarBackend(TOKENIZER, VOCAB_SIZE, TOKENIZER.end_token_ids)
FORMATS = [
    StructuredOutputs(json={"type": "object", "properties": {"hello": {"type": "integer"}}, "required": ["hello"]}),
    StructuredOutputs(regex="(hello|world)+[0-9]{2,9}"),
    StructuredOutputs(choice=["hello world hello world", "hello hello", "world"]),
    StructuredOutputs(grammar='root ::= "hello " item+\nitem ::= "world, " | [a-c]'),
]
END_TOKEN_IDS = frozenset([3])
MAX_LEN = 512  # of the tiny models


def choose_params(rng: random.Random, *, can_exit: bool = False) -> SamplingParams:
    def maybe(chance: float, value: Any, default: Any) -> Any:
        return value if rng.random() < chance else default

    early_exit = maybe(0.4 if can_exit else 0.0, 0.55, None)
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
        ignore_eos=maybe(0.2, True, False),
        logprobs=maybe(0.4, rng.choice([0, 3]), None) if early_exit is None else None,
        prompt_logprobs=maybe(0.08, rng.choice([0, 2]), None),
        early_exit=early_exit,
        max_tokens=None,
    )


def choose_search(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        use_beam_search=True, temperature=0.0, n=2, best_of=rng.choice([2, 3]), max_tokens=None,
        length_penalty=rng.choice([0.5, 1.0]), early_stopping=rng.choice([True, False, "never"]),
        logprobs=rng.choice([None, 2]),
    )  # fmt: skip


def make_requests(seed: int, count: int, *, can_exit: bool = False, can_search: bool = True) -> list[Request]:
    """About `count` requests. Some are samples of one prompt, some search by beams, some fill the whole context."""
    rng, requests = random.Random(seed), list[Request]()
    common = [rng.randrange(5, 90) for _ in range(23)]
    while len(requests) < count:
        number = len(requests)
        phrase = [rng.randrange(5, 90) for _ in range(rng.randint(2, 9))]
        prompt = (common if rng.random() < 0.4 else []) + phrase * rng.randint(1, 4)
        length = rng.randint(1, 24)
        if rng.random() < 0.03:
            length = rng.randint(6, 24)  # min_tokens is 6 at most
            prompt = [rng.randrange(5, 90) for _ in range(MAX_LEN - length)]
        kind, salt = rng.random(), rng.choice([b"", b"", b"a tenant"])
        params = choose_search(rng) if kind < 0.06 and can_search else choose_params(rng, can_exit=can_exit)
        structured = rng.choice(FORMATS) if 0.06 < kind < 0.18 and params.early_exit is None else None
        if structured is not None:
            params = replace(params, structured_outputs=structured, allowed_token_ids=None)
        leader = None
        for sample in range(3 if 0.18 < kind < 0.32 and params.early_exit is None else 1):  # n
            request = Request(
                f"{number}#{sample}",
                prompt,
                params if leader is None else replace(params, prompt_logprobs=None),  # clients get the first one's
                end_token_ids=END_TOKEN_IDS,
                seed=97 * number + sample,
                salt=salt,
                tenant=salt.decode(),
                priority=rng.choice([0, 0, 0, 2]),
                max_tokens=max(length, params.min_tokens),
                bad_word_ids=((7,), (8, 9), (10, 11, 12)) if number % 10 == 3 and not params.beam_width else (),
                constraint=GRAMMARS.make_constraint(structured) if structured is not None else None,
                leader=leader,
                prediction=phrase * 4 if number % 4 == 1 and params.early_exit is None else (),
            )
            leader = leader or request
            requests.append(request)
    return requests
