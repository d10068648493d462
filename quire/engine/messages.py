"""Messages between the server's process and the engine's: typed structs, each sent as a length and msgpack.

Decoding checks types; a message that does not decode ends the connection. Updates and sampling parameters are sent as
they are. A `Request` is sent as an `EngineRequest`.
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
from quire.engine.live_changes import CacheDescription, LiveChanges
from quire.trace.format import RecordingStart

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30


class EngineRequest(msgspec.Struct, array_like=True, frozen=True):
    """A request to add to the engine. After a restart of the engine it has the tokens that were generated before."""

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
    prediction: list[int]
    submitted_s: float

    @classmethod
    def of(
        cls,
        request: Request,
        wire_id: str,
        leader_id: str | None,
        output: list[int],
        num_scored: int,
        submitted_s: float,
    ) -> EngineRequest:
        """`wire_id` and `leader_id` are the ids that the supervisor gave to the request and its leader."""
        return cls(
            wire_id,
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
            list(request.prediction),
            submitted_s,
        )

    def to_request(
        self,
        known: Mapping[str, Request],
        constraint: Constraint | None = None,
        stop_matcher: StopMatcher | None = None,
    ) -> Request:
        """The leader is one of the `known` requests, or has finished."""
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
            prediction=self.prediction,
            submitted_s=self.submitted_s,
        )


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first message: load a model. With `report_prefixes`, steps report what the prefix tree has. With
    `recording`, they report the lines of a recording."""

    config: EngineConfig
    path: str
    report_prefixes: bool = False
    recording: RecordingStart | None = None


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Requests that are submitted together: all are added, or all refused."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, tag=True, frozen=True):
    id: str


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Answered with a StepOutputs after the current step."""


class Watch(msgspec.Struct, tag=True, frozen=True):
    """Begin to send `LiveChanges`, or begin anew with a snapshot."""

    interval_s: float


class Unwatch(msgspec.Struct, tag=True, frozen=True):
    """Send no more `LiveChanges`."""


class DescribeCache(msgspec.Struct, tag=True, frozen=True):
    """Answered with a `CacheDescription` of the same number. `salt` is that of the prefixes to show; None: of all."""

    number: int
    salt: bytes | None
    max_nodes: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded."""

    vocab_size: int
    max_len: int
    max_requests: int
    eos_token_ids: list[int]
    num_blocks: int
    device: str
    summary: str
    sampling: dict[str, int | float]  # the model's default SamplingParams


class LoadFailed(msgspec.Struct, tag=True, frozen=True):
    """The model could not be loaded; the process ends."""

    error: str  # the name of a class of errors.py
    message: str


class AddingRequests(msgspec.Struct, tag=True, frozen=True):
    """Sent before requests are added. The next message of any type says that adding has ended."""

    ids: list[str]


class FirstScheduled(msgspec.Struct, tag=True, frozen=True):
    """Sent before a step: the requests that it computes for the first time."""

    ids: list[str]


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Requests of one Submit that could not be added."""

    ids: list[str]
    error: str
    message: str


class StepOutputs(msgspec.Struct, tag=True):
    """A step's updates and duration, and the scheduler's state. Totals count from the engine's start."""

    updates: list[Update] = []
    step_s: float | None = None
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    exited_tokens: int = 0  # chosen by an exit
    drafted: dict[str, int] = {}  # drafts that were verified, by proposer
    accepted: dict[str, int] = {}  # those that were right
    speculation_s: float = 0.0  # gained by speculation, minus lost
    published: list[bytes] = []  # digests of blocks in the prefix tree, since the last report
    evicted: list[bytes] = []
    prefixes_lost: bool = False  # the tree was emptied before these changes
    predicted_s: float = 0.0  # total of the steps that were predicted,
    measured_s: float = 0.0  # and what these took
    prediction_error: float | None = None  # median of the last 1,000 of them
    recorded: bytes = b""  # lines of the recording, up to these updates


class Calibrated(msgspec.Struct, tag=True, frozen=True):
    """A new cost of steps has been fitted. `profile` is the JSON document of a `CapacityProfile`."""

    profile: str


ToEngine = Start | Submit | Abort | Ping | Watch | Unwatch | DescribeCache
ToServer = (
    Ready
    | LoadFailed
    | AddingRequests
    | FirstScheduled
    | Refused
    | StepOutputs
    | Calibrated
    | LiveChanges
    | CacheDescription
)

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


class FrameDecoder:
    """Splits a stream of bytes into messages. An incomplete message is kept until the rest arrives."""

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
