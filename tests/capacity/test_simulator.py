"""The simulator: the scheduler's own decisions on a virtual clock."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from quire import __version__
from quire.bench.serve.traces import TraceRequest
from quire.bench.simulate import arrivals, compare, ranges, simulate
from quire.capacity.profile import CapacityProfile, EngineSizes, load_profile
from quire.capacity.simulator import Arrival, Simulation
from quire.capacity.step_cost import KNOTS, StepCost
from quire.core.policy import Dynamic, Policy, Static
from quire.errors import InvalidParams

pytestmark = pytest.mark.cpu

SIZES = EngineSizes(200, 4, 16, 8, 120, (None,))
TOKEN_S, STEP_S = 0.01, 0.1


def flat_cost(step_s=STEP_S, token_s=TOKEN_S):
    """Each step takes step_s, and token_s for each of its tokens."""
    coefficients = [0.0] * (2 + 2 * len(KNOTS) + 2)
    coefficients[0] = step_s
    largest = 2 + len(KNOTS) - 1  # min(tokens, largest knot)
    coefficients[largest] = token_s
    return StepCost((None,), tuple(coefficients), (tuple(coefficients), tuple(2 * each for each in coefficients)))


PROFILE = CapacityProfile("m", "here", SIZES, flat_cost(), 0.01, 0.05)


def prompt(number, length):
    return list(range(number << 20, (number << 20) + length))


def test_one_request_by_hand():
    """Ten tokens of the prompt in one step, then four steps of one token."""
    (request,) = Simulation(PROFILE).run([Arrival(5.0, prompt(1, 10), 5)])
    first = 5.0 + STEP_S + 10 * TOKEN_S
    expected = [first + index * (STEP_S + TOKEN_S) for index in range(5)]
    assert request.times == pytest.approx(expected)
    assert request.ttft_s == pytest.approx(first - 5.0)
    assert (request.prompt_tokens, request.output_tokens, request.cached_tokens) == (10, 5, 0)


def test_prompts_are_cut_into_chunks_beside_decoding_rows():
    """Steps have 16 tokens: the second prompt of 30 gets 15 beside the first request's token."""
    first, second = Simulation(PROFILE).run([Arrival(0.0, prompt(1, 4), 9), Arrival(0.01, prompt(2, 30), 1)])
    assert second.times[0] == pytest.approx(0.14 + 2 * (STEP_S + 16 * TOKEN_S))
    assert len(first.times) == 9


def test_shared_prefixes_are_found_in_the_cache():
    shared = prompt(1, 40)
    load = [Arrival(0.0, shared, 2), Arrival(20.0, [*shared, 7, 8], 2), Arrival(40.0, prompt(3, 40), 2)]
    found = Simulation(PROFILE).run(load)
    assert [request.cached_tokens for request in found] == [0, 40, 0]
    without = Simulation(replace(PROFILE, sizes=replace(SIZES, prefix_cache=False))).run(load)
    assert [request.cached_tokens for request in without] == [0, 0, 0]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [1, 2])
def test_every_request_ends_once_with_all_of_its_tokens(seed, depth):
    rng = random.Random(seed)
    sizes = replace(SIZES, num_blocks=rng.choice([35, 60, 200]), depth=depth, max_requests=rng.choice([1, 4, 8]))
    load, at_s = [], 0.0
    for _ in range(60):
        at_s += rng.expovariate(2)
        load.append(Arrival(at_s, prompt(rng.randrange(20), rng.randrange(1, 90)), rng.randrange(1, 25)))
    simulation = Simulation(replace(PROFILE, sizes=sizes))
    found = simulation.run(load)
    assert [request.number for request in found] == list(range(60))
    for request, arrival in zip(found, load, strict=True):
        assert len(request.times) == arrival.output_tokens
        assert request.times == sorted(request.times)
        assert request.times[0] > arrival.at_s
    assert simulation.busy_s <= simulation.now_s - load[0].at_s + 1e-9
    assert not simulation.scheduler.has_work
    again = Simulation(replace(PROFILE, sizes=sizes)).run(load)
    assert [request.times for request in again] == [request.times for request in found]


def test_preemption_happens_where_the_cache_is_small():
    sizes = replace(SIZES, num_blocks=32)
    load = [Arrival(0.0, prompt(number, 40), 40) for number in range(4)]
    found = Simulation(replace(PROFILE, sizes=sizes)).run(load)
    assert sum(request.num_preemptions for request in found) > 0
    assert sum(request.num_preemptions for request in Simulation(PROFILE).run(load)) == 0


def test_policies_are_those_of_the_engine():
    load = [Arrival(0.0, prompt(1, 4), 30), *(Arrival(0.5, prompt(number, 4), 2) for number in range(2, 5))]
    continuous = Simulation(PROFILE).run(load)
    static = Simulation(PROFILE, Policy(Static(4))).run(load)
    dynamic = Simulation(PROFILE, Policy(Dynamic(8, 0.3))).run(load)
    assert continuous[1].times[0] < continuous[0].times[-1]
    assert static[1].times[0] > static[0].times[-1]
    assert dynamic[0].times[0] > 0.3


def test_what_never_fits_is_refused():
    found = Simulation(PROFILE).run([Arrival(0.0, prompt(1, 119), 5), Arrival(0.0, prompt(2, 5), 2)])
    assert "124 tokens are more than 120" in found[0].refused
    assert found[1].refused is None
    small = replace(PROFILE, sizes=replace(SIZES, num_blocks=10))
    assert Simulation(small).run([Arrival(0.0, prompt(1, 80), 5)])[0].refused


def test_blocks_of_a_trace_are_shared_tokens():
    first, second, third = arrivals(
        [
            TraceRequest(0.0, 1000, 5, (7, 8)),
            TraceRequest(1.0, 1100, 5, (7, 8, 9)),
            TraceRequest(2.0, 1000, 5),
        ]
    )
    assert len(first.prompt) == len(third.prompt) == 1000
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:1000] == second.prompt[512:1000]
    assert not set(first.prompt) & set(third.prompt)
    assert len(second.prompt) == 1100


def test_a_report_has_the_figures_of_bench_serve():
    entries = [TraceRequest(index * 0.2, 10, 5) for index in range(20)] + [TraceRequest(9.0, 500, 5)]
    document = simulate(PROFILE, entries, limits={"ttft": 1e6})
    summary = document["summary"]
    assert (summary["num_ok"], summary["num_failed"]) == (20, 1)
    assert summary["output_tokens"] == 100
    assert summary["goodput"]["num_met"] == 20
    assert document["errors"]["refused"]["count"] == 1
    assert document["engine"]["steps"] > 5
    assert 0 < document["engine"]["busy_share"] <= 1
    found = ranges(PROFILE, entries)
    low, high = found["ttft_ms mean"]
    assert low < high  # the second of the resampled costs is twice the first
    rows = compare(document, document)
    assert all(row["error"] == 0 for row in rows if row["measured"])


def test_a_profile_survives_its_file(tmp_path):
    path = tmp_path / "a" / "p.json"
    PROFILE.save(path)
    assert load_profile(path) == PROFILE
    assert PROFILE.resized(num_blocks=7, max_requests=None).sizes == replace(SIZES, num_blocks=7)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sizes": {}}', '{"sizes": {"windows": [null], "x": 1}}'])
def test_a_file_that_is_no_profile_is_refused(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(InvalidParams, match="is not a profile"):
        load_profile(tmp_path / "p.json")
    with pytest.raises(InvalidParams, match="bench phases"):
        load_profile(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("sizes", "num_blocks"), 0),
        (("sizes", "num_blocks"), "9"),
        (("sizes", "block_size"), -4),
        (("sizes", "depth"), 0),
        (("sizes", "max_len"), 1.5),
        (("sizes", "windows"), [0]),
        (("sizes", "windows"), [None, 8]),
        (("sizes", "itl_target_s"), float("nan")),
        (("sizes", "prefix_cache"), "yes"),
        (("cost", "coefficients"), [1.0]),
        (("cost", "coefficients"), [float("nan")] * (4 + 2 * len(KNOTS))),
        (("median_error",), None),
    ],
)
def test_a_profile_with_a_wrong_value_is_refused(tmp_path, path, value):
    PROFILE.save(tmp_path / "p.json")
    document = json.loads((tmp_path / "p.json").read_text())
    *parents, last = path
    target = document
    for name in parents:
        target = target[name]
    target[last] = value
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(InvalidParams, match="is not a profile"):
        load_profile(tmp_path / "p.json")


def test_a_profile_of_another_version_is_refused(tmp_path):
    PROFILE.save(tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text()
    (tmp_path / "p.json").write_text(text.replace(f'"quire": "{__version__}"', '"quire": "0.0.9"'))
    with pytest.raises(InvalidParams, match=r"measured with quire 0\.0\.9"):
        load_profile(tmp_path / "p.json")


def test_blocks_may_be_named_by_hashes():
    entries = [TraceRequest(float(index), 600, 2, (2**64 - 1, -5)) for index in range(2)]
    first, second = arrivals(entries)
    assert first.prompt == second.prompt
    assert 0 <= min(first.prompt) <= max(first.prompt) < 2**63
    sizes = replace(SIZES, num_blocks=600, max_len=1000, max_tokens_per_step=900)
    found = Simulation(replace(PROFILE, sizes=sizes)).run(
        arrivals([*entries, TraceRequest(500.0, 600, 2, (2**64 - 1, 7))])
    )
    assert [request.cached_tokens for request in found] == [0, 599, 512]


def random_load(rng, count, max_prompt, max_output):
    load, at_s = [], 0.0
    for _ in range(count):
        at_s += rng.choice([0.0, 0.001, rng.expovariate(0.3), rng.expovariate(3)])
        length = rng.randrange(1, max_prompt)
        load.append(Arrival(at_s, prompt(rng.randrange(12), length), rng.randrange(1, max_output)))
    return load


def uneven_cost(windows):
    """A step that reads more keys takes longer."""
    cost = flat_cost(0.01, 0.002)
    keys = [1e-5 * (index + 1) for index in range(len(windows))]
    return StepCost(windows, (*cost.coefficients[:-2], *keys, *[1e-6] * len(windows)))


@pytest.mark.parametrize("seed", range(40))
def test_a_leap_is_the_same_as_its_steps(seed):
    """Times to the bit, and the state that is left: blocks, counters and the tree."""
    rng = random.Random(seed)
    windows = rng.choice([(None,), (None,), (None, 8), (5, 13)])
    block_size = rng.choice([1, 2, 4, 16])
    sizes = replace(
        SIZES,
        windows=windows,
        block_size=block_size,
        num_blocks=len(windows) * rng.choice([160, 300, 800]) // block_size + 8,
        max_len=110,
        depth=rng.choice([1, 2]),
        max_requests=rng.choice([1, 3, 8]),
        max_tokens_per_step=rng.choice([8, 40]),
        prefix_cache=rng.random() < 0.7,
        itl_target_s=rng.choice([None, 0.05]),
    )
    profile = CapacityProfile("m", "here", sizes, uneven_cost(windows), 0.0, 0.0)
    batching = rng.choice([Policy, Policy, lambda: Policy(Static(4)), lambda: Policy(Dynamic(4, 0.5))])
    load = random_load(rng, 60, 70, 40)
    leaping, stepping = Simulation(profile, batching()), Simulation(profile, batching(), leaps=False)
    found, expected = leaping.run(load), stepping.run(load)
    assert found == expected
    for simulation in (leaping, stepping):
        assert not simulation.has_work
    assert (leaping.now_s, leaping.num_steps) == (stepping.now_s, stepping.num_steps)
    assert leaping.busy_s == pytest.approx(stepping.busy_s)
    assert leaping.scheduler.counters == stepping.scheduler.counters
    assert leaping.scheduler.pace == stepping.scheduler.pace
    assert leaping.scheduler.kv.pool.num_allocations == stepping.scheduler.kv.pool.num_allocations
    assert leaping.scheduler.kv.tree.owners.keys() == stepping.scheduler.kv.tree.owners.keys()


def test_leaps_plan_few_steps(monkeypatch):
    """Most steps of long answers are not planned."""
    simulation = Simulation(PROFILE)
    num_planned = 0
    schedule = simulation.scheduler.schedule

    def counted(now_s):
        nonlocal num_planned
        num_planned += 1
        return schedule(now_s)

    monkeypatch.setattr(simulation.scheduler, "schedule", counted)
    simulation.run([Arrival(0.0, prompt(number, 10), 80) for number in range(4)])
    assert num_planned * 5 < simulation.num_steps


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 10**400])
@pytest.mark.parametrize("name", ["median_error", "measured_at", "served_error", "served_steps"])
def test_a_profile_has_finite_numbers(tmp_path, name, value):
    (tmp_path / "p.json").write_text(json.dumps({**PROFILE.to_dict(), name: value}))
    with pytest.raises(InvalidParams, match="is not a profile"):
        load_profile(tmp_path / "p.json")


def test_several_processes_keep_one_profile(tmp_path):
    """Each has a partial file of its own: what one has written is not renamed, or cut, by another."""
    path, ids = tmp_path / "p.json", []
    program = (
        "import sys; from pathlib import Path; from quire.capacity.profile import load_profile\n"
        "path = Path(sys.argv[1]); profile = load_profile(path)\n"
        "for _ in range(200): profile.save(path); load_profile(path)"
    )
    PROFILE.save(path)
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path)], stderr=subprocess.PIPE) for _ in range(3)]
    for writer in writers:
        _, text = writer.communicate(timeout=60)
        ids.append((writer.returncode, text.decode()[-500:]))
    assert ids == [(0, "")] * 3
    assert load_profile(path) == PROFILE
    assert [each.name for each in tmp_path.iterdir()] == ["p.json"]
