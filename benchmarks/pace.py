"""The trade-off of `--itl-target-ms`: time between tokens against time to the first token, at one rate of arrivals.

    python benchmarks/pace.py [--rate 30] [--seconds 20] [--targets 10,15,20,26.5,40,80,0]
                              [--longest PROMPT ANSWER] [--model MODEL] [--svg FILE] [--json FILE]

Without --model it uses Llama-3-8B's shapes with random weights on a GPU. All targets are measured on one engine after a
warmup run, with the same requests each time. A target of 0 is no target.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import traffic
from arguments import milliseconds_list, positive
from gpu import LLAMA_3_8B

from quire.config import EngineConfig
from quire.engine.client import InProcess
from quire.store import resolve

WIDTH, HEIGHT, LEFT, TOP, PANEL = 720, 400, 64, 48, 290
COLOURS = {"p50": "#1b6ca8", "p99": "#e08e45"}
STYLE = "text { font: 11px sans-serif; fill: #333; } .title { font-size: 13px; font-weight: bold; }"


class Point(NamedTuple):
    """Milliseconds, each as p50 and p99."""

    target: float
    ttft: dict[str, float]
    itl: dict[str, float]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=positive, default=30.0)
    parser.add_argument("--seconds", type=positive, default=20.0)
    parser.add_argument("--targets", type=milliseconds_list, default="10,15,20,26.5,40,80,0")
    parser.add_argument("--longest", type=int, nargs=2, default=(1024, 512), metavar=("PROMPT", "ANSWER"))
    parser.add_argument("--model")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.longest[0] < traffic.SHORTEST_PROMPT or options.longest[1] < traffic.SHORTEST_ANSWER:
        parser.error(f"--longest is at least {traffic.SHORTEST_PROMPT} {traffic.SHORTEST_ANSWER}")
    return options


def start(model: str | None) -> InProcess:
    if model is not None:
        return InProcess(EngineConfig(model=model), resolve(model).path)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_3_8B))
        return InProcess(EngineConfig(model="llama-3-8b", device="cuda", weights="random"), Path(folder))


def measure(options: argparse.Namespace) -> Iterator[Point]:
    client = start(options.model)
    pace = client.engine.scheduler.pace
    arrivals = traffic.poisson(options.rate, options.seconds, "pace", *options.longest)
    vocab_size = client.info.config.vocab_size
    vocabulary = range(min(1000, vocab_size // 4), vocab_size - min(1000, vocab_size // 4))
    traffic.drive(client, arrivals, "warm-up", vocabulary)
    for number, target in enumerate(options.targets):
        pace.target_s = target / 1000 or None
        figures = traffic.drive(client, arrivals, f"pace {number}", vocabulary)
        yield Point(target, figures.ttft, figures.itl)


def draw(points: list[Point], title: str) -> str:
    """Two panels over the same targets: time to the first token, and between tokens."""
    shapes = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', text(LEFT, 22, title, "title")]
    for number, (name, what) in enumerate((("ttft", "first token, ms"), ("itl", "between tokens, ms"))):
        shapes += panel(LEFT + number * (PANEL + LEFT), [(p.target, getattr(p, name)) for p in points], what)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *shapes, "</svg>\n"])


def panel(left: float, points: list[tuple[float, dict[str, float]]], what: str) -> Iterator[str]:
    base, height = HEIGHT - 48, HEIGHT - 48 - TOP - 24
    top = 1.1 * max(values["p99"] for _, values in points)
    yield text(left, TOP + 8, what, "title")
    yield f'<line x1="{left}" x2="{left + PANEL}" y1="{base}" y2="{base}" stroke="#999"/>'
    step = PANEL / len(points)
    for name, colour in COLOURS.items():
        places = [(left + (n + 0.5) * step, base - height * values[name] / top) for n, (_, values) in enumerate(points)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for (x, y), (_, values) in zip(places, points, strict=True):
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
            yield text(x, y - 7, f"{values[name]:.0f}", anchor="middle")
        yield text(places[-1][0] + 8, places[-1][1] + 4, name)
    for n, (target, _) in enumerate(points):
        yield text(left + (n + 0.5) * step, base + 16, f"{target:g}" if target else "none", anchor="middle")
    yield text(left + PANEL / 2, base + 34, "--itl-target-ms", anchor="middle")


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'


def main() -> None:
    options = parse()
    points: list[Point] = []
    print("| target, ms | TTFT p50 | TTFT p99 | between tokens p50 | p99 | longest |\n|---|---|---|---|---|---|")
    for point in measure(options):
        points.append(point)
        ttft, itl = point.ttft, point.itl
        cells = (
            f"{ttft['p50']:.0f}",
            f"{ttft['p99']:.0f}",
            f"{itl['p50']:.1f}",
            f"{itl['p99']:.1f}",
            f"{itl['max']:.0f}",
        )
        print(f"| {point.target:g} | {' | '.join(cells)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps([point._asdict() for point in points], indent=1) + "\n")
    if options.svg:
        options.svg.write_text(draw(points, f"{options.model or 'Llama-3-8B'}, {options.rate:g} requests a second"))


if __name__ == "__main__":
    main()
