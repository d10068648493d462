"""What a recording keeps of secrets: tenants always as digests, and in an anonymous one also prompts and parameters.

Digests are keyed with random bytes that are never written, so they show what is equal and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import fields
from hashlib import blake2b
from typing import Any

from quire.core.params import SamplingParams
from quire.core.structured import StructuredOutputs
from quire.errors import InvalidParams, show
from quire.trace.format import PROMPT_BLOCK

DIGEST_BYTES = 8
# Parameters that hold texts or token ids. An anonymous recording leaves them out.
PRIVATE = (
    "stop", "bad_words", "structured_outputs", "prediction", "logit_bias", "allowed_token_ids", "stop_token_ids",
)  # fmt: skip


def tenant_digest(key: bytes, tenant: str, salt: bytes) -> str:
    """Empty where there is one tenant."""
    if not tenant and not salt:
        return ""
    return blake2b(tenant.encode() + b"\0" + salt, key=key, digest_size=DIGEST_BYTES).hexdigest()


def prompt_digests(key: bytes, tenant: str, tokens: Sequence[int]) -> list[str]:
    """For each PROMPT_BLOCK tokens, and for the rest, a digest of all tokens up to their end."""
    found, above = list[str](), tenant.encode()
    for begin in range(0, len(tokens), PROMPT_BLOCK):
        block = array("Q", tokens[begin : begin + PROMPT_BLOCK]).tobytes()
        above = blake2b(above + block, key=key, digest_size=DIGEST_BYTES).digest()
        found.append(above.hex())
    return found


def describe_params(params: SamplingParams, *, anonymous: bool) -> dict[str, Any]:
    """The parameters that differ from their defaults, as JSON can hold them. The seed is recorded by itself."""
    found: dict[str, Any] = {}
    for field in fields(params):
        value = getattr(params, field.name)
        if value == field.default or field.name == "seed" or (anonymous and field.name in PRIVATE):
            continue
        found[field.name] = value
    return found


def restore_params(given: dict[str, Any]) -> SamplingParams:
    """The parameters of a recorded request. Raises InvalidParams as the constructor does."""
    options = dict(given)
    if isinstance(bias := options.get("logit_bias"), dict):
        try:
            options["logit_bias"] = {int(token): value for token, value in bias.items()}
        except ValueError:
            raise InvalidParams(f"logit_bias is {show(bias)}; its names are token ids.", "logit_bias") from None
    if isinstance(spec := options.get("structured_outputs"), dict):
        options["structured_outputs"] = StructuredOutputs.of({name: value for name, value in spec.items() if value})
    return SamplingParams.of(options)
