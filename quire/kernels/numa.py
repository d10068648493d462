"""NUMA nodes: which cores are near which memory. Ranks are pinned to nodes, so that each reads its weights nearby.

Linux describes the nodes in /sys. On other systems there is one node.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def read_nodes(folder: Path = NODES) -> list[set[int]]:
    """The cores of each node that has any, in the order of their numbers."""
    lists = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
    nodes = [parse_cores(path.read_text()) for path in lists]
    return [cores for cores in nodes if cores]


def parse_cores(text: str) -> set[int]:
    """'0-3,8' -> {0, 1, 2, 3, 8}"""
    cores: set[int] = set()
    for entry in filter(None, text.strip().split(",")):
        first, _, last = entry.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def rank_cores(rank: int, size: int, nodes: Sequence[Collection[int]], allowed: Collection[int]) -> set[int] | None:
    """The cores to which a rank is pinned. None: the process may use one node only."""
    usable = [own for own in (set(cores) & set(allowed) for cores in nodes) if own]
    if len(usable) < 2:
        return None
    return usable[rank * len(usable) // size]


def pin_thread(cores: Collection[int] | None) -> None:
    """Let the calling thread, and those that it starts, run on these cores only."""
    if cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def allowed_cores() -> set[int]:
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()
