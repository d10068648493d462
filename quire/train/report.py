"""What a head is worth in the engine: held-out prompts, answered with it and without it.

Counts are taken with every proposed draft verified, so they depend on no clock: they are written into the head's file.
Seconds are taken with the controller as it is, and only shown. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.bench.speculation import Answer, Bench
from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.llm import LLM
from quire.speculative.controller import Controller
from quire.speculative.step_times import StepTimes
from quire.train.dialogues import Dialogue

NUM_PROMPTS = 16
OUTPUT_TOKENS = 64
FREE_DRAFTS = 12.0
PAYS = 1.05  # times plain decoding
METHODS = {"block": "block", "medusa": "medusa", "eagle": "eagle", "exit": "self"}  # of `--speculate`, by kind


class EqualTimes(StepTimes):
    """Steps take the same time with any number of drafts, so all that are proposed are verified."""

    def learn(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        pass

    def plain_s(self, num_rows: int) -> float | None:
        return 1.0

    def ratios(self, num_rows: int, max_drafts: int) -> list[float]:
        return [1.0] * (max_drafts + 1)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of the engine, greedy, one request at a time."""

    num_prompts: int
    num_tokens: int
    tokens_per_step: float  # with all drafts verified
    drafted: int
    accepted: int
    different: int  # answers that differ from plain decoding: 0 with exact kernels
    speedup: float  # times plain decoding, drafts chosen by the controller


def measure_engine(config: EngineConfig, speculate: str, dialogues: Sequence[Dialogue]) -> Measured:
    """The held-out prompts that leave room for an answer, at most NUM_PROMPTS."""
    options = {**asdict(config), "speculate": speculate, "prefix_cache": False, "max_requests": 1}
    with LLM(**options) as llm:
        engine, room = llm._client.engine, llm.info.max_len - OUTPUT_TOKENS
        prompts = [each for each in dialogues if each.num_prompt <= room][:NUM_PROMPTS]
        kept = engine.controller
        assert kept is not None
        bench = Bench(llm)
        pairs = [bench.compare(lambda each=each: [make_request(llm, each)]) for each in prompts]  # type: ignore[misc]
        controller = Controller(
            [], engine.scheduler.max_tokens_per_step, llm.info.config.vocab_size, FREE_DRAFTS, kept.models
        )
        controller.times, controller._clock = EqualTimes(FREE_DRAFTS), lambda: 0.0
        counted = [bench.answer([make_request(llm, each)], controller) for each in prompts]
    return summarize(pairs, counted)


def make_request(llm: LLM, dialogue: Dialogue) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)
    return Request(
        "held-out",
        dialogue.tokens[: dialogue.num_prompt].tolist(),
        params,
        max_tokens=OUTPUT_TOKENS,
        end_token_ids=llm._input_processor.end_token_ids,
    )


def summarize(pairs: Sequence[tuple[Answer, Answer]], counted: Sequence[Answer]) -> Measured:
    num_tokens = sum(len(tokens) - 1 for answer in counted for tokens in answer.tokens)
    return Measured(
        num_prompts=len(counted),
        num_tokens=num_tokens,
        tokens_per_step=num_tokens / max(1, sum(answer.num_steps for answer in counted)),
        drafted=sum(answer.drafted for answer in counted),
        accepted=sum(answer.accepted for answer in counted),
        different=sum(
            plain.tokens != each.tokens or plain.tokens != other.tokens
            for (plain, other), each in zip(pairs, counted, strict=True)
        ),
        speedup=sum(plain.seconds for plain, _ in pairs) / max(1e-9, sum(other.seconds for _, other in pairs)),
    )


def describe_counts(measured: Measured) -> dict[str, Any]:
    """Without seconds: they would make two equal runs write different files."""
    return {
        "num_prompts": measured.num_prompts,
        "num_tokens": measured.num_tokens,
        "tokens_per_step": round(measured.tokens_per_step, 4),
        "drafted": measured.drafted,
        "accepted": measured.accepted,
    }


def judge(measured: Measured) -> str:
    """Whether the head pays, in a sentence."""
    times = f"{measured.speedup:.2f} times plain decoding"
    if measured.speedup >= PAYS:
        return f"It pays: {times} on prompts that it has not seen, one at a time."
    return (
        f"It does not pay: {times} on prompts that it has not seen, one at a time. Train with more tokens, or leave "
        "it out."
    )
