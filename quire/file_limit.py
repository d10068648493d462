"""The limit on open files. Every connection of the server, and of its benchmark, is an open file."""

from __future__ import annotations

import logging
import resource

MAX_FILES = 1_048_576  # for systems without a limit

log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raise the limit on open files to its maximum and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit on open files stays at %d, it cannot be raised to %d: %s", soft, wanted, error)
        return soft
    log.info("the limit on open files is raised from %d to %d", soft, wanted)
    return wanted
