"""What no route's fields can see: text that JSON can write, and nothing else can. Every route depends on `check_text`.

Half of a surrogate pair is a valid escape in JSON, but no character: it could be neither tokenized nor sent back.
"""

from __future__ import annotations

import json
import re

from fastapi import Request

from quire.errors import InvalidField

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def check_text(request: Request) -> None:
    body = await request.body()
    if not SURROGATE.search(body):
        return
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidField("The body has half a character: an escape from \\uD800 to \\uDFFF alone.", "body") from None
    except (ValueError, RecursionError):
        return  # not JSON at all, which the route will say
