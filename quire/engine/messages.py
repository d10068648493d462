"""What the server's process and the engine's say to each other: typed messages, each a length and msgpack.

Neither side trusts the other's bytes further than their types: whatever does not decode ends the connection. Updates
and sampling parameters cross as they are; a Request never does, an `Order` for one goes instead.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

import msgspec

from quire.config import EngineConfig
from quire.core.constraint import Constraint, StopMatcher
from quire.core.params import SamplingParams
from quire.core.plan import Update
from quire.core.request import Request

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30


class Order(msgspec.Struct, array_like=True, frozen=True):
    """A request to be made in the engine's process, from its beginning or from the tokens that it already has."""

    id: str
    prompt: list[int]
    params: SamplingParams
    end_token_ids: list[int]
    bad_word_ids: list[list[int]]
    seed: int
    priority: int
    salt: bytes
    tenant: str
    max_tokens: int
    leader: str | None
    output: list[int]
    num_scored: int

    @classmethod
    def of(cls, request: Request, own_id: str, leader_id: str | None, output: list[int], num_scored: int) -> Order:
        """For the request with the id that it has on the wire; so does its leader."""
        return cls(
            own_id,
            list(request.prompt),
            request.params,
            list(request.end_token_ids),
            [list(word) for word in request.bad_word_ids],
            request.seed,
            request.priority,
            request.salt,
            request.tenant,
            request.max_tokens,
            leader_id,
            output,
            num_scored,
        )

    def request(
        self,
        known: Mapping[str, Request],
        constraint: Constraint | None = None,
        stop_matcher: StopMatcher | None = None,
    ) -> Request:
        """Its leader is among the `known` requests, or has ended."""
        return Request(
            self.id,
            self.prompt,
            self.params,
            end_token_ids=frozenset(self.end_token_ids),
            bad_word_ids=tuple(tuple(word) for word in self.bad_word_ids),
            seed=self.seed,
            priority=self.priority,
            salt=self.salt,
            tenant=self.tenant,
            max_tokens=self.max_tokens,
            leader=known.get(self.leader) if self.leader else None,
            output=self.output,
            num_scored=self.num_scored,
            constraint=constraint,
            stop_matcher=stop_matcher,
        )


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first message: load this model."""

    config: EngineConfig
    path: str


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Orders that belong together: all are taken, or all refused."""

    orders: list[Order]


class Abort(msgspec.Struct, tag=True, frozen=True):
    id: str


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Answered by a Stepped, as soon as the step that runs now has ended."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded."""

    vocab_size: int
    max_len: int
    max_requests: int
    eos_token_ids: list[int]
    num_blocks: int
    device: str
    summary: str
    sampling: dict[str, int | float]  # the model's own SamplingParams, for what a request does not say


class Unusable(msgspec.Struct, tag=True, frozen=True):
    """The model could not be loaded; the process ends."""

    error: str  # a class of errors.py
    message: str


class Adding(msgspec.Struct, tag=True, frozen=True):
    """Orders that are about to be taken in. Any later message says that they were."""

    ids: list[str]


class Began(msgspec.Struct, tag=True, frozen=True):
    """Requests that the step about to run computes for the first time."""

    ids: list[str]


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Orders that were submitted together and could not be taken."""

    ids: list[str]
    error: str
    message: str


class Stepped(msgspec.Struct, tag=True, frozen=True):
    """What a step brought, how long it took, and how the engine stands. Totals count from the engine's start."""

    updates: list[Update] = []
    step_s: float | None = None
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0


ToEngine = Start | Submit | Abort | Ping
ToServer = Ready | Unusable | Adding | Began | Refused | Stepped

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_server = msgspec.msgpack.Decoder(ToServer)


def encode(message: ToEngine | ToServer) -> bytes:
    payload = _encoder.encode(message)
    return LENGTH.pack(len(payload)) + payload


def decode_for_engine(payload: bytes) -> ToEngine:
    message: ToEngine = _to_engine.decode(payload)
    return message


def decode_for_server(payload: bytes) -> ToServer:
    message: ToServer = _to_server.decode(payload)
    return message


class Frames:
    """Cuts a stream of bytes into messages; a message that has not arrived whole stays."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._bytes += data
        while len(self._bytes) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes)
            if length > MAX_FRAME_BYTES:
                raise msgspec.DecodeError(f"a message of {length} bytes")
            end = LENGTH.size + length
            if len(self._bytes) < end:
                return
            payload = bytes(self._bytes[LENGTH.size : end])
            del self._bytes[:end]
            yield payload
