"""Where two recordings differ, and the reason."""

from __future__ import annotations

import random

import pytest

from quire.errors import InvalidParams
from quire.trace.diff import Place, compare
from quire.trace.format import Arrival, End
from quire.trace.pairs import pair_requests
from quire.trace.recording import Recording
from tests.tools.recordings import ANSWER, PROMPT, answer, arrival, engine, header, recording

pytestmark = pytest.mark.core

OTHER = [7, 8, 99, 10]
DIFFERENT_PROMPT = [*PROMPT[:21], 5, *PROMPT[22:]]


def one_difference(first: Recording, second: Recording):
    found = compare(first, second)
    assert not found.identical
    (difference,) = found.differences
    return difference


def changed(head=None, started=None, tokens=OTHER, **request) -> Recording:
    return recording(arrival(**request), *answer(tokens=tokens, first_step=11), head=head, started=started)


BASE = recording(arrival(), *answer())
REASONS = {
    "prompt": (changed(prompt=DIFFERENT_PROMPT), "token 21 is 121 and 5"),
    "parameters": (changed(params={"temperature": 0.6, "max_tokens": 4}), "temperature is 0.5 and 0.6"),
    "seed": (changed(seed=2), "1 and 2"),
    "weights": (changed(header(digest="e", model="n")), '"m" and "n", whose files differ'),
    "config": (
        changed(started=engine(config={"model": "m", "quantize": "int8", "kv_dtype": "auto"})),
        'quantize is "none" and "int8"',
    ),
    "kernels": (changed(started=engine(kernels="torch in float32 on cpu", exact=False)), "torch in float32 on cpu"),
    "none found": (changed(), "agree"),
}


class TestReasons:
    @pytest.mark.parametrize("cause", REASONS)
    def test_each_is_found(self, cause):
        second, detail = REASONS[cause]
        difference = one_difference(BASE, second)
        assert difference.reasons[0].cause == cause
        assert detail in difference.reasons[0].detail
        assert len(difference.reasons) == 1

    def test_the_token_its_step_and_its_batch(self):
        difference = one_difference(BASE, REASONS["seed"][0])
        assert (difference.token, difference.first_token, difference.second_token) == (2, 9, 99)
        assert difference.first_place == Place(0, 3, ["0", "other"])
        assert difference.second_place == Place(0, 13, ["0", "other"])

    def test_kernels_that_round_by_batch(self):
        def rounding(tokens):
            return changed(started=engine(kernels="torch in float32 on cpu", exact=False), tokens=tokens)

        difference = one_difference(rounding(ANSWER), rounding(OTHER))
        assert difference.reasons[0].cause == "batch"
        assert "2 and 2 rows" in difference.reasons[0].detail

    def test_another_gpu(self):
        def on_gpu(name, tokens):
            started = engine(kernels="own kernels in bfloat16 on cuda", exact=True, machine={"gpu": name})
            return changed(started=started, tokens=tokens)

        (reason,) = one_difference(on_gpu("H100", ANSWER), on_gpu("H200", OTHER)).reasons
        assert (reason.cause, reason.detail) == ("machine", 'gpu is "H100" and "H200"')

    def test_another_torch_beside_kernels_that_do_not_use_it(self):
        second = changed(started=engine(machine={"torch": "2.10"}))
        assert one_difference(BASE, second).reasons[0].cause == "none found"

    def test_threads_and_instruction_sets_do_not_round(self):
        second = changed(started=engine(kernels="own kernels (avx512) on 2 threads", exact=True))
        assert one_difference(BASE, second).reasons[0].cause == "none found"

    def test_what_differs_besides_comes_after(self):
        second = changed(header(digest="e"), engine(kernels="torch", machine={"gpu": "H200"}), seed=3)
        causes = [reason.cause for reason in one_difference(BASE, second).reasons]
        assert causes == ["seed", "weights", "kernels", "machine"]

    def test_the_seed_of_a_greedy_request_is_no_reason(self):
        params = {"temperature": 0.0}
        first = recording(arrival(params=params), *answer())
        assert one_difference(first, changed(seed=2, params=params)).reasons[0].cause == "none found"

    def test_what_is_only_reported_is_no_reason(self):
        params = {"temperature": 0.5, "max_tokens": 4, "logprobs": 3}
        assert one_difference(BASE, changed(params=params)).reasons[0].cause == "none found"


class TestAnswers:
    def test_equal_ones(self):
        found = compare(BASE, recording(arrival("9", at=3.0), *answer("9", first_step=5)))
        assert found.identical
        assert (found.num_compared, found.num_tokens) == (1, 4)

    def test_one_that_ends_before_the_other(self):
        difference = one_difference(BASE, changed(tokens=ANSWER[:3]))
        assert (difference.token, difference.first_token, difference.second_token) == (3, 10, None)
        assert difference.second_place is None

    @pytest.mark.parametrize("finish", ["abort", "error"])
    def test_one_that_was_ended_from_outside_says_nothing_about_the_rest(self, finish):
        cut = recording(arrival(), *answer(tokens=ANSWER[:2], finish=finish))
        assert compare(BASE, cut).identical
        assert compare(cut, BASE).num_cut == 1
        assert not compare(cut, changed(tokens=[7, 99, 9, 10])).identical

    def test_beams(self):
        def searched(*beams):
            params = {"use_beam_search": True, "temperature": 0.0, "n": 2}
            return recording(arrival(params=params), End(id="0", at=2.0, finish="stop", beams=list(beams)))

        assert compare(searched([1, 2], [1, 3]), searched([1, 2], [1, 3])).identical
        difference = one_difference(searched([1, 2], [1, 3]), searched([1, 2], [1, 4]))
        assert (difference.answer, difference.token, difference.first_token) == (1, 1, 3)
        assert not compare(searched([1, 2], [1, 3]), searched([1, 2])).identical

    def test_a_request_that_only_one_has(self):
        found = compare(BASE, recording(arrival(), *answer(), arrival("1", prompt=[1, 2]), *answer("1")))
        assert found.only_second == ["1"]
        assert not found.identical

    def test_an_anonymous_one_has_nothing_to_compare(self):
        with pytest.raises(InvalidParams, match="made is anonymous"):
            compare(BASE, recording(head=header(anonymous=True)))


def many(count: int, **changes: dict[int, dict[str, object]]) -> list[Arrival]:
    rng = random.Random(4)
    made = []
    for number in range(count):
        prompt = [rng.randrange(50_000) for _ in range(20)] if number % 4 else PROMPT  # some have the same prompt
        line = arrival(str(number), prompt=prompt, seed=number, at=number / 10)
        for name, value in changes.get(f"r{number}", {}).items():
            setattr(line, name, value)
        made.append(line)
    return made


class TestPairs:
    def test_requests_that_arrive_in_another_order(self):
        shuffled = many(40)
        random.Random(1).shuffle(shuffled)
        for number, line in enumerate(shuffled):
            line.id = str(number)
        pairs, left, right = pair_requests(recording(*many(40)), recording(*shuffled))
        assert not left
        assert not right
        assert [first.seed for first, _ in pairs] == list(range(40))
        assert all(first.seed == second.seed and first.prompt == second.prompt for first, second in pairs)

    def test_seeds_that_all_changed(self):
        """Some have the same prompt, so their ids decide."""
        changed = {f"r{number}": {"seed": 5_000 + number} for number in range(40)}
        pairs, _, _ = pair_requests(recording(*many(40)), recording(*many(40, **changed)[::-1]))
        assert len(pairs) == 40
        assert all(first.id == second.id for first, second in pairs)

    @pytest.mark.parametrize("change", [{"seed": 999}, {"prompt": DIFFERENT_PROMPT}, {"params": {"top_k": 3}}])
    def test_the_one_that_was_changed_meets_its_counterpart(self, change):
        pairs, _, _ = pair_requests(recording(*many(40)), recording(*many(40, r17=change)))
        assert all(first.id == second.id for first, second in pairs)
        assert len(pairs) == 40
