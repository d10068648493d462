"""Drafts of a constrained request: cut to what its grammar allows, and extended by what the grammar forces.

Where a grammar leaves one choice, as in the rest of a required key, its tokens cannot be wrong. What follows them is
taken from the request's own text, where the same tokens occurred last: a schema in the prompt has the key and a colon.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.constraint import Constraint
from quire.core.drafts import ROOT, Drafts
from quire.speculative.draft_tree import UNKNOWN_ODDS, keep_allowed

SOURCE = "grammar"
FORCED_ODDS = 1.0
FOLLOWING_ODDS = {2: 0.8, 1: 0.5}  # by the number of tokens that match; then NEXT_ODDS for each further token
NEXT_ODDS = 0.6
MAX_FOLLOWING = 4
MAX_SCANNED = 2048  # of the request's last tokens


def fit_to_grammar(
    tree: Drafts | None, constraint: Constraint, tokens: Sequence[int], max_drafts: int
) -> Drafts | None:
    """The allowed nodes of a tree, which may be None, with forced tokens and what may follow them at the end of its
    likeliest path. `tokens` are those of the request."""
    if max_drafts < 1:
        return None
    fitted = Drafts([], source=SOURCE) if tree is None else keep_allowed(tree, constraint)
    fitted.odds = fitted.odds or [UNKNOWN_ODDS] * len(fitted)
    trunk = find_trunk(fitted)
    path = [fitted.tokens[node] for node in trunk]
    forced = force(constraint, path)[: max_drafts - len(path)]
    if forced:
        following = follow([*tokens[-MAX_SCANNED:], *path, *forced], max_drafts - len(path) - len(forced))
        num_allowed = constraint.num_allowed([*path, *forced, *(token for token, _ in following)])
        added = [*((token, FORCED_ODDS) for token in forced), *following]
        append_chain(fitted, trunk[-1] if trunk else ROOT, added[: num_allowed - len(path)])
    return fitted if len(fitted) else None


def find_trunk(tree: Drafts) -> list[int]:
    """The nodes of the likeliest path."""
    best: dict[int, int] = {}
    for node in range(len(tree)):
        parent = tree.parent(node)
        if parent not in best or tree.odds[node] > tree.odds[best[parent]]:
            best[parent] = node
    trunk: list[int] = []
    following = best.get(ROOT)
    while following is not None:
        trunk.append(following)
        following = best.get(following)
    return trunk


def append_chain(tree: Drafts, parent: int, added: Sequence[tuple[int, float]]) -> None:
    """Append tokens with their odds, the first one as a child of `parent`."""
    if not added:
        return
    if len(tree):
        tree.sources = [tree.source_of(node) for node in range(len(tree))] + [SOURCE] * len(added)
        tree.parents = [tree.parent(node) for node in range(len(tree))]
        tree.parents += [parent, *range(len(tree), len(tree) + len(added) - 1)]
    tree.tokens += [token for token, _ in added]
    tree.odds += [odds for _, odds in added]


def force(constraint: Constraint, path: Sequence[int]) -> list[int]:
    """The tokens that the grammar forces after a path that it allows."""
    if not path:
        return list(constraint.forced())
    state = constraint.copy()
    for token in path:
        state.advance(token)
    return list(state.forced())


def follow(tokens: Sequence[int], count: int) -> list[tuple[int, float]]:
    """(token, odds) of what followed the last two tokens where they occurred before, or else the last one."""
    count, last = min(count, MAX_FOLLOWING), len(tokens) - 1
    if count < 1 or last < 1:
        return []
    single = None
    for at in range(last - 1, 0, -1):
        if tokens[at] != tokens[last]:
            continue
        if tokens[at - 1] == tokens[last - 1]:
            return _with_odds(tokens[at + 1 : at + 1 + count], 2)
        if single is None:
            single = at
    return [] if single is None else _with_odds(tokens[single + 1 : single + 1 + count], 1)


def _with_odds(tokens: Sequence[int], num_matched: int) -> list[tuple[int, float]]:
    return [(token, NEXT_ODDS if nth else FOLLOWING_ODDS[num_matched]) for nth, token in enumerate(tokens)]
