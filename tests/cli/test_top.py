"""`quire top` against a server of a few lines: what it draws, what it says, and that the terminal is as it was."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quire.cli.top import apply
from quire.errors import InvalidParams, QuireError, ServerError
from quire.server.metrics import TOTALS
from quire.top.screen import draw
from quire.top.state import ServerState
from quire.top.stream import Lost, Stream

pytestmark = pytest.mark.cpu

STYLE = re.compile(r"\x1b\[[0-9;]*m")
FACTS = {
    "num_blocks": 300, "block_size": 16, "max_requests": 2, "max_tokens_per_step": 64, "batching": "continuous",
    "device": "cpu",
}  # fmt: skip


def row(number: int, **fields: Any) -> dict[str, Any]:
    zeros = dict.fromkeys(
        ["cached_tokens", "computed_tokens", "output_tokens", "blocks", "swapped_blocks", "preemptions"], 0
    )
    return {
        "number": number, "id": f"r{number}-0", "tenant": "", "own": True, "state": "running", "arrived_s": 1.0,
        "prompt_tokens": 1234, "max_tokens": 60, "drafted_tokens": 0, "accepted_tokens": 0, "beams": 1, "wait": None,
        **zeros, **fields,
    }  # fmt: skip


def waiting(number: int, position: int | None = 1, **fields: Any) -> dict[str, Any]:
    wait = {
        "position": position, "resource": "rows", "resources": ["rows"], "sentence": "First in line: 2 of 2 run.",
        "estimate_s": 1.8,
    }  # fmt: skip
    return row(number, state="waiting", wait=wait, **fields)


def step(number: int, **fields: Any) -> dict[str, Any]:
    zeros = dict.fromkeys(["prompt_rows", "prompt_tokens", "draft_rows", "draft_tokens", "admitted", "preempted"], 0)
    times = {"start_s": 1.0, "seconds": 0.01, "predicted_s": 0.008}
    return {"step": number, "failed": False, "decode_rows": 2, **zeros, **times, **fields}


def line(kind: str = "snapshot", sequence: int = 1, replica: int = 0, **fields: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "type": kind, "replica": replica, "sequence": sequence, "time_s": 100.0, "blocks": [], "requests": [],
        "ended": [], "steps": [], "num_running": 0, "num_waiting": 0, "num_free_blocks": 200, "num_cached_blocks": 50,
        "totals": dict.fromkeys(TOTALS, 0.0),
    }  # fmt: skip
    return given | ({"engine": FACTS, "blocks": [1, 300, 0, 0]} if kind == "snapshot" else {}) | fields


HELLO = {"type": "hello", "version": 1, "model": "tiny", "replicas": 1, "masked": False}


def state_of(*lines: dict[str, Any]) -> ServerState:
    state = ServerState()
    for each in (HELLO, *lines):
        state.apply(each)
    return state


def text_of(state: ServerState, width: int = 120, height: int = 40) -> str:
    return "\n".join(draw(state, "http://x", width, height, colored=False))


def test_changes_are_applied() -> None:
    state = state_of(
        line(requests=[row(1), waiting(2)]),
        line("delta", 2, blocks=[1, 2, 2, 1, 3, 1, 1, 0], requests=[row(2)], ended=[{"number": 1, "finish": "stop"}]),
    )
    (engine,) = state.engines
    assert bytes(engine.states[:6]) == bytes([0, 2, 2, 1, 0, 0])
    assert engine.owners[:4] == [0, 1, 1, 0]
    assert (list(engine.rows), engine.rows[2]["state"]) == ([2], "running")


def test_the_picture_has_the_figures() -> None:
    totals = dict.fromkeys(TOTALS, 4.0) | {"output_tokens_total": 1000.0}
    later = line("delta", 2, time_s=101.0, totals=totals | {"output_tokens_total": 1250.0})
    first = line(
        requests=[waiting(2), row(1, blocks=3)], steps=[step(7, prompt_rows=1, prompt_tokens=64)], totals=totals
    )
    text = text_of(state_of(first, later))
    assert "4 run  4 wait  250.0 tokens/s" in text
    assert "300 blocks of 16 tokens: # 100 in use" in text
    assert "step 7: 10.0 ms (predicted 8.0)  64 tokens of 1 prompts  2 decode" in text
    assert "about 1.8 s. First in line: 2 of 2 run." in text
    assert text.index("r1-0") < text.index("r2-0")


def test_the_map_shows_blocks_by_state() -> None:
    blocks = [1, 10, 2, 5, 11, 10, 3, 5, 21, 10, 1, 0, 31, 270, 0, 0]
    text = text_of(state_of(line(blocks=blocks)), width=300)
    assert "#" * 10 + "=" * 10 + "-" * 10 + "." * 270 in text


def test_an_engine_that_is_started_again_says_so() -> None:
    state = state_of(line(), {"type": "engine", "replica": 0, "ready": False, "reason": "signal SIGKILL"})
    assert "The engine has ended (signal SIGKILL)" in text_of(state)
    state.apply(line(sequence=2))
    assert "has ended" not in text_of(state)


def test_what_a_server_sends_cannot_move_the_cursor() -> None:
    state = state_of(line(requests=[row(1, id="\x1b[2J\x07\r\nhidden")]))
    plain = [STYLE.sub("", each) for each in draw(state, "http://x", 120, 40)]
    assert all(each.isprintable() for each in plain)


@pytest.mark.parametrize("seed", range(30))
def test_every_size_fits(seed: int) -> None:
    rng = random.Random(seed)
    rows = [rng.choice([row, waiting])(number) for number in range(rng.randint(0, 50))]
    steps = [step(number, seconds=rng.choice([None, 0.0, 0.5])) for number in range(rng.randint(0, 200))]
    runs, block = list[int](), 1
    while block <= 300:
        count = min(rng.randint(1, 40), 301 - block)
        state = rng.randint(0, 3)
        runs += [block, count, state, rng.randint(1, 9) if state > 1 else 0]
        block += count
    state = state_of(line(requests=rows, steps=steps, num_waiting=rng.randint(0, 400), blocks=runs))
    state.lost = rng.choice(["", "gone"])
    for _ in range(10):
        width, height = rng.randint(1, 200), rng.randint(1, 60)
        for colored in (True, False):
            lines = [STYLE.sub("", each) for each in draw(state, "http://x", width, height, colored=colored)]
            assert len(lines) <= height
            assert max(map(len, lines)) <= width


def test_hidden_requests_are_counted() -> None:
    rows = [row(number) for number in range(20)] + [waiting(number, number) for number in range(20, 60)]
    text = text_of(state_of(line(requests=rows, num_waiting=100)), height=21)
    shown = len(re.findall(r" r\d+-0", text))
    assert f"and {60 - shown + 60} more requests" in text
    assert "running" in text
    assert "waiting" in text


class Server:
    """Answers /console/live with lines, or with a status."""

    def __init__(self) -> None:
        self.status, self.lines, self.keys = 200, [HELLO, line(requests=[row(1), waiting(2)])], list[str | None]()
        self.keeps_open = True
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.keys.append(self.headers["authorization"])
                self.send_response(outer.status)
                self.end_headers()
                if outer.status != 200:
                    self.wfile.write(b'{"error": {"message": "No."}}')
                    return
                self.wfile.write(b"".join(json.dumps(each).encode() + b"\n" for each in outer.lines))
                while outer.keeps_open:
                    time.sleep(0.05)

            def log_message(self, *values: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self.keeps_open = False
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def take_until(stream: Stream, kind: type) -> Any:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        for each in stream.take():
            if isinstance(each, kind):
                return each
        time.sleep(0.02)
    raise AssertionError("nothing came")


@pytest.mark.parametrize(
    ("status", "message"), [(401, "needs an API key"), (404, "--no-console"), (503, "status 503: No.")]
)
def test_refusals_say_what_to_do(server: Server, status: int, message: str) -> None:
    server.status = status
    with pytest.raises(QuireError, match=message):
        Stream(server.url, None)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port"])
def test_wrong_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidParams, match=re.escape(url)):
        Stream(url, None)


def test_a_lost_connection_is_made_again(server: Server) -> None:
    server.keeps_open = False
    stream = Stream(server.url + "/", "the-key")
    assert take_until(stream, dict) == HELLO
    assert take_until(stream, Lost).reason == "the server has closed the connection"
    assert take_until(stream, dict) == HELLO
    stream.close()
    assert set(server.keys) == {"Bearer the-key"}


def top(*arguments: str, **options: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen([sys.executable, "-m", "quire.cli.main", "top", *arguments], **options)


def test_one_picture_as_text(server: Server) -> None:
    with top(server.url, "--once", stdout=subprocess.PIPE, text=True) as process:
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "r1-0" in text
    assert "\x1b" not in text


def test_without_a_terminal_it_says_what_to_do(server: Server) -> None:
    with top(server.url, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        _, message = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--once" in message


@pytest.mark.parametrize("end", ["q", "\x03", "SIGTERM"])
def test_the_terminal_is_restored(server: Server, end: str) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    with top(
        server.url, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=take_terminal
    ) as process:
        shown = read_until(ours, b"r1-0")
        if end == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        else:
            os.write(ours, end.encode())
        shown += read_until(ours, b"\x1b[?1049l")
        code = process.wait(30)
    assert code == (143 if end == "SIGTERM" else 0)
    assert termios.tcgetattr(theirs) == before
    assert shown.index(b"\x1b[?1049h") < shown.index(b"r1-0") < shown.index(b"\x1b[?25h")
    os.close(ours)
    os.close(theirs)


def take_terminal() -> None:
    """Makes standard input the terminal of the new session, so that Ctrl-C reaches it."""
    import fcntl

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read_until(descriptor: int, wanted: bytes) -> bytes:
    shown, end = b"", time.monotonic() + 30
    while wanted not in shown:
        assert time.monotonic() < end, shown
        if select.select([descriptor], [], [], 0.2)[0]:
            shown += os.read(descriptor, 65536)
    return shown


def test_a_block_in_use_whose_owner_is_not_known() -> None:
    """Blocks of a request that has ended stay in use until the plan in flight is committed."""
    lines = draw(state_of(line(blocks=[1, 300, 2, 0])), "http://x", 80, 20)
    assert "300 blocks" in lines[2]


@pytest.mark.parametrize(
    "sent", [7, None, [], {"type": "snapshot"}, {"type": "delta", "replica": 9}, {"type": "hello"}]
)
def test_a_line_that_cannot_be_read_is_an_error_in_words(sent: object) -> None:
    with pytest.raises(ServerError, match="has sent a line that quire top cannot read"):
        apply(sent, ServerState(), "http://x")
