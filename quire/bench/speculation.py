"""`quire bench speculation`: real prompts, answered with and without speculation in turns, on one engine.

Each prompt is answered twice in a row, and which way comes first alternates, so that both see the same machine. The
answers must be equal. Speeds are those of decoding: from the first token of an answer to its last.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.plan import Plan
from quire.core.request import Request
from quire.engine.machine import machine
from quire.engine.observer import PlanObserver
from quire.errors import InvalidParams
from quire.llm import LLM
from quire.speculative.controller import Controller

PROMPTS = {
    "chat": [
        "What should I look at when I buy a used bicycle?",
        "Explain to a child why the sky is blue, in a few sentences.",
        "Write a short letter to my landlord. The heating in my flat has not worked since Monday.",
    ],
    "code": [
        "Write a Python class `Stack` with the methods push, pop, peek, is_empty and size, each with a docstring.",
        "Rename the variable `x` to `count` in this code and give back the whole code:\n\nx = 0\nfor line in lines:\n"
        "    if line.strip():\n        x = x + 1\n        print('line', x, line)\nprint('there were', x, 'lines')\n",
        "Write SQL that creates the tables customers, orders and order_items, with keys between them.",
    ],
    "summary": [
        "Summarize this text in three sentences.\n\nThe harbour of the town was built in 1871 for ships that carried "
        "slate from the quarries in the hills. A railway brought the slate down to the harbour. When roofs were "
        "covered with tiles instead, the quarries closed one after the other, and in 1946 the railway was closed "
        "too. Volunteers opened it again in 1954, first for one mile and later for the whole line. Today the railway "
        "carries visitors from the harbour to the quarries, and the harbour has more sailing boats than it ever had "
        "ships.",
        "Which of these statements are about money? Repeat them word for word.\n\n1. The library opens at nine.\n2. "
        "The museum costs four euros for adults and two for children.\n3. Dogs are not allowed on the beach.\n4. The "
        "ferry takes bicycles for one euro each.\n5. The market is on Saturdays.\n6. Parking is free after six.",
    ],
    "math": [
        "A baker sells 45 loaves in the morning and a third of that in the afternoon. A loaf costs 3 euros. How much "
        "does she earn in a day, and how much in a week of six days? Show each step.",
        "List the numbers from 1 to 20 with their squares, one per line, in the form: 1 squared is 1.",
    ],
}  # fmt: skip

WARMUP = "Describe a lighthouse."  # none of the prompts: its answer would be a source of drafts for itself


@dataclass(frozen=True, slots=True)
class Result:
    """One kind of prompts. Speeds are in tokens a second, the speed-up is that of the whole kind."""

    kind: str
    num_prompts: int
    plain_tokens_per_s: float
    tokens_per_s: float
    speedup: float
    worst: float  # the smallest speed-up of one prompt
    tokens_per_step: float
    drafted: int
    accepted: int
    different: int  # answers that differ: always 0 with exact kernels


@dataclass(slots=True)
class Answer:
    tokens: list[list[int]]
    seconds: float  # of decoding
    num_steps: int
    drafted: int = 0
    accepted: int = 0


def run(
    config: EngineConfig,
    prompts: Path | None,
    *,
    max_prompts: int | None,
    batch: int,
    output_tokens: int,
    temperature: float,
    report: Callable[[int, int | None], None] | None = None,
) -> dict[str, Any]:
    if batch < 1 or output_tokens < 2:
        raise InvalidParams("Give a batch from 1 and output tokens from 2.")
    by_kind = PROMPTS if prompts is None else read_prompts(prompts)
    if max_prompts is not None:
        by_kind = {kind: texts[:max_prompts] for kind, texts in by_kind.items()}
    llm = LLM(**{**asdict(config), "max_requests": max(batch, config.max_requests or 1), "prefix_cache": False})
    bench, params = Bench(llm), SamplingParams(temperature=temperature, max_tokens=output_tokens, seed=0)
    groups = [(kind, texts[at : at + batch]) for kind, texts in by_kind.items() for at in range(0, len(texts), batch)]
    for _ in range(2):
        bench.compare(partial(make_requests, llm, [WARMUP] * batch, params))
        while llm._client.engine.idle():  # a GPU captures the steps that were missed
            pass
    results: dict[str, list[tuple[Answer, Answer]]] = defaultdict(list)
    for number, (kind, texts) in enumerate(groups):
        if report:
            report(number, len(groups))
        results[kind].append(bench.compare(partial(make_requests, llm, texts, params)))
    every = [pair for pairs in results.values() for pair in pairs]
    rows = [summarize(kind, batch, pairs) for kind, pairs in {**results, "all": every}.items()]
    return {
        "machine": machine(config),
        "model": config.model,
        "engine": llm.info.summary,
        "speculate": config.speculate,
        "batch": batch,
        "temperature": temperature,
        "rows": [asdict(row) for row in rows],
    }


class Bench:
    """Answers requests twice: plainly and with speculation."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm._client.engine
        self._controller = self._engine.controller
        if self._controller is None:
            raise InvalidParams("Speculation is off with these options; there is nothing to compare.", "speculate")
        self._plain_first = True

    def compare(self, make_requests: Callable[[], list[Request]]) -> tuple[Answer, Answer]:
        """(plain, speculative). `make_requests` is called once for each; which way comes first alternates."""
        self._plain_first = not self._plain_first
        if self._plain_first:
            plain = self.answer(make_requests(), None)
            return plain, self.answer(make_requests(), self._controller)
        speculative = self.answer(make_requests(), self._controller)
        return self.answer(make_requests(), None), speculative

    def answer(self, requests: list[Request], controller: Controller | None) -> Answer:
        """Answer requests that start together, with the drafts that the controller chooses, or plainly."""
        engine = self._engine
        engine.controller = controller
        for request in requests:
            engine.add(request)
        while any(not request.num_output for request in requests) and engine.has_work:
            engine.step()
        begin, plans = time.perf_counter(), list[Plan]()
        engine.observers.append(PlanObserver(plans.append))  # a call of `step` may only wait
        while engine.has_work:
            engine.step()
        engine.observers.pop()
        seconds, num_steps = time.perf_counter() - begin, len(plans)
        drafted, accepted = (sum(getattr(each, name) for each in requests) for name in ("num_drafted", "num_accepted"))
        return Answer([each.tokens[each.num_prompt :] for each in requests], seconds, num_steps, drafted, accepted)


def make_requests(llm: LLM, texts: Sequence[str], params: SamplingParams) -> list[Request]:
    ends, most = llm._input_processor.end_token_ids, params.max_tokens or 1
    return [
        Request(f"{number}", encode(llm, text), params, seed=number, max_tokens=most, end_token_ids=ends)
        for number, text in enumerate(texts)
    ]


def encode(llm: LLM, text: str) -> list[int]:
    """As a conversation, if the model has a chat template."""
    tokenizer = llm.get_tokenizer()
    if not tokenizer.chat_template:
        return tokenizer.encode(text)
    return list(llm.render([{"role": "user", "content": text}])["prompt_token_ids"])


def summarize(kind: str, batch: int, pairs: Sequence[tuple[Answer, Answer]]) -> Result:
    num_tokens = sum(sum(map(len, plain.tokens)) - len(plain.tokens) for plain, _ in pairs)
    plain_s, seconds = sum(plain.seconds for plain, _ in pairs), sum(other.seconds for _, other in pairs)
    num_steps = sum(other.num_steps for _, other in pairs)
    different = sum(one != two for plain, other in pairs for one, two in zip(plain.tokens, other.tokens, strict=True))
    return Result(
        kind,
        sum(len(plain.tokens) for plain, _ in pairs),
        num_tokens / plain_s,
        num_tokens / seconds,
        plain_s / seconds,
        min(plain.seconds / other.seconds for plain, other in pairs),
        num_tokens / max(1, num_steps) / batch,
        sum(other.drafted for _, other in pairs),
        sum(other.accepted for _, other in pairs),
        different,
    )


def read_prompts(path: Path) -> dict[str, list[str]]:
    """JSON lines: {"prompt": ...} or {"turns": [...]}, each with an optional "category"."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            text = entry["prompt"] if "prompt" in entry else entry["turns"][0]
            by_kind[str(entry.get("category", "prompts"))].append(str(text))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise InvalidParams(
                f'{path}, line {number}, is no prompt; give {{"prompt": "..."}} or {{"turns": ["..."]}}.'
            ) from error
    if not by_kind:
        raise InvalidParams(f"{path} has no prompts.")
    return dict(by_kind)
