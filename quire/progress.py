"""Progress bars on stderr for downloads, loading and long batches. Drawn only if stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Report = Callable[[int, int | None], None]


@contextmanager
def bar(what: str, *, unit: str = "bytes", enabled: bool = True) -> Iterator[Report]:
    """Yields a function to call with (done, total). The bar appears at the first call."""
    with ExitStack() as until_done:
        drawn: list[Any] = []

        def report(done: int, total: int | None) -> None:
            if not enabled or sys.stderr is None or not sys.stderr.isatty():
                return
            if not drawn:
                drawn.append(until_done.enter_context(make_bar(what, unit)))
            drawn[0].total = total
            drawn[0].update(done - drawn[0].n)

        yield report


def make_bar(what: str, unit: str) -> Any:
    from tqdm import tqdm

    scale: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    options = scale if unit == "bytes" else {"unit": f" {unit}"}
    return tqdm(desc=what, leave=False, dynamic_ncols=True, file=sys.stderr, **options)
