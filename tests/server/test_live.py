"""The live view: one subscription for all watchers, nothing queued for slow ones, and only one's own for a tenant."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.core.explain import Resource, Room, Wait
from quire.engine.live_changes import EndedRequest, EngineFacts, Event, LiveChanges, MissReason, RequestRow, StepRow
from quire.engine.messages import StepOutputs
from quire.errors import NotReady
from quire.server.console.documents import describe_miss
from quire.server.console.live import LiveView
from quire.server.console.lives import MAX_EVENTS, MAX_LIVES, Lives
from quire.server.console.mirror import MAX_DELTAS
from quire.server.metrics import TOTALS, Metrics

pytestmark = pytest.mark.server

FACTS = EngineFacts(8, 16, 4, 64, "continuous", "cpu")


class FakeClient:
    """Counts who watches."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ready = [True, True]

    def watch(self, interval_s: float) -> None:
        self.calls.append("watch")

    def unwatch(self) -> None:
        self.calls.append("unwatch")

    def is_ready(self, replica: int) -> bool:
        return self.ready[replica]


def row(number: int, tenant: str = "", **fields: Any) -> RequestRow:
    given = {"num_prompt": 5, "num_computed": 5, "num_output": 1, "max_tokens": 9} | fields
    state = "waiting" if "wait" in given else "running"
    zeros = dict.fromkeys(
        ["num_cached", "num_blocks", "num_swapped_blocks", "num_preemptions", "num_drafted", "num_accepted"], 0
    )
    return RequestRow(number, f"7:r{number}-0", tenant, state, 100.0, **{**zeros, "num_beams": 1, **given})


def changes(*rows: RequestRow, snapshot: bool = False, **fields: Any) -> LiveChanges:
    given = {"blocks": [1, 8, 0, 0] if snapshot else [], "ended": [], "events": {}, "steps": []} | fields
    return LiveChanges(
        sent_s=200.0, requests=list(rows), room=Room(num_running=1, max_requests=1), num_running=1, num_waiting=0,
        num_free_blocks=8, decode_s=0.1, prompt_token_s=0.01, facts=FACTS if snapshot else None, **given,
    )  # fmt: skip


async def take(stream: AsyncIterator[bytes]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(await anext(stream))
    return document


def make_view(num_replicas: int = 1) -> tuple[LiveView, FakeClient]:
    client = FakeClient()
    return LiveView(client, Metrics(), num_replicas), client  # type: ignore[arg-type]


def test_watchers_share_one_subscription() -> None:
    async def watch() -> None:
        view, client = make_view()
        first, second = view.watch("m", None), view.watch("m", None)
        assert (await take(first))["type"] == (await take(second))["type"] == "hello"
        view.on_changes(changes(row(1), snapshot=True), 0)
        assert (await take(first))["type"] == "snapshot"
        view.on_changes(changes(row(2)), 0)
        delta = await take(first)
        assert (delta["type"], delta["sequence"], [each["number"] for each in delta["requests"]]) == ("delta", 2, [2])
        late = await take(second)
        assert (late["type"], [each["number"] for each in late["requests"]]) == ("snapshot", [1, 2])
        await first.aclose()  # type: ignore[attr-defined]
        assert client.calls == ["watch"]
        await second.aclose()  # type: ignore[attr-defined]
        assert client.calls == ["watch", "unwatch"]

    asyncio.run(watch())


def test_a_slow_watcher_gets_a_snapshot_and_nothing_is_queued() -> None:
    async def watch() -> None:
        view, _ = make_view()
        stream = view.watch("m", None)
        await take(stream)
        view.on_changes(changes(row(1), snapshot=True), 0)
        assert (await take(stream))["type"] == "snapshot"
        for number in range(2, 2 + MAX_DELTAS):
            view.on_changes(changes(row(number)), 0)
        seen = [(await take(stream))["sequence"] for _ in range(MAX_DELTAS)]
        assert seen == list(range(2, 2 + MAX_DELTAS))
        for number in range(MAX_DELTAS + 1):
            view.on_changes(changes(row(100 + number)), 0)
        assert len(view.mirrors[0].deltas) == MAX_DELTAS
        late = await take(stream)
        assert (late["type"], len(late["requests"])) == ("snapshot", 2 + 2 * MAX_DELTAS)
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(watch())


def test_a_restart_is_told_and_begins_anew() -> None:
    async def watch() -> None:
        view, client = make_view(2)
        stream = view.watch("m", None)
        assert (await take(stream))["replicas"] == 2
        view.on_changes(changes(row(1), snapshot=True), 1)
        assert (await take(stream))["replica"] == 1
        client.ready[1] = False
        view.on_restart("signal SIGKILL", 1)
        assert await take(stream) == {"type": "engine", "replica": 1, "ready": False, "reason": "signal SIGKILL"}
        view.on_changes(changes(row(5)), 1)  # on its way when the engine died
        assert view.mirrors[1].is_empty
        client.ready[1] = True
        view.on_changes(changes(row(2), snapshot=True), 1)
        assert (await take(stream))["ready"]
        snapshot = await take(stream)
        assert [each["number"] for each in snapshot["requests"]] == [2]
        (life,) = view.lives.find("r1", None)
        assert [event["kind"] for event in life["events"]] == ["restarted"]
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(watch())


def test_a_tenant_sees_the_ids_of_its_own_requests_only() -> None:
    async def watch() -> None:
        view, _ = make_view()
        mine, all_of_them = view.watch("m", "me"), view.watch("m", None)
        await take(mine)
        await take(all_of_them)
        wait = Wait(1, 0, 0, [Resource.ROWS])
        view.on_changes(changes(row(1, "me"), row(2, "other", wait=wait), snapshot=True), 0)
        for _ in range(2):
            own, other = (await take(mine))["requests"]
            assert (own["id"], own["tenant"], own["own"]) == ("r1-0", "me", True)
            assert (other["id"], other["tenant"], other["own"]) == (None, None, False)
            assert other["wait"]["sentence"] == "First in line: 1 of 1 requests run."
            assert [each["id"] for each in (await take(all_of_them))["requests"]] == ["r1-0", "r2-0"]
            view.on_changes(changes(row(1, "me", num_output=2), row(2, "other", wait=wait, num_preemptions=1)), 0)
        assert view.lives.find("r1", "me")
        assert not view.lives.find("r2", "me")
        assert view.lives.find("r2", None)
        await mine.aclose()  # type: ignore[attr-defined]
        await all_of_them.aclose()  # type: ignore[attr-defined]

    asyncio.run(watch())


def test_streams_end_with_the_server() -> None:
    async def watch() -> None:
        view, _ = make_view()
        stream = view.watch("m", None)
        await take(stream)
        asyncio.get_running_loop().call_soon(view.close)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(watch())


def test_steps_are_kept_for_those_who_come_later() -> None:
    async def watch() -> None:
        view, _ = make_view()
        stream = view.watch("m", None)
        await take(stream)
        steps = [StepRow(number, 1.0, 0.5, None, False, 1, 9, 3, 0, 0, 1, 0) for number in range(3)]
        view.on_changes(changes(snapshot=True, steps=steps[:2]), 0)
        view.on_changes(changes(steps=steps[2:]), 0)
        assert [step["step"] for step in (await take(stream))["steps"]] == [0, 1, 2]
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(watch())


def test_totals_have_every_name_of_the_metrics() -> None:
    metrics = Metrics()
    metrics.on_step(StepOutputs(num_running=3, preemptions=2, drafted={"a": 2, "b": 3}))
    totals = metrics.totals()
    assert tuple(totals) == TOTALS
    assert (totals["requests_running"], totals["preemptions_total"], totals["draft_tokens_total"]) == (3, 2, 5)


def test_lives_are_bounded_and_join_consecutive_steps() -> None:
    lives = Lives()
    decode = [Event("decode", 1.0, 2.0, 5, 3, 3), Event("decode", 2.0, 3.0, 8, 2, 2)]
    lives.add(changes(row(1), events={1: decode}), 0)
    (life,) = lives.find("r1-0", None)
    assert life["events"] == [{"kind": "decode", "start_s": 1.0, "end_s": 3.0, "step": 5, "steps": 5, "tokens": 5}]
    prompts = [Event("prompt", float(index), float(index), index, 1, 64) for index in range(MAX_EVENTS + 10)]
    lives.add(changes(row(1), events={1: prompts}), 0)
    (life,) = lives.find("r1", None)
    assert len(life["events"]) <= MAX_EVENTS
    assert (life["events"][0]["kind"], life["num_dropped_events"]) == ("decode", 0)
    assert sum(event["steps"] for event in life["events"]) == 5 + len(prompts)
    moments = [Event("preempted", 1.0, 1.0) for _ in range(MAX_EVENTS)]
    lives.add(changes(row(1), events={1: moments}), 0)
    (life,) = lives.find("r1", None)
    assert (len(life["events"]), life["num_dropped_events"] > 0) == (MAX_EVENTS, True)
    for number in range(2, MAX_LIVES + 2):
        lives.add(changes(ended=[EndedRequest(row(number), "stop")]), 0)
    assert lives.find("r1", None), "it still runs"
    assert not lives.find("r2", None)
    assert len(lives) == MAX_LIVES


@pytest.mark.parametrize("kind", ["never seen", "diverged", "evicted", "salted apart", "below the block floor"])
def test_misses_in_words_keep_other_tenants_secret(kind: str) -> None:
    miss = MissReason(kind, 1024, 7 if kind == "evicted" else None)
    text = describe_miss(miss, 1024, 2000, masked=False)
    assert text.startswith("1,024 of 2,000 prompt tokens were cached. ")
    masked = describe_miss(miss, 1024, 2000, masked=True)
    assert "tenant" not in masked
    assert (masked == text) == (kind != "salted apart")


def test_tokens_that_agree_and_were_not_copied_are_explained() -> None:
    """A block that another request fills is not copied: fewer tokens are cached than agree."""
    miss = MissReason("diverged", 27, None)
    assert "11 before it were not copied" in describe_miss(miss, 16, 39, masked=True)
    assert "copied" not in describe_miss(miss, 27, 39, masked=True)


def test_what_was_not_watched_to_its_end_is_unknown() -> None:
    async def watch() -> None:
        view, _ = make_view()
        stream = view.watch("m", None)
        await take(stream)
        view.on_changes(changes(row(1), row(2), snapshot=True), 0)
        assert view.lives.find("r1", None)[0]["state"] == "running"
        await stream.aclose()  # type: ignore[attr-defined]
        assert view.lives.find("r1", None)[0]["state"] == "unknown"
        again = view.watch("m", None)
        await take(again)
        view.on_changes(changes(row(2), snapshot=True), 0)
        states = [view.lives.find(name, None)[0]["state"] for name in ("r1", "r2")]
        assert states == ["unknown", "running"]
        await again.aclose()  # type: ignore[attr-defined]

    asyncio.run(watch())


def test_a_search_waits_for_as_many_rows_as_it_is_wide() -> None:
    view, _ = make_view()
    mirror = view.mirrors[0]
    wait = Wait(1, resources=[Resource.ROWS], num_rows=3, num_blocks=1)
    running = [row(1, max_tokens=2), row(2, max_tokens=11), row(3, max_tokens=21)]
    mirror.apply(changes(*running, row(4, wait=wait), snapshot=True), {})
    (document,) = [each for each in json.loads(mirror.snapshot(None))["requests"] if each["number"] == 4]
    assert document["wait"]["estimate_s"] == 2.0


def test_changes_that_cannot_be_applied_end_nothing_but_the_picture(caplog: pytest.LogCaptureFixture) -> None:
    async def watch() -> None:
        view, _ = make_view()
        stream = view.watch("m", None)
        await take(stream)
        view.on_changes(changes(row(1), snapshot=True), 0)
        assert (await take(stream))["type"] == "snapshot"
        view.on_changes(changes(row(2), blocks=[1, 2, 3]), 0)  # not four numbers
        view.on_changes(changes(row(3)), 0)
        assert view.mirrors[0].is_empty
        assert len(caplog.records) == 1
        view.on_changes(changes(row(4), snapshot=True), 0)
        assert [each["number"] for each in (await take(stream))["requests"]] == [4]
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(watch())


def test_a_cache_is_described_once_for_all_who_ask() -> None:
    """The engine makes no step meanwhile: a hundred readers must not stop it a hundred times."""

    async def ask() -> None:
        view, client = make_view()

        async def describe_cache(salt: bytes | None, max_nodes: int, replica: int) -> object:
            client.calls.append("describe")
            await asyncio.sleep(0.01)
            if len(client.calls) == 1:
                raise NotReady("The engine has ended.")
            return object()

        client.describe_cache = describe_cache  # type: ignore[attr-defined]
        found = await asyncio.gather(*(view.describe_cache(0, b"a") for _ in range(100)), return_exceptions=True)
        assert sum(isinstance(each, NotReady) for each in found) == 1
        assert len(client.calls) == 2
        assert len(set(map(id, found))) == 2

    asyncio.run(ask())
