"""Progress bars on stderr: downloads, loading, long batches. Nothing is drawn when nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[int, int | None], None]


@contextmanager
def bar(what: str, *, unit: str = "bytes", enabled: bool = True) -> Iterator[Report]:
    """Yields a function to call with (done, total); the bar appears with the first call."""
    if not enabled or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn(elapsed_when_finished=True))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, start=True, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
