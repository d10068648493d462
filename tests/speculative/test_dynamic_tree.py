"""Trees that grow where they are likeliest to be reached."""

from __future__ import annotations

import pytest

from quire.core.drafts import ROOT
from quire.speculative.draft_tree import CONFIDENT
from quire.speculative.dynamic_tree import DynamicTree

pytestmark = pytest.mark.core


def make_tree() -> DynamicTree:
    tree = DynamicTree()
    tree.add([(ROOT, [(0.5, 10), (0.3, 11), (0.1, 12)])])
    tree.add([(0, [(0.9, 20), (0.05, 21)]), (1, [(0.8, 20), (0.01, 22)])])
    return tree


def test_the_likeliest_of_the_deepest_nodes_are_chosen() -> None:
    tree = DynamicTree()
    tree.add([(ROOT, [(0.2, 10), (0.5, 11), (0.1, 12)])])
    assert tree.likeliest(2) == [1, 0]
    tree.add([(1, [(0.4, 20)]), (0, [(0.9, 21), (0.3, 22)])])
    assert tree.likeliest(2) == [3, 4]
    tree.add([])
    assert tree.likeliest(2) == []


def test_nodes_that_are_hardly_ever_reached_are_left_out() -> None:
    assert make_tree().tokens == [10, 11, 12, 20, 21, 20]


def test_the_likeliest_nodes_are_drafted() -> None:
    drafts = make_tree().drafts(4)
    assert drafts.tokens == [10, 20, 11, 20]
    assert drafts.parents == [ROOT, 0, ROOT, 2]
    assert drafts.odds == pytest.approx([CONFIDENT * chance for chance in (0.5, 0.9, 0.3, 0.8)])
    assert len(make_tree().drafts(100)) == 6
    assert make_tree().drafts(1).tokens == [10]


def test_certain_nodes_follow_their_parents() -> None:
    tree = DynamicTree()
    tree.add([(ROOT, [(1.0, 1)])])
    tree.add([(0, [(1.0, 2)])])
    tree.add([(1, [(1.0, 3)])])
    drafts = tree.drafts(3)
    assert drafts.tokens == [1, 2, 3]
    assert drafts.is_chain


def test_an_empty_tree() -> None:
    tree = DynamicTree()
    assert tree.likeliest(3) == []
    assert len(tree.drafts(4)) == 0
