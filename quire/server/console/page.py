"""GET /console and its files: HTML, style sheet, modules. They are the same for everyone and need no API key.

The page fetches all it shows from other routes, with the key that the user enters. Its content policy allows nothing
but the files of this folder: no inline code, no other host.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quire.server.router import Router

FOLDER = Path(__file__).parent / "static"
PAGE_PATH = "/console"
FILES_PATH = "/console/static/"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # a browser asks again, and gets a 304 while the file is the same
}

router = Router()


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, as it is sent."""

    body: bytes
    media_type: str
    etag: str


def load_files() -> dict[str, PageFile]:
    """The files by name. A file of another type is left out."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        if media_type := MEDIA_TYPES.get(path.suffix):
            body = path.read_bytes()
            found[path.name] = PageFile(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:24]}"')
    return found


def is_page_file(path: str) -> bool:
    """Whether a path needs neither a key nor a model."""
    return path == PAGE_PATH or path.startswith(FILES_PATH)


@router.head(PAGE_PATH)
@router.get(PAGE_PATH)
async def read_page(request: Request) -> Response:
    return respond(request, "index.html")


@router.head(FILES_PATH + "{name}")
@router.get(FILES_PATH + "{name}")
async def read_file(request: Request, name: str) -> Response:
    return respond(request, name)


def respond(request: Request, name: str) -> Response:
    """The file, or 304 if the browser has it."""
    file = request.app.state.console_files.get(name)
    if file is None:
        raise HTTPException(404, "the console has no such file")
    headers = {**HEADERS, "etag": file.etag}
    if has_tag(request.headers.get("if-none-match", ""), file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.media_type, headers=headers)


def has_tag(header: str, etag: str) -> bool:
    """Whether a header If-None-Match has the tag. A proxy that compresses makes it a weak one."""
    return etag in (tag.strip().removeprefix("W/") for tag in header.split(","))
