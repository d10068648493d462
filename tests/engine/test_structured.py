"""Structured outputs through the engine: what comes out fits, alone or in a batch, preempted, or taken up again."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import jsonschema
import pytest
import torch

from quire.core.drafts import Drafts
from quire.core.params import SamplingParams, StructuredOutputs
from quire.core.plan import Update
from quire.core.request import Finish, Request
from quire.engine.engine import Engine
from quire.engine.logits_processors import join_masks
from quire.engine.messages import EngineRequest, Submit, decode_for_engine, encode
from quire.kernels import reference, select_torch
from quire.text.grammar.constraint import GrammarBackend
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level
from tests.tools.tiny import LLAMA, TinyEngine, tiny_model

pytestmark = pytest.mark.cpu

TOKENIZER = Tokenizer.from_gguf(byte_level())
CONFIG = replace(LLAMA, vocab_size=TOKENIZER.vocab_size + 15)
MODEL = tiny_model(CONFIG)
GRAMMARS = GrammarBackend(TOKENIZER, CONFIG.vocab_size, TOKENIZER.end_token_ids)
SCHEMA = {
    "type": "object",
    "properties": {
        "hello": {"type": "string", "maxLength": 6},
        "world": {"type": "integer", "minimum": -20, "maximum": 300},
        "list": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["hello", "world"],
    "additionalProperties": False,
}
SPECS = {
    "json": StructuredOutputs(json=SCHEMA),
    "compact": StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
    "regex": StructuredOutputs(regex=r"[a-d]{2,9}-\d{3}"),
    "choice": StructuredOutputs(choice=["hello", "hello world", "help"]),
    "grammar": StructuredOutputs(grammar='root ::= "<" [a-c]{1,5} ">" | "[" root "]"'),
}


def fits(name: str, text: str) -> bool:
    spec = SPECS[name]
    if spec.schema is not None:
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    if spec.choice is not None:
        return text in spec.choice
    return re.fullmatch(spec.regex or r"\[*<[a-c]{1,5}>\]*", text) is not None


def request(name: str, number: int, *, sampled: bool, output: tuple[int, ...] = (), max_tokens: int = 200) -> Request:
    rng = random.Random(number)
    params = SamplingParams(
        temperature=1.0 if sampled else 0.0,
        top_p=rng.choice([0.7, 1.0]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        structured_outputs=SPECS[name],
        max_tokens=None,
    )
    return Request(
        f"{name} {number}",
        [rng.randrange(256) for _ in range(rng.randint(1, 30))],
        params,
        end_token_ids=TOKENIZER.end_token_ids,
        seed=number,
        max_tokens=max_tokens,
        output=output,
        constraint=GRAMMARS.make_constraint(SPECS[name], output),
    )


def requests(*, sampled: bool) -> list[Request]:
    return [request(name, number, sampled=sampled) for name in SPECS for number in range(4)]


def engine(**options) -> TinyEngine:
    return TinyEngine(CONFIG, model=MODEL, **options)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
class TestAnswers:
    def test_fit_and_are_the_same_in_any_company(self, sampled: bool) -> None:
        single = engine(prefix_cache=False, max_requests=1)
        alone = [single.answer([one])[0] for one in requests(sampled=sampled)]
        for one, tokens in zip(requests(sampled=sampled), alone, strict=True):
            assert tokens[-1] in TOKENIZER.end_token_ids
            assert fits(one.id.split()[0], TOKENIZER.decode(tokens))
        assert engine().answer(requests(sampled=sampled)) == alone
        assert engine(max_tokens=7, max_requests=7).answer(requests(sampled=sampled)) == alone
        crowded = engine(max_tokens=24, max_requests=16)
        assert crowded.answer_preempted(requests(sampled=sampled), seed=3) == alone
        assert crowded.scheduler.counters.preemptions > 5

    def test_taken_up_again_behind_any_token_the_rest_is_the_same(self, sampled: bool) -> None:
        for name in SPECS:
            (tokens,) = engine().answer([request(name, 1, sampled=sampled)])
            again = [request(name, 1, sampled=sampled, output=tuple(tokens[:count])) for count in range(len(tokens))]
            for count, one in enumerate(again):
                one.id = f"from {count}"
            assert engine().answer(again) == [tokens] * len(tokens), name


def test_company_without_constraints_is_not_touched() -> None:
    def plain(number: int) -> Request:
        return Request(f"plain {number}", [5, number], SamplingParams(temperature=0.0), seed=number, max_tokens=20)

    expected = engine().answer([plain(number) for number in range(4)])
    mixed = [
        plain(0),
        request("json", 0, sampled=False),
        plain(1),
        request("regex", 1, sampled=True),
        plain(2),
        plain(3),
    ]
    answers = engine().answer(mixed)
    assert [tokens for one, tokens in zip(mixed, answers, strict=True) if "plain" in one.id] == expected


def test_samples_of_one_prompt_each_follow_their_own() -> None:
    leader = request("json", 2, sampled=True)
    group = [leader]
    for number in range(1, 4):
        sample = request("json", 2, sampled=True)
        sample.id, sample.seed, sample.leader = f"sample {number}", number, leader
        group.append(sample)
    answers = engine().answer(group)
    assert all(fits("json", TOKENIZER.decode(tokens)) for tokens in answers)
    assert len({tuple(tokens) for tokens in answers}) > 1


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_drafts_of_constrained_requests_change_nothing(sampled: bool) -> None:
    """Each draft is verified with the mask behind the drafts before it. One that is not allowed is never right."""
    many = [request("json", number, sampled=sampled) for number in range(3)]
    expected = {each.id: tokens for each, tokens in zip(many, engine().answer(many), strict=True)}
    tiny, rng, num_accepted = engine(), random.Random(4), 0
    again = [request("json", number, sampled=sampled) for number in range(3)]
    for each in again:
        tiny.scheduler.add(each)
    while tiny.scheduler.has_work:
        for each in tiny.scheduler.running:
            ahead = expected[each.id][each.num_output :][:4]
            each.drafts = Drafts([token if rng.random() < 0.8 else 1 for token in ahead])
        tiny.step()
    num_accepted = sum(each.num_accepted for each in again)
    assert [each.tokens[each.num_prompt :] for each in again] == list(expected.values())
    assert 0 < num_accepted < sum(each.num_drafted for each in again)


def test_a_constraint_names_forced_tokens_and_counts_allowed_ones() -> None:
    one = request("json", 0, sampled=False)
    (tokens,) = engine().answer([request("json", 0, sampled=False)])
    assert one.constraint is not None
    assert one.constraint.num_allowed(tokens) == len(tokens)
    assert one.constraint.num_allowed([*tokens[:3], 1, *tokens[3:]]) <= 3
    assert one.constraint.num_allowed([*tokens[:3], TOKENIZER.vocab_size + 3]) == 3
    assert one.constraint.num_allowed(tokens) == len(tokens)
    forced = list(one.constraint.forced())
    assert tokens[: len(forced)] == forced


def run_to_end(tiny: TinyEngine, many: list[Request]) -> dict[str, Update]:
    """The last update of each request, from an engine around the same scheduler and runner."""
    whole = Engine(tiny.scheduler, tiny.runner, None)  # type: ignore[arg-type]
    for one in many:
        whole.add(one)
    updates: dict[str, Update] = {}
    while whole.has_work:
        updates |= {update.id: update for update in whole.step() if update.finish}
    return updates


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_nothing_is_left_for_ends_alone_with_the_reason(temperature: float) -> None:
    contradictory = request("choice", 0, sampled=False)
    options = {"temperature": temperature, "top_p": 0.5, "top_k": 5, "min_p": 0.1}
    contradictory.params = replace(contradictory.params, allowed_token_ids=[3], **options)
    failing = request("regex", 0, sampled=True)
    failing.constraint = GRAMMARS.make_constraint(StructuredOutputs(regex="a"))
    failing.constraint.advance(TOKENIZER.encode("b")[0])
    good = request("json", 1, sampled=True)
    updates = run_to_end(engine(), [contradictory, failing, good])
    assert updates[good.id].finish is Finish.STOP
    for one, message in (
        (contradictory, "structured_outputs and allowed_token_ids together leave no token"),
        (failing, "The schema or grammar could not be followed any further: "),
    ):
        detail = updates[one.id].detail
        assert updates[one.id].finish is Finish.ERROR
        assert detail is not None
        assert detail.message.startswith(message)
        assert detail.refused


def test_masks_leave_only_tokens_whose_bit_is_set() -> None:
    masks = {0: bytes([0b1000_0001, 0b10]), 2: b"", 3: bytes([0xFF] * 9), 5: bytes([0, 0, 0b100])}
    rows, bits = torch.tensor(list(masks)), torch.from_numpy(join_masks(list(masks.values()), 20))
    for apply in (select_torch("cpu").apply_token_bitmask, reference.apply_token_bitmask):
        logits = torch.zeros(6, 20)
        apply(logits, rows, bits)
        assert logits[0].isfinite().nonzero().flatten().tolist() == [0, 7, 9]
        assert logits.isfinite().sum(1).tolist() == [3, 20, 0, 20, 20, 1]
        apply(logits, torch.tensor([1]), torch.tensor([[0b110]], dtype=torch.uint8))
        assert logits[1].isfinite().nonzero().flatten().tolist() == [1, 2]


@pytest.mark.parametrize("name", SPECS)
def test_what_was_asked_for_crosses_to_the_engines_process(name: str) -> None:
    one = request(name, 3, sampled=True)
    sent = EngineRequest.of(one, "7", None, [1, 2], 0, 0.0)
    frame = encode(Submit([sent]))
    (arrived,) = decode_for_engine(frame[4:]).requests
    assert arrived == sent
    assert arrived.params.structured_outputs == SPECS[name]
    assert not arrived.to_request({}).argmax_only
