"""Speculation on structured output: JSON schemas are answered with and without it, in turns, on one engine.

    python benchmarks/schemas_speculation.py DIR [--limit 200] [--max-tokens 256] [--with-schema] [--json]

DIR is that of `schemas.py`. Schemas are taken evenly from all of its files. Those that quire refuses are left out. Each
request has a seed of its own. Both answers must be equal, and jsonschema validates them unless --max-tokens cuts them
off. Speeds are those of decoding, with all work on the grammar in it. --with-schema puts the schema into the prompt, as
most clients do; without it the prompt is that of `schemas.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from arguments import count
from schemas import PROMPT, Case, read_cases, validate

from quire import LLM, SamplingParams
from quire.bench.speculation import Answer, Bench, encode, summarize
from quire.core.params import StructuredOutputs
from quire.core.request import Request
from quire.errors import BadGrammar

WARMUP = Case("warm-up", {"type": "array", "items": {"type": "integer"}, "minItems": 30, "maxItems": 40})
MAX_PROMPT = 1500  # tokens; of a longer prompt the last ones are kept


def spread_cases(directory: Path, limit: int) -> list[Case]:
    cases = read_cases(directory, None)
    if limit >= len(cases):
        return cases
    return [cases[index * len(cases) // limit] for index in range(limit)]


def make_request(llm: LLM, case: Case, options: argparse.Namespace) -> list[Request]:
    params = SamplingParams(
        temperature=options.temperature, top_p=0.9, repetition_penalty=options.repetition_penalty,
        max_tokens=options.max_tokens, seed=crc32(case.id.encode()),
        structured_outputs=StructuredOutputs(json=case.schema),
    )  # fmt: skip
    text: Any = PROMPT
    if options.with_schema:
        asked = f"Give me a short example. Answer with JSON that fits this schema:\n{json.dumps(case.schema)}"
        text = {"prompt_token_ids": encode(llm, asked)[-MAX_PROMPT:]}
    return list(llm._input_processor.process(text, params).requests)


def judge(llm: LLM, case: Case, answer: Answer) -> str:
    (tokens,) = answer.tokens
    ends = llm._input_processor.end_token_ids
    if tokens[-1] not in ends:
        return "cut"
    text = llm.get_tokenizer().decode([token for token in tokens if token not in ends])
    outcome, case.reason = validate(case.schema, text)
    return outcome


def run(llm: LLM, cases: Sequence[Case], options: argparse.Namespace) -> dict[str, Any]:
    bench, pairs, outcomes = Bench(llm), [], Counter[str]()
    controller = llm._client.engine.controller
    assert controller is not None
    bench.compare(partial(make_request, llm, WARMUP, options))
    for case in cases:
        try:
            make_request(llm, case, options)
        except BadGrammar:
            outcomes["refused"] += 1
            continue
        pair = bench.compare(partial(make_request, llm, case, options))
        pairs.append(pair)
        outcomes[judge(llm, case, pair[1])] += 1
        if case.reason:
            print(f"{case.id}: {case.reason[:300]}", file=sys.stderr)
    result = asdict(summarize("schemas", 1, pairs))
    speedups = sorted(plain.seconds / other.seconds for plain, other in pairs)
    return {
        **result,
        "median": statistics.median(speedups),
        "outcomes": dict(outcomes),
        "by_proposer": {
            name: {"drafted": controller.drafted[name], "accepted": controller.accepted[name]}
            for name in controller.drafted
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--limit", type=count, default=200, help="schemas; default %(default)s")
    parser.add_argument("--max-tokens", type=count, default=256)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--with-schema", action="store_true", help="put the schema into the prompt")
    parser.add_argument("--speculate", default="auto", metavar="METHODS")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = spread_cases(options.directory, options.limit)
    with LLM(options.model, max_requests=1, max_len=2048, prefix_cache=False, speculate=options.speculate) as llm:
        result = run(llm, cases, options)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['num_prompts']} schemas: {result['plain_tokens_per_s']:.0f} -> {result['tokens_per_s']:.0f} tok/s, "
          f"{result['speedup']:.2f} times; median {result['median']:.2f}, worst {result['worst']:.2f}")  # fmt: skip
    print(f"{result['tokens_per_step']:.2f} tokens a step; {result['different']} answers differ; "
          f"{', '.join(f'{name} {n}' for name, n in result['outcomes'].items())}")  # fmt: skip
    for name, drafts in result["by_proposer"].items():
        print(f"  {name}: {drafts['accepted']} of {drafts['drafted']} drafts accepted")


if __name__ == "__main__":
    main()
