"""Drafts from repeated text, against simple Python: occurrences, choice, order, tenants, bounds, predictions."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from itertools import pairwise
from threading import Thread
from time import perf_counter
from typing import Any

import pytest

from quire.core.drafts import ROOT, Drafts
from quire.kernels.cpu.native import Missing, load
from quire.speculative.proposer import Context, Proposer
from quire.speculative.suffix import PUBLISH_TOKENS, SuffixProposer

pytestmark = pytest.mark.core

MODULE: Any = load()
needs_native = pytest.mark.skipif(isinstance(MODULE, Missing), reason="the C++ extension is not built")
MAX_TOKEN = 2**31 - 1
ORDERS = (8, 2, 1)
MAX_MATCH = 32
OVERLAP = 8
ALL = 1 << 20  # more occurrences than any text here has


@pytest.fixture(params=["native", "python"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[SuffixProposer]:
    """A proposer with the C++ index, or with the one in Python."""
    if request.param == "python":
        monkeypatch.setattr("quire.speculative.suffix.load", lambda: Missing("not built"))
    elif isinstance(MODULE, Missing):
        pytest.skip(MODULE.reason)
    return SuffixProposer


def propose(
    proposer: Proposer,
    tokens: Sequence[int],
    max_drafts: int = 4,
    *,
    id: str = "a",
    num_prompt: int = 0,
    salt: bytes = b"",
    prediction: Sequence[int] = (),
) -> Drafts | None:
    (drafts,) = proposer.propose([Context(id, tokens, num_prompt, salt, prediction)], [max_drafts])
    check(drafts, max_drafts)
    return drafts


def check(drafts: Drafts | None, max_drafts: int) -> None:
    if drafts is None:
        return
    assert 0 < len(drafts) <= max_drafts
    assert drafts.source == "suffix"
    assert len(drafts.odds) == len(drafts)
    assert all(0 < odds < 1 for odds in drafts.odds)
    assert all(0 <= token <= MAX_TOKEN for token in drafts.tokens)
    parents = [drafts.parent(node) for node in range(len(drafts))]
    assert all(ROOT <= parent < node for node, parent in enumerate(parents))
    assert len(set(zip(parents, drafts.tokens, strict=True))) == len(drafts)
    if drafts.parents is not None:
        assert drafts.parents != list(range(-1, len(drafts) - 1))


def finish_answer(proposer: SuffixProposer, answer: Sequence[int], *, id: str = "done", salt: bytes = b"") -> None:
    propose(proposer, list(answer), 0, id=id, salt=salt)
    proposer.finish(id)


def tokens_of(drafts: Drafts | None) -> list[int]:
    return [] if drafts is None else drafts.tokens


def reference_occurrences(text: Sequence[Any], tail: Sequence[int]) -> list[tuple[int, int]]:
    """(position of what follows, length) for each place in `text` where the last token of `tail` is."""

    def length(position: int) -> int:
        count = 0
        while count < min(position + 1, len(tail), MAX_MATCH) and text[position - count] == tail[-1 - count]:
            count += 1
        return count

    found = [(position + 1, length(position)) for position in reversed(range(len(text)))]
    band = {count: next(nth for nth, order in enumerate(ORDERS) if count >= order) for _, count in found if count}
    return sorted((each for each in found if each[1]), key=lambda each: band[each[1]])


def reference_odds(length: int, count: int, share: float) -> float:
    logit = -1.67 + 0.53 * math.log(min(length, MAX_MATCH)) + 0.65 * math.log(count)
    return 1 / (1 + math.exp(-logit - 0.59 * math.log(share / (1 - share + 0.02))))


def reference_children(text: list[int], path: list[int]) -> list[tuple[int, float]]:
    """Tokens that may follow the text and a path of drafts, with their odds, best first."""
    votes: dict[int, list[int]] = {}
    for position, length in reference_occurrences(text[:-1], text):
        following = (text + path)[position : position + len(path) + 1]
        if following[:-1] == path:
            votes.setdefault(following[-1], []).append(length + len(path))
    weights = {token: sum(min(length, 16) ** 3 for length in lengths) for token, lengths in votes.items()}
    total = sum(weights.values())
    odds = {token: reference_odds(max(votes[token]), len(votes[token]), weights[token] / total) for token in votes}
    return [(token, odds[token]) for token in sorted(votes, key=lambda token: -weights[token])]


def random_texts(count: int, max_length: int) -> list[list[int]]:
    draw = random.Random(1)

    def text() -> list[int]:
        num_tokens = draw.choice((1, 2, 3, 5))
        return [draw.randrange(num_tokens) for _ in range(draw.randrange(max_length))]

    return [text() for _ in range(count)]


@needs_native
def test_all_occurrences_are_found_while_a_text_grows():
    for nth, text in enumerate(random_texts(30, 300)):
        grown: list[int] = []
        request = MODULE.RequestText(1, [], 0)
        draw = random.Random(nth)
        while len(grown) < len(text):
            grown += text[len(grown) : len(grown) + draw.randrange(1, 20)]
            MODULE.propose_repeats([request], [None], [grown], [0], False)
            expected = [(grown[at], length) for at, length in reference_occurrences(grown[:-1], grown)]
            assert request.occurrences(max_found=ALL) == expected


@needs_native
def test_a_chain_takes_the_token_with_most_weight_at_each_depth():
    proposer = SuffixProposer(only_chains=True)
    for nth, text in enumerate(random_texts(500, 32)):
        expected: list[int] = []
        odds: list[float] = []
        while len(expected) < 6 and text and (children := reference_children(text, expected)):
            expected.append(children[0][0])
            odds.append(children[0][1])
        drafts = propose(proposer, text, 6, id=str(nth))
        assert tokens_of(drafts) == expected
        if drafts is not None:
            assert drafts.is_chain
            assert drafts.odds == pytest.approx(odds, rel=1e-4)


@needs_native
def test_a_tree_has_the_nodes_that_are_most_likely_reached():
    proposer = SuffixProposer()
    for nth, text in enumerate(random_texts(300, 32)):
        paths: list[tuple[float, list[int]]] = []
        frontier = [(1.0, list[int]())] if text else []
        while frontier and len(paths) <= 7:
            chance, path = frontier.pop(frontier.index(max(frontier, key=lambda each: each[0])))
            paths.append((chance, path))
            frontier += [(chance * odds, [*path, token]) for token, odds in reference_children(text, path)[:3]]
        drafts = propose(proposer, text, 7, id=str(nth))
        reached = survival(drafts) if drafts is not None else []
        assert sorted(reached, reverse=True) == pytest.approx([chance for chance, _ in paths[1:]], rel=1e-4)
        if drafts is not None:
            check_order(drafts, reached)


def survival(drafts: Drafts) -> list[float]:
    reached: list[float] = []
    for node, odds in enumerate(drafts.odds):
        reached.append(odds if drafts.parent(node) == ROOT else odds * reached[drafts.parent(node)])
    return reached


def check_order(drafts: Drafts, reached: list[float]) -> None:
    """The likeliest path first, then the others by their chance."""
    trunk = 0
    while trunk < len(drafts) and drafts.parent(trunk) == trunk - 1:
        trunk += 1
    for node in range(trunk):
        siblings = [reached[each] for each in range(len(drafts)) if drafts.parent(each) == node - 1]
        assert reached[node] == max(siblings)
    assert all(before >= after - 1e-6 for before, after in pairwise(reached[trunk:]))


def test_drafts_continue_the_last_occurrence(make: type[SuffixProposer]):
    drafts = propose(make(), [1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    assert tokens_of(drafts) == [4, 5, 6, 7]


@needs_native
def test_a_longer_match_wins_over_a_frequent_short_one():
    text = [8, 9, 5, 1, 0, 5, 2, 0, 5, 2, 0, 5, 2, 8, 9, 5]
    assert tokens_of(propose(SuffixProposer(), text, 1)) == [1]


@needs_native
def test_the_most_frequent_token_wins_and_then_the_most_recent():
    assert tokens_of(propose(SuffixProposer(), [5, 1, 5, 1, 5, 2, 5], 1)) == [1]
    assert tokens_of(propose(SuffixProposer(), [5, 1, 7, 5, 2, 8, 5], 1)) == [2]


@needs_native
def test_a_text_that_repeats_itself_goes_on():
    assert tokens_of(propose(SuffixProposer(only_chains=True), [1, 2, 3] * 4, 7)) == [1, 2, 3, 1, 2, 3, 1]


@needs_native
def test_odds_grow_with_the_match_and_fall_with_disagreement():
    def first_odds(text: list[int]) -> float:
        drafts = propose(SuffixProposer(), text, 1)
        assert drafts is not None
        return drafts.odds[0]

    short, long = first_odds([1, 2, 9, 8, 1]), first_odds([4, 3, 1, 2, 9, 8, 4, 3, 1])
    often, mixed = first_odds([1, 2, 9, 1, 2, 8, 1, 2, 7, 1]), first_odds([1, 2, 9, 1, 2, 8, 1, 3, 7, 1])
    assert short < long
    assert mixed < often
    assert short < often


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3]])
def test_nothing_is_proposed_without_a_repeat(make: type[SuffixProposer], text: list[int]):
    assert propose(make(), text) is None


def test_no_drafts_are_proposed_if_none_are_wanted(make: type[SuffixProposer]):
    proposer = make()
    assert propose(proposer, [1, 2, 3, 1, 2, 3, 1, 2], 0) is None
    assert tokens_of(propose(proposer, [1, 2, 3, 1, 2, 3, 1, 2, 3], 1)) == [1]


def test_many_requests_in_one_call_get_what_each_gets_alone(make: type[SuffixProposer]):
    texts = random_texts(60, 60)
    contexts = [Context(str(nth), text, len(text), b"") for nth, text in enumerate(texts)]
    together = make().propose(contexts, [nth % 6 for nth in range(len(texts))])
    assert together == [propose(make(), text, nth % 6, num_prompt=len(text)) for nth, text in enumerate(texts)]
    assert make().propose([], []) == []


def test_a_text_that_grows_gives_the_drafts_of_a_text_at_once(make: type[SuffixProposer]):
    for text in random_texts(20, 80):
        proposer, grown = make(), list[int]()
        for token in text:
            grown.append(token)
            assert propose(proposer, grown, num_prompt=len(text)) == propose(make(), list(grown), num_prompt=len(text))


def test_a_text_that_shrank_or_changed_is_indexed_again(make: type[SuffixProposer]):
    proposer = make()
    propose(proposer, [1, 2, 3, 4, 1, 2, 3, 5, 6])
    assert propose(proposer, [1, 2, 3, 7]) is None
    assert tokens_of(propose(proposer, [1, 2, 3, 7, 1, 2, 3], 1)) == [7]
    assert tokens_of(propose(proposer, [9, 8, 6, 4, 3, 1, 9, 8, 6, 4], 1)) == [3]


def test_tokens_may_be_any_sequence(make: type[SuffixProposer]):
    text = [1, 2, 3, 4, 1, 2, 3]
    for sequence in (tuple(text), array("i", text), range(0)):
        assert propose(make(), sequence) == propose(make(), list(sequence))


def test_an_answer_helps_later_requests_of_its_tenant(make: type[SuffixProposer]):
    proposer = make()
    finish_answer(proposer, range(100, 120))
    assert tokens_of(propose(proposer, [1, 105, 106, 107])) == [108, 109, 110, 111]


def test_the_last_tokens_of_an_answer_are_read_when_it_finishes(make: type[SuffixProposer]):
    proposer, tokens = make(), [1, 2, 3]
    propose(proposer, tokens, num_prompt=3, id="done")
    tokens += [4, 5, 6]
    proposer.finish("done")
    assert tokens_of(propose(proposer, [2, 3, 4], 2)) == [5, 6]


def test_a_prompt_does_not_help_other_requests(make: type[SuffixProposer]):
    proposer = make()
    propose(proposer, list(range(100, 150)), num_prompt=49, id="done")
    proposer.finish("done")
    assert propose(proposer, [1, 105, 106, 107]) is None


def test_a_running_answer_helps_other_requests(make: type[SuffixProposer]):
    proposer, tokens = make(), [0]
    for token in range(100, 100 + PUBLISH_TOKENS):
        assert propose(proposer, [1, 105, 106, 107], id="other") is None
        tokens.append(token)
        assert propose(proposer, tokens, num_prompt=1, id="running") is None
    assert tokens_of(propose(proposer, [1, 105, 106, 107], id="other")) == [108, 109, 110, 111]


def test_tenants_do_not_influence_each_other(make: type[SuffixProposer]):
    texts = random_texts(40, 120)
    alone, shared = make(), make()
    for nth, text in enumerate(texts):
        salt = b"one" if nth % 2 else b"two"
        drafts = propose(shared, text, id=str(nth), salt=salt)
        if nth % 2:
            assert drafts == propose(alone, text, id=str(nth), salt=salt)
            alone.finish(str(nth))
        shared.finish(str(nth))
    finish_answer(shared, range(100, 120), salt=b"one")
    assert propose(shared, [104, 105, 106], salt=b"two", id="x") is None
    assert propose(shared, [104, 105, 106], salt=b"", id="y") is None
    assert propose(shared, [104, 105, 106], salt=b"one", id="z") is not None


def test_an_id_that_is_used_again_by_another_tenant_begins_again(make: type[SuffixProposer]):
    proposer = make()
    propose(proposer, [1, 2, 3, 4], salt=b"one")
    assert propose(proposer, [5, 1, 2, 3], salt=b"two") is None


def test_the_least_recent_tenant_is_dropped(make: type[SuffixProposer]):
    proposer = make(max_tenants=2)
    for salt in (b"one", b"two", b"one", b"three"):
        finish_answer(proposer, range(100, 120), salt=salt)
        assert len(proposer._tenants) <= 2
    found = {salt: propose(proposer, [104, 105, 106], salt=salt, id=str(salt)) for salt in (b"one", b"two", b"three")}
    assert [salt for salt, drafts in found.items() if drafts] == [b"one", b"three"]


@pytest.mark.parametrize("limits", [{"max_tenants": 0}, {"tenant_tokens": 0}])
def test_without_tenants_no_answer_is_kept(make: type[SuffixProposer], limits: dict[str, int]):
    proposer = make(**limits)
    finish_answer(proposer, range(100, 300))
    assert propose(proposer, [104, 105, 106]) is None


def test_a_tenant_forgets_its_oldest_answers(make: type[SuffixProposer]):
    proposer = make(tenant_tokens=1000)
    for nth in range(40):
        finish_answer(proposer, range(1000 * nth, 1000 * nth + 90), id=str(nth))
        assert len(proposer._tenants[b""]) <= 1000
    assert propose(proposer, [5, 6, 7], id="x") is None
    assert tokens_of(propose(proposer, [39_005, 39_006, 39_007], 1, id="y")) == [39_008]


def test_reset_forgets_requests_and_keeps_answers(make: type[SuffixProposer]):
    proposer = make()
    finish_answer(proposer, range(100, 120))
    propose(proposer, [1, 2, 3, 4], id="running")
    proposer.reset()
    proposer.finish("running")
    assert propose(proposer, [1, 2, 3], id="x") is None
    assert propose(proposer, [104, 105, 106], id="y") is not None


def test_an_unknown_request_may_finish(make: type[SuffixProposer]):
    make().finish("never seen")


def test_a_prediction_is_proposed_from_the_first_token(make: type[SuffixProposer]):
    proposer, tokens, prediction = make(), [1, 2], [50, 51, 52, 53, 54, 55]
    while len(tokens) < 8:
        drafts = propose(proposer, tokens, num_prompt=2, prediction=prediction)
        expected = prediction[len(tokens) - 2 :][:4]
        assert tokens_of(drafts)[: len(expected)] == expected
        assert drafts is not None
        assert drafts.odds[0] > 0.85
        tokens.append(expected[0])
    assert propose(proposer, tokens, num_prompt=2, prediction=prediction) is None


def test_a_prediction_is_not_joined_to_the_prompt(make: type[SuffixProposer]):
    drafts = propose(make(), [7, 8, 9, 50, 51], num_prompt=3, prediction=[50, 51])
    assert drafts is None
    assert propose(make(), [1, 50, 51], 4, num_prompt=1, prediction=[9, 50, 51]) is None


def test_an_answer_finds_its_way_back_to_the_prediction(make: type[SuffixProposer]):
    prediction = list(range(50, 90))
    answer = [*prediction[:10], 1, 2, 3, *prediction[20:24]]
    drafts = propose(make(), [7, *answer], num_prompt=1, prediction=prediction)
    assert tokens_of(drafts) == prediction[24:28]


@needs_native
def test_a_replaced_token_does_not_end_a_prediction():
    prediction = list(range(50, 90))
    drafts = propose(SuffixProposer(), [7, *prediction[:10], 1], num_prompt=1, prediction=prediction)
    assert tokens_of(drafts) == prediction[11:15]


def test_the_largest_token_id_is_a_token(make: type[SuffixProposer]):
    text = [MAX_TOKEN, 0, MAX_TOKEN - 1, MAX_TOKEN, 0]
    assert tokens_of(propose(make(), text, 1)) == [MAX_TOKEN - 1]


@needs_native
@pytest.mark.parametrize("token", [-1, 2**31, 2**32, 2**64, "1", None, 1.5])
def test_what_is_no_token_is_refused(token: Any):
    proposer = SuffixProposer()
    with pytest.raises((ValueError, TypeError, OverflowError)):
        proposer.propose([Context("a", [1, token], 0, b"")], [3])
    assert tokens_of(propose(proposer, [1, 2, 1], 1)) == [2]


@needs_native
def test_equal_tokens_stay_fast():
    proposer, tokens = SuffixProposer(), [7] * 100_000
    start = perf_counter()
    for _ in range(100):
        tokens.append(7)
        assert tokens_of(propose(proposer, tokens, 5)) == [7] * 5
    assert perf_counter() - start < 1.0


@needs_native
def test_memory_stays_within_40_bytes_a_token():
    draw = random.Random(0)
    text = [draw.randrange(1000) for _ in range(100_000)]
    for size in (1000, 5000, 20_000, 32_768, 33_000, 100_000):
        at_once = MODULE.RequestText(1, [], 0)
        MODULE.propose_repeats([at_once], [None], [text[:size]], [0], False)
        assert at_once.num_bytes <= 40 * size
    tokens, growing = list[int](), MODULE.RequestText(1, [], 0)
    while len(tokens) < 40_000:
        tokens += text[len(tokens) : len(tokens) + 50]
        MODULE.propose_repeats([growing], [None], [tokens], [0], False)
        assert growing.num_bytes <= 40 * max(len(tokens), 200)
    assert MODULE.TenantText(65536).num_bytes <= 40 * 65536


@needs_native
def test_a_tenants_text_is_a_ring_of_answers():
    """Random answers of several requests in pieces, against a list of (owner, token)."""
    for seed in range(20):
        draw = random.Random(seed)
        limit = draw.choice((20, 64, 100))
        tenant, ring = MODULE.TenantText(limit), list[tuple[int, int | None]]()
        requests = {owner: MODULE.RequestText(owner, [], 2) for owner in range(1, 5)}
        texts: dict[int, list[int]] = {owner: [draw.randrange(3), draw.randrange(3)] for owner in requests}
        published = dict.fromkeys(requests, 2)
        for _ in range(150):
            owner = draw.choice(list(requests))
            request, text = requests[owner], texts[owner]
            text += [draw.randrange(3) for _ in range(draw.randrange(1, 6))]
            MODULE.publish_answer(request, tenant, text)
            is_next = published[owner] > 2 and bool(ring) and ring[-1][0] == owner
            start = published[owner] - (0 if is_next else min(OVERLAP, published[owner]))
            if ring and ring[-1][0] != owner:
                ring.append((0, None))
            ring = (ring + [(owner, token) for token in text[start:]])[-limit:]
            published[owner] = len(text)
            assert len(tenant) == len(ring)
            check_tenant(draw.choice(list(requests.items())), texts, tenant, ring)


def check_tenant(
    pair: tuple[int, Any], texts: dict[int, list[int]], tenant: Any, ring: list[tuple[int, int | None]]
) -> None:
    owner, request = pair
    if not len(request):
        return
    tail = texts[owner][: len(request)]
    tokens = [token for _, token in ring]
    expected = []
    for at, length in reference_occurrences(tokens, tail):
        if ring[at - 1][0] != owner:
            expected.append((tokens[at] if at < len(tokens) else None, length))
    assert request.occurrences(tenant, ALL) == expected


def test_random_use_gives_valid_drafts(make: type[SuffixProposer]):
    draw = random.Random(5)
    proposer = make(max_tenants=3, tenant_tokens=200)
    texts: dict[str, list[int]] = {}
    for _ in range(600):
        ids = draw.sample([str(nth) for nth in range(12)], draw.randrange(1, 6))
        contexts = []
        for id in ids:
            text = texts.setdefault(id, [])
            if draw.random() < 0.05:
                del text[draw.randrange(len(text) + 1) :]
            text += [draw.choice((0, 1, 2, MAX_TOKEN)) for _ in range(draw.randrange(30))]
            contexts.append(Context(id, text, min(5, len(text)), id.encode()[-1:], [0, 1, 2] * 5))
        limits = [draw.randrange(70) for _ in ids]
        for drafts, limit in zip(proposer.propose(contexts, limits), limits, strict=True):
            check(drafts, limit)
        if draw.random() < 0.3:
            done = draw.choice(ids)
            proposer.finish(done)
            del texts[done]
        if draw.random() < 0.02:
            proposer.reset()


def test_threads_may_share_a_proposer(make: type[SuffixProposer]):
    proposer = make(max_tenants=2, tenant_tokens=300)
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for nth in range(30):
                tokens = [draw.randrange(4) for _ in range(50)]
                for _ in range(10):
                    propose(proposer, tokens, id=f"{seed} {nth}", salt=bytes([nth % 3]))
                    tokens += [draw.randrange(4) for _ in range(9)]
                proposer.finish(f"{seed} {nth}")
        except BaseException as error:
            failed.append(error)

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
