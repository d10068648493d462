"""Compares two recordings: which answers differ, from which token on, and why.

The reason is looked for in what decides a token, in this order: the prompt, the parameters, the seed, the weights, the
options of the engine, its kernels and machine, and at last the batch, where the kernels round by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.errors import InvalidParams, show
from quire.trace.format import EngineStart
from quire.trace.pairs import deciding_params, is_greedy, pair_requests
from quire.trace.recording import RecordedRequest, Recording

Cause = Literal["prompt", "parameters", "seed", "weights", "config", "kernels", "machine", "batch", "none found"]

# Options of an engine that change the values it computes. Others change steps, and with them nothing but rounding.
DECIDING = ("dtype", "kernels", "weights", "quantize", "kv_dtype", "device", "exact", "exit_head")
IN_MACHINE = ("gpu", "torch")  # what else decides bits
OWN_CPU_KERNELS = "own kernels on a CPU"  # their bits are the same on all machines


@dataclass(frozen=True, slots=True)
class Reason:
    """What differs, and where, in words."""

    cause: Cause
    detail: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a token was computed: its step, and the requests that shared the step."""

    replica: int
    step: int
    batch: list[str]


@dataclass(frozen=True, slots=True)
class Difference:
    """Two answers to what may be the same request. `token` is the first that differs, counted from 0.

    A token is None where its answer has ended before. `reasons`: the first is the one that explains the most.
    """

    first_id: str
    second_id: str
    answer: int  # of a beam search; 0 for others
    token: int
    first_token: int | None
    second_token: int | None
    first_place: Place | None
    second_place: Place | None
    reasons: list[Reason]


@dataclass(slots=True)
class Comparison:
    """What `quire trace diff` prints."""

    num_compared: int = 0
    num_cut: int = 0  # of these, answers that something ended from outside: compared up to there
    num_tokens: int = 0  # that are equal
    differences: list[Difference] = field(default_factory=list)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        return not (self.differences or self.only_first or self.only_second)

    @property
    def causes(self) -> dict[str, int]:
        return dict(Counter(each.reasons[0].cause for each in self.differences))


def compare(first: Recording, second: Recording) -> Comparison:
    for recording in (first, second):
        if recording.header.anonymous:
            raise InvalidParams(
                f"{recording.name} is anonymous: it holds no tokens that could be compared. Record without "
                "--trace-anonymous."
            )
    pairs, only_first, only_second = pair_requests(first, second)
    found = Comparison(only_first=ids(only_first), only_second=ids(only_second))
    shared = engine_reasons(first, second)
    for left, right in pairs:
        found.num_compared += 1
        found.num_cut += left.was_cut or right.was_cut
        place = find_difference(left, right)
        found.num_tokens += sum(map(common_length, left.answers, right.answers))
        if place is not None:
            found.differences.append(describe(first, second, left, right, place, shared))
    return found


def ids(requests: Sequence[RecordedRequest]) -> list[str]:
    return [request.id for request in requests]


def find_difference(left: RecordedRequest, right: RecordedRequest) -> tuple[int, int] | None:
    """The answer and the token at which they differ first."""
    for number, (one, other) in enumerate(zip(left.answers, right.answers, strict=False)):
        at = common_length(one, other)
        ended_early = (at == len(one) and left.was_cut) or (at == len(other) and right.was_cut)
        if at < max(len(one), len(other)) and not ended_early:
            return number, at
    if len(left.answers) != len(right.answers) and not (left.was_cut or right.was_cut):
        return min(len(left.answers), len(right.answers)), 0
    return None


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (first, second) in enumerate(zip(one, other, strict=False)):
        if first != second:
            return index
    return min(len(one), len(other))


def describe(
    first: Recording,
    second: Recording,
    left: RecordedRequest,
    right: RecordedRequest,
    place: tuple[int, int],
    shared: Sequence[Reason],
) -> Difference:
    answer, token = place
    reasons = [*request_reasons(left, right), *shared]
    if not reasons:
        reasons = [rounding_reason(first, second, left, right, token)]
    return Difference(
        left.id, right.id, answer, token, token_at(left, answer, token), token_at(right, answer, token),
        place_of(first, left, token), place_of(second, right, token), reasons,
    )  # fmt: skip


def token_at(request: RecordedRequest, answer: int, token: int) -> int | None:
    answers = request.answers
    return answers[answer][token] if answer < len(answers) and token < len(answers[answer]) else None


def place_of(recording: Recording, request: RecordedRequest, token: int) -> Place | None:
    """None if the recording does not have the step."""
    number = request.token_steps[token] if token < len(request.token_steps) else None
    if number is None:
        return None
    step = recording.steps[number]
    return Place(step.replica, step.step, step.requests)


# ── reasons ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def request_reasons(left: RecordedRequest, right: RecordedRequest) -> list[Reason]:
    """What the callers did differently."""
    reasons = []
    if (detail := prompt_detail(left, right)) is not None:
        reasons.append(Reason("prompt", detail))
    if changed := changed_params(left, right):
        reasons.append(Reason("parameters", ", ".join(changed)))
    if left.seed != right.seed and not (is_greedy(left) and is_greedy(right)):
        reasons.append(Reason("seed", f"{left.seed} and {right.seed}"))
    return reasons


def prompt_detail(left: RecordedRequest, right: RecordedRequest) -> str | None:
    one, other = left.prompt or [], right.prompt or []
    at = common_length(one, other)
    if at == len(one) == len(other):
        return None
    if at in (len(one), len(other)):
        return f"{len(one)} and {len(other)} tokens, the same as far as the shorter one goes"
    return f"token {at} is {one[at]} and {other[at]}"


def changed_params(left: RecordedRequest, right: RecordedRequest) -> list[str]:
    one, other = deciding_params(left), deciding_params(right)
    found = [changed(name, one.get(name), other.get(name)) for name in sorted(one | other)]
    found.append(changed("max_tokens of the engine", left.max_tokens, right.max_tokens) if not any(found) else "")
    found.append(changed("end tokens", sorted(left.end_token_ids), sorted(right.end_token_ids)))
    found.append(changed("tokens of bad words", left.bad_word_ids, right.bad_word_ids))
    return list(filter(None, found))


def changed(name: str, one: Any, other: Any) -> str:
    if one == other:
        return ""
    return f"{name} is {'not set' if one is None else show(one)} and {'not set' if other is None else show(other)}"


def engine_reasons(first: Recording, second: Recording) -> list[Reason]:
    """What differs between the engines, the weights first."""
    one, other = first.engine, second.engine
    reasons = []
    if first.header.digest and second.header.digest and first.header.digest != second.header.digest:
        names = f"{show(first.header.model)} and {show(second.header.model)}, whose files differ"
        reasons.append(Reason("weights", names))
    if one is None or other is None:
        return reasons
    options = [changed(name, one.config.get(name), other.config.get(name)) for name in DECIDING]
    if any(options):
        reasons.append(Reason("config", ", ".join(filter(None, options))))
    if one.kernels != other.kernels or first.header.quire != second.header.quire:
        names = f"{one.kernels} of quire {first.header.quire} and {other.kernels} of quire {second.header.quire}"
        if kernel_family(one) != kernel_family(other) or first.header.quire != second.header.quire:
            reasons.append(Reason("kernels", show(names)))
    machines = [changed(name, one.machine.get(name), other.machine.get(name)) for name in IN_MACHINE]
    if any(machines) and not kernel_family(one) == kernel_family(other) == OWN_CPU_KERNELS:
        reasons.append(Reason("machine", ", ".join(filter(None, machines))))
    return reasons


def kernel_family(engine: EngineStart) -> str:
    """Without the number of threads and the instruction set, by which quire's own CPU kernels do not round."""
    return OWN_CPU_KERNELS if engine.exact and engine.kernels.startswith("own kernels (") else engine.kernels


def rounding_reason(
    first: Recording, second: Recording, left: RecordedRequest, right: RecordedRequest, token: int
) -> Reason:
    """Where the callers and the engines agree."""
    is_exact = all(engine.exact for recording in (first, second) for engine in recording.engines[:1])
    if is_exact and left.params.get("early_exit") is None:
        return Reason("none found", "prompt, parameters, seed, weights and engines agree, and the kernels are exact")
    one, other = place_of(first, left, token), place_of(second, right, token)
    sizes = f"{len(one.batch) if one else '?'} and {len(other.batch) if other else '?'} rows"
    return Reason("batch", f"the kernels round by batch, and {sizes} share the step; --exact does not")
