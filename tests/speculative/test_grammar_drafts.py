"""Drafts of constrained requests: cut to what a grammar allows, extended by what it forces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.core.drafts import ROOT, Drafts
from quire.speculative.grammar_drafts import FOLLOWING_ODDS, NEXT_ODDS, find_trunk, fit_to_grammar, follow

pytestmark = pytest.mark.cpu


class Words:
    """A constraint that allows a few sequences of tokens."""

    error = ""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._sequences = [list(sequence) for sequence in sequences]

    def allowed(self) -> bytes:
        raise NotImplementedError

    def advance(self, token: int) -> None:
        self._sequences = [sequence[1:] for sequence in self._sequences if sequence[:1] == [token]]

    def forced(self) -> list[int]:
        state, forced = self.copy(), []
        while len(firsts := {tuple(sequence[:1]) for sequence in state._sequences}) == 1 and (only := firsts.pop()):
            forced.append(only[0])
            state.advance(only[0])
        return forced

    def num_allowed(self, tokens: Sequence[int]) -> int:
        state = self.copy()
        for index, token in enumerate(tokens):
            state.advance(token)
            if not state._sequences:
                return index
        return len(tokens)

    def copy(self) -> Words:
        return Words(self._sequences)


def paths(tree: Drafts | None) -> set[tuple[int, ...]]:
    assert tree is not None
    return {tuple(tree.path_tokens(node)) for node in range(len(tree))}


def test_forced_tokens_are_drafts() -> None:
    tree = fit_to_grammar(None, Words([[1, 2, 3, 4], [1, 2, 3, 5]]), [9, 9], 10)
    assert tree is not None
    assert (tree.tokens, tree.odds, tree.parents, tree.source) == ([1, 2, 3], [1.0] * 3, None, "grammar")


def test_without_drafts_and_forced_tokens_there_is_none() -> None:
    constraint = Words([[1, 2], [3, 4]])
    assert fit_to_grammar(None, constraint, [9], 10) is None
    assert fit_to_grammar(Drafts([7], None, [0.9]), constraint, [9], 10) is None
    assert fit_to_grammar(None, Words([[1, 2]]), [9], 0) is None


def test_refused_nodes_are_left_out_and_the_likeliest_path_is_extended() -> None:
    tree = Drafts([1, 7, 3, 8], [ROOT, ROOT, ROOT, 0], [0.5, 0.4, 0.1, 0.9], "suffix")
    fitted = fit_to_grammar(tree, Words([[1, 2, 5, 6], [3, 4, 5]]), [9], 10)
    assert fitted is not None
    assert paths(fitted) == {(1,), (3,), (1, 2), (1, 2, 5), (1, 2, 5, 6)}
    by_path = {tuple(fitted.path_tokens(node)): node for node in range(len(fitted))}
    assert [fitted.source_of(by_path[path]) for path in ((1,), (3,), (1, 2))] == ["suffix", "suffix", "grammar"]
    assert [fitted.odds[by_path[path]] for path in ((1,), (3,), (1, 2, 5, 6))] == [0.5, 0.1, 1.0]


def test_a_chain_that_is_extended_stays_right() -> None:
    fitted = fit_to_grammar(Drafts([1, 2, 9], None, [0.5] * 3, "suffix"), Words([[1, 2, 5, 6, 7]]), [0], 4)
    assert fitted is not None
    assert [fitted.path_tokens(node) for node in range(len(fitted))] == [[1], [1, 2], [1, 2, 5], [1, 2, 5, 6]]
    assert [fitted.source_of(node) for node in range(4)] == ["suffix", "suffix", "grammar", "grammar"]


def test_what_follows_forced_tokens_is_taken_from_the_text_and_must_be_allowed() -> None:
    """The text has 1 2 3 8: after the forced 1 2, 3 is allowed and 8 is not."""
    constraint = Words([[1, 2, 3, 4], [1, 2, 5, 4]])
    fitted = fit_to_grammar(None, constraint, [0, 1, 2, 3, 8, 0], 10)
    assert fitted is not None
    assert (fitted.tokens, fitted.odds) == ([1, 2, 3], [1.0, 1.0, FOLLOWING_ODDS[2]])
    fitted = fit_to_grammar(None, constraint, [0, 1, 2, 3, 8, 0], 2)
    assert fitted is not None
    assert fitted.tokens == [1, 2]


def test_the_last_occurrence_of_two_tokens_counts_before_that_of_one() -> None:
    assert follow([5, 6, 7, 5, 6, 8, 9, 6, 1, 5, 6], 2) == [(8, FOLLOWING_ODDS[2]), (9, NEXT_ODDS)]
    assert follow([5, 6, 7, 0, 6], 2) == [(7, FOLLOWING_ODDS[1]), (0, NEXT_ODDS)]
    assert follow([5, 6, 7], 2) == []
    assert follow([5, 6, 5, 6], 0) == []
    assert follow([6], 2) == []


def test_the_trunk_is_the_path_of_the_likeliest_children() -> None:
    tree = Drafts([1, 2, 3, 4], [ROOT, ROOT, 1, 1], [0.2, 0.7, 0.1, 0.3])
    assert find_trunk(tree) == [1, 3]
    assert find_trunk(Drafts([])) == []
