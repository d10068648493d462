"""Server-sent events, cut out of a body as it arrives. Knows lines and fields, not what the data mean."""

from __future__ import annotations


class EventReader:
    """Gives the data of each event as soon as the empty line after it is there.

    Lines end in LF, CRLF or CR. Comments, and fields other than `data`, are dropped; several data lines are one value.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._after_return = False

    def feed(self, body: bytes) -> list[bytes]:
        if self._after_return or b"\r" in body:
            body = self._unify(body)
        *blocks, self._rest = (self._rest + body).split(b"\n\n")
        return [data for block in blocks if (data := data_of(block)) is not None]

    def _unify(self, body: bytes) -> bytes:
        """Every line end as LF. A CR ends its line at once; an LF that follows it later belongs to it."""
        if self._after_return and body.startswith(b"\n"):
            body = body[1:]
            self._after_return = False
        if body:
            self._after_return = body.endswith(b"\r")
        return body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def data_of(block: bytes) -> bytes | None:
    """An event's data, or None if it has none."""
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    values = [line[5:] for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(value.removeprefix(b" ") for value in values) if values else None
