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
        drawn: list[tuple[Any, Any]] = []

        def report(done: int, total: int | None) -> None:
            if not enabled or not sys.stderr.isatty():
                return
            if not drawn:
                progress = until_done.enter_context(make_bar(unit))
                drawn.append((progress, progress.add_task(what, total=total)))
            progress, task = drawn[0]
            progress.update(task, completed=done, total=total)

        yield report


def make_bar(unit: str) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn(elapsed_when_finished=True))
    return Progress(*columns, console=Console(stderr=True), transient=True)
