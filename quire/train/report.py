"""What a head is worth in the engine: held-out prompts, answered plainly, with drafts as without the head, and with it.

Counts are taken with the head alone and every likely draft verified, so they depend on no clock: they are written into
the head's file. Seconds are taken with the controller as it is, and only shown. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.bench.speculation import Answer, Bench
from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.speculation import FREE_DRAFTS, MAX_DRAFTS
from quire.errors import EngineError
from quire.llm import LLM
from quire.speculative.controller import Controller
from quire.speculative.step_times import EqualTimes
from quire.speculative.suffix import SuffixProposer
from quire.train.dialogues import Dialogue

NUM_PROMPTS = 16
OUTPUT_TOKENS = 64
PAYS = 1.03  # times the speed without the head
METHODS = {"block": "block", "medusa": "medusa", "eagle": "eagle", "exit": "self"}  # of `--speculate`, by kind


@dataclass(frozen=True, slots=True)
class Measured:
    """Of the engine, greedy, one request at a time."""

    num_prompts: int
    num_tokens: int
    tokens_per_step: float  # with all drafts verified
    drafted: int
    accepted: int
    different: int  # answers that differ from plain decoding: 0 with exact kernels
    speedup: float  # times plain decoding, drafts of all proposers chosen by the controller
    speedup_without: float  # the same without the head


def measure_engine(config: EngineConfig, speculate: str, dialogues: Sequence[Dialogue]) -> Measured:
    """The held-out prompts that leave room for an answer, at most NUM_PROMPTS."""
    options = {**asdict(config), "speculate": speculate, "prefix_cache": False, "max_requests": 1}
    with LLM(**options) as llm:
        whole = llm._client.engine.controller
        assert whole is not None
        bench, room = Bench(llm), llm.info.max_len - OUTPUT_TOKENS
        without, alone = make_controller(llm, whole, has_head=False), make_controller(llm, whole, has_head=True)
        alone.times, alone._clock = EqualTimes(FREE_DRAFTS[llm.info.device]), lambda: 0.0
        controllers: list[Controller | None] = [None, without, whole]
        rows: list[list[Answer]] = []
        for nth, each in enumerate([each for each in dialogues if each.num_prompt <= room][:NUM_PROMPTS]):
            order = [(nth + index) % 3 for index in range(3)]  # who is first changes, so all see the same machine
            answers = {which: bench.answer([make_request(llm, each)], controllers[which]) for which in order}
            counted = bench.answer([make_request(llm, each)], alone)
            rows.append([answers[0], answers[1], answers[2], counted])
    return check_answers(summarize(rows))


def check_answers(measured: Measured) -> Measured:
    """With quire's own kernels drafts change no answer. If they do, the engine has a fault, and no number counts."""
    if measured.different:
        raise EngineError(
            f"{measured.different} of {measured.num_prompts} answers with the head differ from those without it. The "
            "head is written, but do not use it; report this."
        )
    return measured


def make_controller(llm: LLM, whole: Controller, *, has_head: bool) -> Controller:
    """With the head alone, or without it and all else."""
    max_tokens, vocab_size = llm._client.engine.scheduler.max_tokens_per_step, llm.info.config.vocab_size
    free_drafts, max_drafts = FREE_DRAFTS[llm.info.device], MAX_DRAFTS[llm.info.device]
    if has_head:
        return Controller([], max_tokens, vocab_size, free_drafts, whole.models, max_drafts=max_drafts)
    return Controller([SuffixProposer()], max_tokens, vocab_size, free_drafts, max_drafts=max_drafts)


def make_request(llm: LLM, dialogue: Dialogue) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)
    return Request(
        "held-out",
        dialogue.tokens[: dialogue.num_prompt].tolist(),
        params,
        max_tokens=OUTPUT_TOKENS,
        end_token_ids=llm._input_processor.end_token_ids,
    )


def summarize(rows: Sequence[Sequence[Answer]]) -> Measured:
    """Each row: plain, without the head, with it, and counted."""
    counted = [row[3] for row in rows]
    num_tokens = sum(len(tokens) - 1 for answer in counted for tokens in answer.tokens)
    plain_s, without_s, whole_s = (sum(row[which].seconds for row in rows) for which in range(3))
    return Measured(
        num_prompts=len(rows),
        num_tokens=num_tokens,
        tokens_per_step=num_tokens / max(1, sum(answer.num_steps for answer in counted)),
        drafted=sum(answer.drafted for answer in counted),
        accepted=sum(answer.accepted for answer in counted),
        different=sum(any(answer.tokens != row[0].tokens for answer in row) for row in rows),
        speedup=plain_s / max(1e-9, whole_s),
        speedup_without=plain_s / max(1e-9, without_s),
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
    numbers = (
        f"{measured.speedup:.2f} times plain decoding with it and {measured.speedup_without:.2f} times without it, on "
        "prompts that it has not seen, one at a time"
    )
    if measured.speedup >= PAYS * measured.speedup_without:
        return f"It pays: {numbers}."
    return f"It does not pay: {numbers}. Train with more tokens, or leave it out."
