"""Several simulated engines: the router between them, servers side by side, and the fewest that keep limits."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from quire.bench.replicas import PoissonLoad, RecordedLoad, Server, ServerLoad, Totals, simulate_servers
from quire.bench.search import Objective, busiest, fewest, plan_replicas
from quire.bench.serve.metrics import distribution, parse_slo
from quire.bench.serve.traces import TraceRequest
from quire.bench.simulate import arrivals, random_entries, without_idle_cache
from quire.capacity.profile import CapacityProfile
from quire.capacity.simulator import Simulation
from quire.config import EngineConfig
from quire.core.policy import Policy
from quire.engine.batching import make_policy
from quire.errors import InvalidParams
from tests.capacity.test_plan import SMALL
from tests.capacity.test_simulator import PROFILE, SIZES, uneven_cost

pytestmark = pytest.mark.cpu

CONFIG = EngineConfig()
MAKE_POLICY = partial(make_policy, CONFIG, 8)


def recorded(count, rate, seed=0, blocks=0):
    rng, at_s, entries = random.Random(seed), 0.0, []
    for _ in range(count):
        shared = (rng.randrange(blocks),) if blocks else ()
        entries.append(TraceRequest(at_s, rng.randrange(4, 60), rng.randrange(1, 30), shared))
        at_s += rng.expovariate(rate)
    return entries


def load(entries, replicas, servers=1, **options):
    return ServerLoad(PROFILE, MAKE_POLICY, RecordedLoad(entries), replicas, servers, {"ttft": 500.0}, **options)


def test_one_replica_is_an_engine():
    entries = recorded(80, 1.0, blocks=3)
    totals = simulate_servers(load(entries, 1), 1)
    simulation = Simulation(PROFILE, Policy())
    found = simulation.run(arrivals(entries))
    assert sorted(totals.ttft_s) == sorted(request.ttft_s for request in found)
    assert sorted(totals.e2e_s) == sorted(request.times[-1] - request.arrival_s for request in found)
    assert totals.cached_tokens == sum(request.cached_tokens for request in found)
    assert totals.num_steps == simulation.num_steps
    gaps = [1e3 * (b - a) for request in found for a, b in zip(request.times, request.times[1:], strict=False)]
    for name, value in distribution(gaps).items():
        assert totals.summary()["itl_ms"][name] == pytest.approx(value, rel=0.012), name


def test_more_replicas_answer_sooner():
    entries = recorded(120, 3.0)
    means = [simulate_servers(load(entries, count), 1).summary()["ttft_ms"]["mean"] for count in (1, 2, 4)]
    assert means[0] > 2 * means[1] > 2 * means[2]


def test_requests_follow_their_prefix():
    """Two prefixes and two replicas: each prefix is computed about once."""
    entries = [TraceRequest(index * 2.0, 80, 2, (index % 2,)) for index in range(40)]
    totals = simulate_servers(load(entries, 2), 1)
    assert totals.cached_tokens >= 79 * 36


def test_the_router_learns_of_first_tokens(monkeypatch):
    """The prompt of a request that decodes waits no more; that of one whose step still runs does."""
    server = Server(load([], 1))
    seen, choose = [], server._router.choose

    def watched(*arguments):
        seen.append((server.states[0].missing_tokens, server.states[0].num_answers))
        return choose(*arguments)

    monkeypatch.setattr(server._router, "choose", watched)
    # Four steps of 16 tokens compute the first prompt, 0.26 s each. It has 25 tokens more, one in 0.11 s.
    server.run(arrivals([TraceRequest(at_s, 60, 26) for at_s in (0.0, 0.5, 2.0, 30.0)]))
    assert seen == [(0, 0), (60, 1), (60, 2), (0, 0)]


def test_servers_in_processes_are_those_in_one():
    entries = recorded(60, 3.0)
    one, two = (simulate_servers(load(entries, 2, 3), processes) for processes in (1, 2))
    assert one.summary() == two.summary()
    assert one.num_met + one.num_missed == 60


def test_a_hopeless_simulation_ends_early():
    entries = recorded(200, 20.0)
    totals = simulate_servers(load(entries, 1, max_missed=5), 1)
    assert totals.num_missed == 6
    assert totals.num_met + totals.num_missed < 200


def test_what_is_too_long_misses_the_limits():
    totals = simulate_servers(load([TraceRequest(0.0, 500, 5), TraceRequest(1.0, 5, 5)], 2), 1)
    assert (totals.num_refused, totals.num_missed, totals.num_met) == (1, 1, 1)


def test_random_loads_are_the_same_each_time():
    read = PoissonLoad(2.0, 50, 10, 5)
    assert list(read()) == list(read()) == list(random_entries(2.0, 50, 10, 5, 0))  # as those of one engine
    assert list(read())[-1].at_s == pytest.approx(25, rel=0.5)


def test_totals_of_nothing():
    assert Totals().summary()["itl_ms"] is None


@pytest.mark.parametrize("answer", range(1, 40))
@pytest.mark.parametrize("first", [1, 5, 30])
def test_the_fewest_is_found(answer, first):
    tried = []

    def keeps(count):
        tried.append(count)
        return count >= answer

    assert fewest(keeps, first) == answer
    assert len(set(tried)) == len(tried) <= 12


def test_the_fewest_replicas_keep_the_limits_and_one_fewer_does_not():
    profile = CapacityProfile("m", "here", SIZES, uneven_cost((None,)), 0.0, 0.0)
    entries = recorded(300, 12.0)
    objective = Objective({"ttft": 400.0, "tpot": 60.0}, 0.95)
    document = plan_replicas(profile, SMALL, entries, objective, MAKE_POLICY)
    count = document["replicas"]
    assert count > 1
    assert document["summary"]["attainment"] >= 0.95
    fewer = ServerLoad(profile, MAKE_POLICY, RecordedLoad(entries), count - 1, 1, objective.limits)
    assert simulate_servers(fewer, 1).summary()["attainment"] < 0.95
    low, high = document["range"]
    assert low <= count <= high


def test_a_range_has_no_end_if_the_slowest_cost_misses_the_limits_alone():
    known = uneven_cost((None,))
    slow = tuple(40 * each for each in known.coefficients)
    profile = CapacityProfile("m", "here", SIZES, replace(known, resampled=(known.coefficients, slow)), 0.0, 0.0)
    document = plan_replicas(profile, SMALL, recorded(100, 4.0), Objective({"ttft": 400.0}, 0.95), MAKE_POLICY)
    assert document["range"] == [document["replicas"], None]


def test_limits_that_an_idle_engine_misses_are_refused():
    with pytest.raises(InvalidParams, match="No number of replicas"):
        plan_replicas(PROFILE, SMALL, recorded(20, 1.0), Objective({"ttft": 1.0}, 0.9), MAKE_POLICY)
    with pytest.raises(InvalidParams, match="No number of replicas keeps tpot"):
        plan_replicas(PROFILE, SMALL, recorded(20, 1.0), Objective({"tpot": 1.0}, 0.9), MAKE_POLICY)
    with pytest.raises(InvalidParams, match="do not keep the limits"):
        fewest(lambda count: False, 1)
    with pytest.raises(InvalidParams, match="longest request"):
        plan_replicas(PROFILE, SMALL, [TraceRequest(0.0, 500, 5)], Objective({"ttft": 1e6}, 0.9), MAKE_POLICY)


def test_the_busiest_requests_are_chosen():
    entries = [TraceRequest(float(at_s), 5, 5) for at_s in (0, 100, 101, 102, 200)]
    assert [entry.at_s for entry in busiest(entries, 3)] == [0.0, 1.0, 2.0]
    assert len(busiest(entries, 10)) == 5


def test_a_cache_without_shared_prefixes_changes_no_time():
    for blocks, keeps in ((0, False), (3, True)):
        entries = recorded(100, 2.0, blocks=blocks)
        chosen = without_idle_cache(PROFILE, entries)
        assert chosen.sizes.prefix_cache is keeps
        found, expected = (Simulation(each).run(arrivals(entries)) for each in (chosen, PROFILE))
        assert [request.times for request in found] == [request.times for request in expected]


def test_limits_have_units():
    assert parse_slo("ttft=1s,tpot=50ms,e2e:900") == {"ttft": 1000.0, "tpot": 50.0, "e2e": 900.0}
    with pytest.raises(InvalidParams):
        parse_slo("ttft=1m")
