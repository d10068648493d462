"""GrammarChecker: hostile grammars are refused or kill the worker, and the next check is not affected."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections.abc import Awaitable, Callable

import pytest

from quire.core.structured import StructuredOutputs
from quire.errors import BadGrammar, EngineClosed
from quire.text.grammar.checker import GrammarChecker
from quire.text.grammar.constraint import GrammarBackend
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.cpu

TOKENIZER = Tokenizer.from_gguf(byte_level())
GOOD = StructuredOutputs(json={"type": "integer"})
BAD = StructuredOutputs(regex="(a")


def with_checker(script: Callable[[GrammarChecker], Awaitable[None]], timeout_s: float = 30.0) -> None:
    async def run() -> None:
        checker = GrammarChecker(TOKENIZER, TOKENIZER.vocab_size, TOKENIZER.end_token_ids, timeout_s)
        try:
            await script(checker)
        finally:
            await checker.close()

    asyncio.run(run())


def test_results_are_cached_and_the_worker_is_reused() -> None:
    async def script(checker: GrammarChecker) -> None:
        await checker.check(GOOD)
        first = checker.process_id
        with pytest.raises(BadGrammar, match="unclosed group"):
            await checker.check(BAD)
        assert checker.process_id == first
        await checker.close()
        await checker.check(GOOD)
        with pytest.raises(BadGrammar, match="unclosed group"):
            await checker.check(BAD)
        assert checker.process_id is None

    with_checker(script)


def test_special_tokens_are_known_there() -> None:
    async def script(checker: GrammarChecker) -> None:
        await checker.check(StructuredOutputs(grammar='start: "a" <|x|>'))
        with pytest.raises(BadGrammar, match="unknown special token"):
            await checker.check(StructuredOutputs(grammar='start: "a" <|y|>'))

    with_checker(script)


def test_a_timeout_is_refused_and_the_next_check_passes() -> None:
    """A busy machine can exceed the timeout too, so this result is not cached."""

    async def script(checker: GrammarChecker) -> None:
        await checker.check(GOOD)
        checker._timeout_s = 1e-6
        for _ in range(2):
            with pytest.raises(BadGrammar, match=r"longer than 1e-06 s.*simplify"):
                await checker.check(StructuredOutputs(regex="a"))
            assert checker.process_id is None
        assert checker.num_worker_deaths == 2
        checker._timeout_s = 30.0
        await checker.check(StructuredOutputs(regex="b"))
        await checker.check(StructuredOutputs(regex="a"))

    with_checker(script)


def test_exceeded_limits_are_cached() -> None:
    async def script(checker: GrammarChecker) -> None:
        for _ in range(2):
            with pytest.raises(BadGrammar, match=r"more than 0.5 s of processor time.*simplify"):
                await checker.check(HOSTILE["patterns to intersect"])
        assert checker.num_worker_deaths == 1

    with_checker(script)


def test_close_cancels_pending_checks() -> None:
    async def script(checker: GrammarChecker) -> None:
        tasks = [asyncio.create_task(checker.check(StructuredOutputs(regex=pattern))) for pattern in "aab"]
        await asyncio.sleep(0)
        await checker.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineClosed] * 3

    with_checker(script)


def test_a_killed_worker_is_replaced() -> None:
    async def script(checker: GrammarChecker) -> None:
        await checker.check(GOOD)
        first = checker.process_id
        assert first is not None
        os.kill(first, signal.SIGKILL)
        with pytest.raises(BadGrammar, match="ended the check with status -9"):
            await checker.check(StructuredOutputs(regex="a"))
        await checker.check(StructuredOutputs(regex="b"))
        assert checker.process_id not in (None, first)

    with_checker(script)


def test_concurrent_checks_some_cancelled() -> None:
    async def script(checker: GrammarChecker) -> None:
        specs = [StructuredOutputs(regex=f"a{{{number % 10}}}") for number in range(40)]
        tasks = [asyncio.create_task(checker.check(spec)) for spec in specs]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        gone = [index for index, result in enumerate(results) if isinstance(result, asyncio.CancelledError)]
        assert gone == list(range(0, 40, 3))
        assert all(result is None for index, result in enumerate(results) if index % 3)
        await checker.check(specs[0])

    with_checker(script)


def mutual() -> dict:
    names = [f"d{number}" for number in range(100)]
    rules = {name: {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in names]} for name in names}
    return {"$ref": "#/$defs/d0", "$defs": rules}


LONG = r"^(\S+\s+){0,999}\S+(x|\S\s){20,300}$"
HOSTILE = {
    "repeated choice": StructuredOutputs(regex="(a|a)*" * 200 + "{1000}"),
    "nested repetition": StructuredOutputs(regex="((((a{100}){100}){100}){100}){100}"),
    "huge repetition": StructuredOutputs(regex="(x+x+)+y{1000000}"),
    "exponential states": StructuredOutputs(regex="(a|b)*a(a|b){40}"),
    "deep regex": StructuredOutputs(regex="(" * 2000 + "a" + ")" * 2000),
    "unicode classes": StructuredOutputs(regex=r"(\w{1,500}\s\p{L}{500}){20}"),
    "huge enum": StructuredOutputs(json={"enum": [f"value number {number}" for number in range(8000)]}),
    "many properties": StructuredOutputs(
        json={"properties": {f"p{number}": {"type": "string"} for number in range(4000)}}
    ),
    "refs to each other": StructuredOutputs(json=mutual()),
    "crossing allOf": StructuredOutputs(
        json={"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(12)]} for i in range(12)]}
    ),
    "patterns to intersect": StructuredOutputs(
        json={"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}(c|d)*"} for n in range(1, 25)]}
    ),
    "deep lark": StructuredOutputs(grammar="start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "ambiguous lark": StructuredOutputs(grammar="start: a\na: a a | a a a |" + ' "a"'),
    "doubling lark": StructuredOutputs(
        grammar="start: r0\n" + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(60)) + '\nr60: "a"'
    ),
    "doubling terminals": StructuredOutputs(
        grammar="start: R0\n" + "\n".join(f"R{n}: R{n + 1} R{n + 1}" for n in range(60)) + '\nR60: "a"'
    ),
    "repeated lark": StructuredOutputs(grammar='start: ((("a"{1000}){1000}){1000}){1000}'),
    "negated lark": StructuredOutputs(
        grammar="start: A\nA: " + " & ".join(f"~/(.*)a.{{{n}}}b(.*)/" for n in range(20))
    ),
    "string too complex": StructuredOutputs(
        json={
            "type": "object",
            "properties": {"a": {"type": "string", "maxLength": 50_000, "pattern": LONG}},
            "required": ["a"],
        }
    ),
    "long multiple": StructuredOutputs(json={"type": "integer", "multipleOf": 999_999_937}),
    "long bounds": StructuredOutputs(json={"type": "string", "minLength": 100_000, "maxLength": 10_000_000}),
}


REFUSED = {
    "deep regex": "nest",
    "crossing allOf": "too large",
    "patterns to intersect": "processor time",
    "refs to each other": "processor time",
    "deep lark": "too deeply nested",
    "doubling terminals": "too big",
    "long multiple": "fuel",
    "string too complex": "too many expressions",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_or_bounded(name: str) -> None:
    """A grammar that passes can also generate tokens within the limits of a step."""

    async def script(checker: GrammarChecker) -> None:
        (result,) = await asyncio.gather(checker.check(HOSTILE[name]), return_exceptions=True)
        assert result is None or (isinstance(result, BadGrammar) and len(str(result)) < 1000)
        await checker.check(GOOD)
        assert checker.num_worker_deaths <= 1
        if name in REFUSED:
            assert re.search(REFUSED[name], str(result))
        if result is None:
            follow(HOSTILE[name])

    with_checker(script, timeout_s=60.0)


def follow(spec: StructuredOutputs, most: int = 60) -> None:
    """Random tokens, as long as any is allowed."""
    rng = random.Random(0)
    constraint = GrammarBackend(TOKENIZER, TOKENIZER.vocab_size, TOKENIZER.end_token_ids).make_constraint(spec)
    for _ in range(most):
        mask = constraint.allowed()
        choices = [token for token in range(8 * len(mask)) if mask[token >> 3] >> (token & 7) & 1]
        if not choices:
            assert constraint.error
            return
        constraint.advance(rng.choice(choices))
