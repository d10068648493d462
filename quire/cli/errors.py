"""What commands print on stderr: lines for the person at the terminal, and errors. Loads nothing else of quire."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """Print a line on stderr, for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def readable_errors() -> Iterator[None]:
    """Print a QuireError as one line and exit with its status. Ctrl-C exits silently."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()  # the reader of stdout has closed it; the interpreter must print no error on exit
        raise SystemExit(141) from None
    except Exception as error:
        from quire.errors import QuireError

        if not isinstance(error, QuireError):
            raise
        say(f"error: {error}")
        raise SystemExit(2 if error.status == 400 else 1) from None
