"""What commands print on stderr: lines for the person at the terminal, and errors. Loads nothing else of quire."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def say(text: str) -> None:
    """Print a line on stderr, for the person at the terminal. An answer on stdout does not depend on it."""
    if sys.stderr is not None:  # it is None where the command was started with a closed stderr
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def discard_output() -> None:
    """Text that could not be written must not be written again when the interpreter exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


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
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF):
            raise
        say(f"error: the output cannot be written: {error.strerror}")
        discard_output()
        raise SystemExit(1) from None
    except Exception as error:
        from quire.errors import QuireError

        if not isinstance(error, QuireError):
            raise
        say(f"error: {error}")
        raise SystemExit(2 if error.status == 400 else 1) from None
