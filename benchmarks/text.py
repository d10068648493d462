"""The cost of text processing: a chat prompt, stop strings, and the load generator's HTTP parser. Best of several.

python benchmarks/text.py [MODEL]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter

from quire.bench.serve.http_client import ResponseReader
from quire.config import DEFAULT_MODEL
from quire.kernels import isa
from quire.store import resolve
from quire.text.detokenizer import StopStringScanner
from quire.text.templates.chat_template import ChatTemplate
from quire.text.tokenizers.tokenizer import load_tokenizer

REPEATS = 7
MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
PIECES = ["The", " sky", " is", " blue", " because", " of", " Rayleigh", " scattering", ".", "\n"] * 100
STOPS = ["</s>", "\n\nUser:", "<|im_end|>", "Observation:"]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def best_us(work: Callable[[], object], count: int) -> float:
    """Microseconds for one of the `count` items that `work` processes."""

    def once() -> float:
        start = perf_counter()
        work()
        return perf_counter() - start

    return min(once() for _ in range(REPEATS)) / count * 1e6


def measure_template(model: str) -> float:
    tokenizer = load_tokenizer(resolve(model).path)
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    return best_us(lambda: [template.render(MESSAGES) for _ in range(200)], 200)


def measure_stops(num_stops: int) -> float:
    def scan() -> None:
        scanner = StopStringScanner(STOPS[:num_stops])
        for piece in PIECES:
            scanner.scan(piece, may_stop=True)

    return best_us(scan, len(PIECES))


def measure_wire(num_chunks: int = 1000) -> float:
    event = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" sky"}]}\n\n'
    chunk = b"%x\r\n%s\r\n" % (len(event), event)

    def read() -> None:
        reader = ResponseReader()
        reader.feed(HEAD)
        for _ in range(num_chunks):
            reader.feed(chunk)
        reader.feed(b"0\r\n\r\n")
        assert reader.complete

    return best_us(read, num_chunks)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MODEL
    cpu = isa.prepare()
    print(f"{cpu.model}, {cpu.cores} cores: python benchmarks/text.py {model}")
    print(f"chat prompt, one message      {measure_template(model):8.2f} us")
    for num_stops in (1, len(STOPS)):
        print(f"token past {num_stops} stop string(s)   {measure_stops(num_stops):8.2f} us")
    print(f"streamed chunk parsed         {measure_wire():8.2f} us")


if __name__ == "__main__":
    main()
