"""Tests every JSON schema of a directory with a model: whether it compiles, and whether the model's answer validates.

    python benchmarks/schemas.py DIR [--model smollm2:135m] [--max-tokens 256] [--limit N] [--json]

DIR holds .jsonl files of {"id", "schema"}. Each schema is checked in the worker process, as in the server. If it
passes, the model generates an answer, and jsonschema validates it. An answer that --max-tokens has cut off cannot
validate. It is generated once more with a bias towards tokens that close strings, lists and objects, because a small
model rarely closes them. If that is cut off too, it is counted separately.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import re
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
from referencing.exceptions import Unresolvable

from quire import LLM, SamplingParams
from quire.core.params import StructuredOutputs
from quire.errors import BadGrammar
from quire.text.grammar.checker import GrammarChecker
from quire.text.tokenizers.tokenizer import Tokenizer

PROMPT = "A short example, as JSON:\n"
AT_ONCE = 64
STUCK_S = 600.0  # a batch that takes longer than this is stuck: the script ends with a traceback
OUTCOMES = ("valid", "cut", "refused", "unchecked", "invalid", "failed", "hung", "crashed")


@dataclass(slots=True)
class Case:
    id: str
    schema: dict[str, Any]
    outcome: str = ""
    reason: str = ""
    compile_ms: float = 0.0
    num_tokens: int = 0


def read_cases(directory: Path, limit: int | None) -> list[Case]:
    lines = [line for file in sorted(directory.glob("*.jsonl")) for line in file.read_text().splitlines()]
    return [Case(entry["id"], entry["schema"]) for entry in map(json.loads, lines[:limit])]


async def try_out(cases: list[Case], checker: GrammarChecker) -> None:
    """Set the outcome of schemas that do not pass."""
    await checker.check(StructuredOutputs(json=True))
    for case in cases:
        begin = time.perf_counter()
        num_worker_deaths = checker.num_worker_deaths
        try:
            await checker.check(StructuredOutputs(json=case.schema))
        except BadGrammar as error:
            case.outcome, case.reason = "refused", str(error)
            if checker.num_worker_deaths > num_worker_deaths:
                case.outcome = "hung" if "took longer" in case.reason else "crashed"
        case.compile_ms = 1000 * (time.perf_counter() - begin)
    await checker.close()


def closing_bias(tokenizer: Tokenizer) -> dict[int, float]:
    """Quotes get more, because a bracket inside a string closes nothing."""
    pieces = {token: tokenizer.pieces[token] for token in range(tokenizer.vocab_size)}
    closing = {token: piece for token, piece in pieces.items() if re.fullmatch(rb'["\]}]+', piece)}
    return {token: 12.0 if piece.startswith(b'"') else 6.0 for token, piece in closing.items()}


def answer(llm: LLM, cases: list[Case], max_tokens: int, bias: dict[int, float] | None = None) -> None:
    for begin in range(0, len(cases), AT_ONCE):
        batch = cases[begin : begin + AT_ONCE]
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        params = [
            SamplingParams(
                temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=len(case.id), max_tokens=max_tokens,
                logit_bias=bias, structured_outputs=StructuredOutputs(json=case.schema),
            )
            for case in batch
        ]  # fmt: skip
        for case, out in zip(batch, llm.generate([PROMPT] * len(batch), params, use_tqdm=False), strict=True):
            judge(case, out.outputs[0])
        faulthandler.cancel_dump_traceback_later()
        print(f"{begin + len(batch)} of {len(cases)} answered", file=sys.stderr)


def judge(case: Case, answer: Any) -> None:
    case.num_tokens += len(answer.token_ids)
    if answer.finish_reason == "length":
        case.outcome = "cut"
    elif answer.finish_reason != "stop":
        case.outcome, case.reason = "failed", answer.error or answer.finish_reason
    else:
        case.outcome, case.reason = validate(case.schema, answer.text)


def validate(schema: dict[str, Any], text: str) -> tuple[str, str]:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
        kind(schema).validate(json.loads(text))
    except jsonschema.ValidationError as error:
        return "invalid", f"{text!r}: {error.message}"
    except ValueError as error:
        return "invalid", f"{text!r}: {error}"
    except (jsonschema.SchemaError, Unresolvable, re.error) as error:
        return "unchecked", f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "valid", ""


def kind_of(reason: str) -> str:
    """A reason without the parts that are specific to a schema."""
    reason = reason.removeprefix("The schema or grammar cannot be followed: ")
    return re.sub(r"'[^']*'|\d+", "…", reason)[:100]


def report(cases: list[Case]) -> dict[str, Any]:
    times = sorted(case.compile_ms for case in cases)
    counts = Counter(case.outcome for case in cases)
    refused = Counter(kind_of(case.reason) for case in cases if case.outcome == "refused")
    bad = [case for case in cases if case.outcome in ("invalid", "failed", "hung", "crashed", "unchecked")]
    return {
        "schemas": len(cases),
        "outcomes": {name: counts[name] for name in OUTCOMES},
        "refused": dict(refused.most_common()),
        "compile_ms": {
            "p50": round(statistics.median(times), 2),
            "p99": round(times[int(0.99 * (len(times) - 1))], 2),
            "max": round(times[-1], 2),
        },
        "tokens": sum(case.num_tokens for case in cases),
        "bad": [{"id": case.id, "outcome": case.outcome, "reason": case.reason[:500]} for case in bad],
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['schemas']} schemas:", ", ".join(f"{name} {n}" for name, n in result["outcomes"].items()))
    print("compiled in", ", ".join(f"{name} {ms} ms" for name, ms in result["compile_ms"].items()))
    print(f"{result['tokens']} tokens in {result['answer_s']} s; {result['tried_twice']} were tried twice")
    for reason, count in result["refused"].items():
        print(f"  refused {count:>4}: {reason}")
    for case in result["bad"]:
        print(f"  {case['outcome']}: {case['id']}: {case['reason']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = read_cases(options.directory, options.limit)
    with LLM(options.model, max_requests=AT_ONCE, max_len=2048) as llm:
        tokenizer = llm.get_tokenizer()
        ends = tokenizer.end_token_ids | frozenset(llm.info.config.eos_token_ids)
        asyncio.run(try_out(cases, GrammarChecker(tokenizer, llm.info.config.vocab_size, ends)))
        begin = time.perf_counter()
        answer(llm, [case for case in cases if not case.outcome], options.max_tokens)
        cut = [case for case in cases if case.outcome == "cut"]
        answer(llm, cut, options.max_tokens, closing_bias(tokenizer))
        result = report(cases) | {"tried_twice": len(cut), "answer_s": round(time.perf_counter() - begin, 1)}
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
