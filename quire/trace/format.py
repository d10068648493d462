"""The lines of a recording, as docs/trace.md describes them: JSON objects, each with a `kind`.

Fields that have their default are left out. A reader ignores fields that it does not know, so a field may be added
without a new version. Times (`at`) are seconds since the recording began.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

FORMAT = "quire-trace"
VERSION = 1
PROMPT_BLOCK = 16  # tokens that one digest of an anonymous prompt stands for

MAX_COUNT = 2**31 - 1
MAX_ROWS = 1 << 16  # of a step
MAX_TOKENS = 1 << 24  # of a prompt or an answer

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Meta(ge=-1e9, le=1e9)]
Id = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=1 << 16)]
Tokens = Annotated[list[Count], Meta(max_length=MAX_TOKENS)]
Ids = Annotated[list[Id], Meta(max_length=MAX_ROWS)]
Column = Annotated[list[Count], Meta(max_length=MAX_ROWS)]
Digests = Annotated[list[Id], Meta(max_length=MAX_TOKENS // PROMPT_BLOCK + 1)]


class Line(Struct, tag_field="kind", omit_defaults=True, gc=False):
    """A line of any kind."""


class Header(Line, tag="header", kw_only=True):
    """The first line. `digest` is that of the model's files (`store/digest.py`)."""

    format: str
    version: Count
    quire: Text
    started: Text  # UTC
    model: Text
    digest: Text
    anonymous: bool = False
    replicas: Count = 1


class EngineStart(Line, tag="engine", kw_only=True):
    """An engine has loaded the model: the first one of a replica, or one that replaces another that ended."""

    replica: Count = 0
    at: Seconds
    config: dict[str, Any]  # all options of EngineConfig
    kernels: Text
    exact: bool  # an answer's bits do not depend on what else is in the batch
    machine: dict[str, Any]
    block_size: Count
    num_blocks: Count
    max_len: Count
    max_requests: Count
    max_step_tokens: Count
    vocab_size: Count


class Arrival(Line, tag="request", kw_only=True):
    """A request. One with a `leader` is a further answer to the leader's prompt: what is left out is the leader's.

    `prompt` has token ids. An anonymous recording has `num_prompt`, and in `blocks` a digest for each 16 tokens and
    one for the rest.
    """

    id: Id
    name: Text = ""  # the id that the server's log and its clients know
    replica: Count = 0
    at: Seconds
    seed: Annotated[int, Meta(ge=0)]
    leader: Id | None = None
    tenant: str = ""
    priority: Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)] = 0
    max_tokens: Count = 0
    prompt: Tokens | None = None
    num_prompt: Count = 0
    blocks: Digests | None = None
    params: dict[str, Any] = {}  # the fields of SamplingParams that differ from its defaults
    end_token_ids: Tokens = []
    bad_word_ids: Annotated[list[Tokens], Meta(max_length=MAX_ROWS)] = []
    prediction: Tokens = []


class Resume(Line, tag="resume", kw_only=True):
    """An engine has taken a request over, with the tokens that it has so far."""

    id: Id
    replica: Count = 0
    at: Seconds
    output: Tokens | None = None
    num_output: Count = 0


class Step(Line, tag="step", kw_only=True):
    """A plan, and what came of it. Row i computes `counts[i]` tokens of `requests[i]` from position `starts[i]`, and
    samples at the last `yields[i]` of them.

    `tokens` has the new tokens of each request that got any; an anonymous recording has `num_tokens`. A plan that
    failed has neither.
    """

    replica: Count = 0
    step: Annotated[int, Meta(ge=0)]
    at: Seconds  # when it was planned
    done: Seconds  # when it was committed
    seconds: Seconds | None = None  # its duration, where the runner measures it
    requests: Ids
    starts: Column
    counts: Column
    yields: Column
    drafts: dict[Count, Count] = {}  # row -> number of drafts
    swap_out: Count = 0  # blocks
    swap_in: Count = 0
    copies: Count = 0
    tokens: dict[Id, Tokens] = {}
    num_tokens: dict[Id, Count] = {}
    failed: bool = False


class End(Line, tag="end", kw_only=True):
    """A request has ended. `abort`: its caller ended it, or a stop string or a time limit did."""

    id: Id
    replica: Count = 0
    at: Seconds
    finish: Text
    cached: Count = 0  # prompt tokens found in the cache
    preemptions: Count = 0
    drafted: Count = 0
    accepted: Count = 0
    message: Text = ""
    beams: list[Tokens] | None = None  # the answers of a beam search
    beam_lengths: list[Count] | None = None  # the same in an anonymous recording


class Reset(Line, tag="reset", kw_only=True):
    """The plans in flight were dropped. Their requests are computed anew."""

    replica: Count = 0
    at: Seconds


class Restart(Line, tag="restart", kw_only=True):
    """The engine of a replica has ended, and another one will be started."""

    replica: Count = 0
    at: Seconds
    reason: Text = ""


class Close(Line, tag="close", kw_only=True):
    """The last line of a recording that ended as it should."""

    at: Seconds


AnyLine = Header | EngineStart | Arrival | Resume | Step | End | Reset | Restart | Close


class RecordingStart(Struct, frozen=True, kw_only=True):
    """What an engine needs to know to record: sent with the first message to its process."""

    begin_s: float  # of `time.monotonic`, which the processes of a machine share
    key: bytes  # of digests; it is never written
    anonymous: bool = False
    replica: int = 0


_encoder = msgspec.json.Encoder()
decoder: msgspec.json.Decoder[AnyLine] = msgspec.json.Decoder(AnyLine)


def encode(line: Line) -> bytes:
    return _encoder.encode(line) + b"\n"
