"""Recordings for other tools: the Trace Event Format, and Mooncake's lines."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from quire.bench.serve.traces import read_trace
from quire.bench.simulate import arrivals as simulated_arrivals
from quire.trace.chrome import choose_lanes, chrome_document, make_span
from quire.trace.format import Close, Restart, Step
from quire.trace.mooncake import mooncake_lines
from quire.trace.recording import Recording
from quire.trace.summary import step_kind, summarize
from tests.tools.recordings import answer, arrival, engine, header, recording, write

pytestmark = pytest.mark.core

LONG = list(range(1200))


def busy() -> Recording:
    """Two replicas, plans that overlap, a request that never runs, one without an end, a restart."""
    step = {"requests": ["0", "1"], "starts": [0, 0], "counts": [40, 30], "yields": [1, 0]}
    return recording(
        arrival("0", at=0.1),
        arrival("1", at=0.15, prompt=LONG),
        arrival("2", at=0.2),
        arrival("3", at=0.3, replica=1),
        Step(step=1, at=0.4, done=0.6, tokens={"0": [7]}, **step),
        Step(step=2, at=0.45, done=0.7, drafts={0: 2}, requests=["0"], starts=[40], counts=[3], yields=[3]),
        Step(step=1, at=0.45, done=0.5, replica=1, requests=["3"], starts=[0], counts=[40], yields=[1],
             tokens={"3": [7]}),
        *answer("0", [8, 9, 10], first_step=3),
        Restart(at=0.8),
        *answer("3", [], finish="error"),
    )  # fmt: skip


def events(made: Recording) -> list[dict]:
    return json.loads("".join(chrome_document(made)))["traceEvents"]


class TestChrome:
    """The rules of the Trace Event Format."""

    def test_every_event_has_what_its_phase_needs(self):
        needed = {
            "X": {"ts", "dur", "cat"}, "M": {"args"}, "C": {"ts", "args"}, "i": {"ts", "s"}, "s": {"ts", "id", "cat"},
            "f": {"ts", "id", "cat", "bp"},
        }  # fmt: skip
        found = events(busy())
        assert {event["ph"] for event in found} == set(needed)
        for event in found:
            assert {"name", "pid", "tid"} | needed[event["ph"]] <= event.keys()
            assert all(isinstance(event[name], int) for name in ("pid", "tid"))
            assert all(isinstance(event[name], int) and event[name] >= 0 for name in ("ts", "dur") if name in event)
            if event["ph"] == "C":
                assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
            if event["ph"] == "M":
                assert event["name"] in ("process_name", "thread_name")
                assert isinstance(event["args"]["name"], str)

    def test_slices_of_a_lane_lie_within_one_another_or_apart(self):
        lanes = defaultdict(list)
        for event in events(busy()):
            if event["ph"] == "X":
                lanes[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["name"]))
        assert len(lanes) > 3
        for slices in lanes.values():
            open_ends = []
            for begin, negative, name in sorted(slices):
                while open_ends and open_ends[-1] <= begin:
                    open_ends.pop()
                assert not open_ends or begin - negative <= open_ends[-1], name
                open_ends.append(begin - negative)

    def test_every_lane_has_a_name(self):
        found = events(busy())
        named = {(event["pid"], event["tid"]) for event in found if event["name"] == "thread_name"}
        assert {(event["pid"], event["tid"]) for event in found if event["ph"] in "Xsf"} <= named

    def test_an_arrow_leads_from_a_slice_of_the_steps_to_the_request(self):
        found = events(busy())
        starts = {event["id"]: event for event in found if event["ph"] == "s"}
        ends = {event["id"]: event for event in found if event["ph"] == "f"}
        assert starts.keys() == ends.keys() == {0, 1, 3}, "numbers: Perfetto takes no other ids"
        for arrow in [*starts.values(), *ends.values()]:
            assert any(
                event["ph"] == "X" and event["tid"] == arrow["tid"] and event["pid"] == arrow["pid"]
                and event["ts"] <= arrow["ts"] <= event["ts"] + event["dur"]
                for event in found
            )  # fmt: skip

    def test_counters_end_where_they_began(self):
        found = [event for event in events(busy()) if event["ph"] == "C"]
        last = {event["pid"]: event["args"] for event in found}
        assert all(values == {"waiting": 0, "running": 0} for values in last.values())
        assert max(event["args"]["waiting"] for event in found) == 3

    def test_a_lane_is_used_again_when_it_is_free(self):
        made = recording(*(arrival(str(number), at=number) for number in range(4)))
        lives = [make_span(made, 0, request, None, request.at + length) for request, length in zip(
            made.requests.values(), (1.5, 9.0, 0.5, 1.0), strict=True
        )]  # fmt: skip
        assert list(choose_lanes(lives).values()) == [2, 3, 2, 2]


class TestMooncake:
    def test_lines_name_shared_blocks(self):
        other = [*LONG[:1000], *([5] * 124)]
        made = recording(
            arrival("0", prompt=LONG, at=2.0), *answer("0"), arrival("1", prompt=other, at=1.0), *answer("1", [1])
        )
        first, second = map(json.loads, mooncake_lines(made))
        assert (first["timestamp"], first["input_length"], first["output_length"]) == (1000, 1124, 1)
        assert (second["timestamp"], second["input_length"], second["output_length"]) == (2000, 1200, 4)
        assert [len(row["hash_ids"]) for row in (first, second)] == [3, 3]
        assert first["hash_ids"][0] == second["hash_ids"][0]
        assert not set(first["hash_ids"][1:]) & set(second["hash_ids"][1:])

    @pytest.mark.parametrize("length", [1, 16, 511, 512, 513, 1024, 1025])
    def test_a_block_for_each_512_tokens(self, length):
        made = recording(arrival(prompt=LONG[:1] * length), *answer())
        (line,) = mooncake_lines(made)
        assert len(json.loads(line)["hash_ids"]) == -(-length // 512)

    def test_they_are_read_as_published_traces_are(self, tmp_path):
        made = recording(arrival(prompt=LONG), *answer())
        (tmp_path / "m").write_text("\n".join(mooncake_lines(made)))
        (entry,) = read_trace(tmp_path / "m")
        assert (entry.prompt_tokens, entry.output_tokens, len(entry.blocks)) == (1200, 4, 3)


class TestTraffic:
    """`quire simulate --trace` and `quire bench serve --trace` take recordings."""

    def read(self, tmp_path: Path, *lines: object) -> list:
        return read_trace(write(tmp_path / "a", [header(), engine(), *lines, Close(at=9.0)]))

    def test_prompts_share_what_was_shared(self, tmp_path):
        entries = self.read(
            tmp_path, arrival("0", prompt=LONG), arrival("1", prompt=[*LONG[:40], *range(9, 29)], at=0.6)
        )
        first, second = (arrival.prompt for arrival in simulated_arrivals(entries))
        assert [len(first), len(second)] == [1200, 60]
        assert first[:32] == second[:32]
        assert first[32:60] != second[32:60]

    def test_tenants_share_nothing(self, tmp_path):
        entries = self.read(tmp_path, arrival("0", tenant="a"), arrival("1", tenant="b"), arrival("2", tenant="b"))
        first, second, third = (arrival.prompt for arrival in simulated_arrivals(entries))
        assert not set(first) & set(second)
        assert second == third


def test_steps_are_named_after_what_they_compute():
    def kind(counts, yields, **more):
        ids = [str(number) for number in range(len(counts))]
        return step_kind(Step(step=1, at=0, done=1, requests=ids, starts=counts, counts=counts, yields=yields, **more))

    assert kind([30], [0]) == kind([30], [1]) == "prompt"
    assert kind([1, 1], [1, 1]) == "decode"
    assert kind([1, 8], [1, 1]) == "mixed"
    assert kind([3, 1], [3, 1], drafts={0: 2}) == "verify"
    assert kind([1], [1], failed=True) == "failed"


def test_the_summary_counts():
    found = summarize(busy())
    assert (found["requests"], found["steps"], found["restarts"]) == (4, 6, 1)
    assert found["finished"] == {"length": 1, "error": 1}
    assert (found["unfinished"], found["output_tokens"], found["prompt_tokens"]) == (2, 5, 3 * 40 + 1200)
    assert found["ttft_s"]["p50"] in (0.2, 0.5)
