"""draw: a server's state as lines for a terminal of a given size. Nothing here reads or writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quire.top.state import EngineState, ServerState

Document = dict[str, Any]
Span = tuple[str, str]  # text, and the parameters of its SGR sequence

PLAIN, BOLD, DIM, HEAD, ALARM = "", "1", "2", "7", "1;31"
FREE_COLOR, CACHED_COLOR, SHARED_COLOR = 236, 66, 255
OWNER_COLORS = (39, 208, 76, 170, 220, 45, 203, 112, 141, 214, 80, 168)
STEP_COLORS = {"prompt": 208, "draft": 170, "decode": 39, "failed": 196}
BARS = "▁▂▃▄▅▆▇█"
FREE, CACHED, IN_USE, SHARED = range(4)  # states of a block
TEXT_CELLS = {FREE: ".", CACHED: "-", IN_USE: "#", SHARED: "="}
HEADING = "    # request              state        prompt  cached      output  blocks"


def draw(state: ServerState, url: str, width: int, height: int, *, colored: bool = True) -> list[str]:
    """At most `height` lines, none longer than `width`."""
    lines: list[list[Span]] = [[(f" quire top   {state.model}   {url} ".ljust(width), HEAD)]]
    if state.lost:
        lines.append([(f"No connection, trying again; q leaves. {state.lost}", ALARM)])
    lines.append(totals_line(state))
    share = (height - len(lines)) // max(1, len(state.engines))
    for replica, engine in enumerate(state.engines):
        name = f"engine {replica}: " if len(state.engines) > 1 else ""
        lines += draw_engine(engine, name, width, share, colored=colored)
    return [render(clip(line, width), colored=colored) for line in lines[:height]]


def totals_line(state: ServerState) -> list[Span]:
    totals = state.totals
    if not totals:
        return [("Waiting for the first picture.", DIM)]
    spans: list[Span] = [
        (f"{totals['requests_running']:,.0f} run", BOLD),
        (f"  {totals['requests_waiting']:,.0f} wait", BOLD),
        (f"  {state.tokens_per_s():,.1f} tokens/s", BOLD),
        (f"  cache {totals['kv_cache_use_ratio']:.0%} in use", PLAIN),
        (f"  {totals['output_tokens_total']:,.0f} tokens in all", PLAIN),
    ]
    if totals["prompt_tokens_total"]:
        ratio = totals["cached_prompt_tokens_total"] / totals["prompt_tokens_total"]
        spans.append((f"  {ratio:.0%} of prompts cached", PLAIN))
    if totals["draft_tokens_total"]:
        ratio = totals["accepted_draft_tokens_total"] / totals["draft_tokens_total"]
        spans.append((f"  {ratio:.0%} of drafts right", PLAIN))
    if totals["preemptions_total"]:
        spans.append((f"  {totals['preemptions_total']:,.0f} preempted", PLAIN))
    if totals["engine_restarts_total"]:
        spans.append((f"  {totals['engine_restarts_total']:,.0f} restarts", ALARM))
    return spans


def draw_engine(engine: EngineState, name: str, width: int, height: int, *, colored: bool) -> list[list[Span]]:
    """A heading, the blocks, the steps, and as many requests as fit."""
    if not engine.is_ready:
        return [[(f"{name}The engine has ended ({engine.reason}) and is being started again.", ALARM)]]
    if not engine.facts:
        return [[(f"{name}No picture of the engine yet: it is in its step.", DIM)]]
    map_height = max(1, min(height // 4, -(-engine.facts["num_blocks"] // (2 * width))))
    block_map = color_map(engine, width, map_height) if colored else text_map(engine, width, map_height)
    lines = [blocks_heading(engine, name, colored=colored), *block_map, *steps_lines(engine, width)]
    return lines + request_lines(engine, height - len(lines))


def blocks_heading(engine: EngineState, name: str, *, colored: bool) -> list[Span]:
    line, num_blocks = engine.line, engine.facts["num_blocks"]
    free, cached = line["num_free_blocks"], line["num_cached_blocks"]
    marks = dict.fromkeys(TEXT_CELLS, "█") if colored else TEXT_CELLS
    return [
        (f"{name}{num_blocks:,} blocks of {engine.facts['block_size']} tokens: ", BOLD),
        (f"{marks[IN_USE]} {num_blocks - free:,} in use, ", foreground(OWNER_COLORS[0])),
        (f"{marks[SHARED]} by several  ", foreground(SHARED_COLOR)),
        (f"{marks[CACHED]} {cached:,} cached  ", foreground(CACHED_COLOR)),
        (f"{marks[FREE]} {free - cached:,} free", foreground(FREE_COLOR + 8)),
    ]


def color_map(engine: EngineState, width: int, height: int) -> list[list[Span]]:
    """Half-block characters: each shows two cells. A cell is a block, or as many as make it fit."""
    cells = [color for _, color in cells_of(engine, 2 * width * height)]
    rows = [cells[start : start + width] for start in range(0, len(cells), width)]
    lines = []
    for index in range(0, len(rows), 2):
        lower = rows[index + 1] if index + 1 < len(rows) else []
        backgrounds = [f";48;5;{color}" for color in lower] + [""] * (len(rows[index]) - len(lower))
        lines.append([
            ("▀", foreground(color) + background)
            for color, background in zip(rows[index], backgrounds, strict=True)
        ])  # fmt: skip
    return lines


def text_map(engine: EngineState, width: int, height: int) -> list[list[Span]]:
    """A character for each cell."""
    text = "".join(TEXT_CELLS[state] for state, _ in cells_of(engine, width * height))
    return [[(text[start : start + width], PLAIN)] for start in range(0, len(text), width)]


def cells_of(engine: EngineState, max_cells: int) -> list[tuple[int, int]]:
    """State and color of each cell: of one block, or of the state that most of its blocks have."""
    num_blocks = engine.facts["num_blocks"]
    count = -(-num_blocks // max_cells)
    return [find_cell(engine, first, count) for first in range(1, num_blocks + 1, count)]


def find_cell(engine: EngineState, first: int, count: int) -> tuple[int, int]:
    """In use counts before cached, and that before free."""
    states = engine.states[first : first + count]
    num_shared = states.count(SHARED)
    num_used = states.count(IN_USE) + num_shared
    if 2 * num_used < len(states):
        is_cached = 2 * (states.count(CACHED) + num_used) >= len(states)
        return (CACHED, CACHED_COLOR) if is_cached else (FREE, FREE_COLOR)
    if 2 * num_shared > num_used:
        return SHARED, SHARED_COLOR
    owner = next((owner for owner in engine.owners[first : first + count] if owner), 0)  # 0: it is not known
    return IN_USE, OWNER_COLORS[owner % len(OWNER_COLORS)]


def steps_lines(engine: EngineState, width: int) -> list[list[Span]]:
    """The last steps as bars: their height is their duration, their color what most of their tokens are."""
    steps = [step for step in engine.steps if step["seconds"] is not None or step["failed"]][-width:]
    if not steps:
        return []
    longest = max((step["seconds"] or 0.0 for step in steps), default=0.0) or 1.0
    bars = [
        (BARS[min(len(BARS) - 1, int(len(BARS) * (step["seconds"] or longest) / longest))],
         foreground(STEP_COLORS[step_kind(step)]))
        for step in steps
    ]  # fmt: skip
    return [describe_step(steps[-1], longest), bars]


def step_kind(step: Document) -> str:
    if step["failed"]:
        return "failed"
    num_drafts = step["draft_tokens"] + step["draft_rows"]
    kinds = {"prompt": step["prompt_tokens"], "draft": num_drafts, "decode": step["decode_rows"]}
    return max(kinds, key=lambda kind: kinds[kind])


def describe_step(step: Document, longest_s: float) -> list[Span]:
    spans: list[Span] = [(f"step {step['step']:,}: ", BOLD)]
    if step["seconds"] is not None:
        spans.append((f"{1e3 * step['seconds']:.1f} ms", PLAIN))
    if step["predicted_s"] is not None:
        spans.append((f" (predicted {1e3 * step['predicted_s']:.1f})", DIM))
    parts = [
        (f"  {step['prompt_tokens']:,} tokens of {step['prompt_rows']} prompts", "prompt", step["prompt_rows"]),
        (f"  {step['decode_rows']} decode", "decode", step["decode_rows"]),
        (f"  {step['draft_tokens']} drafts of {step['draft_rows']}", "draft", step["draft_rows"]),
    ]
    spans += [(text, foreground(STEP_COLORS[kind])) for text, kind, count in parts if count]
    return [*spans, (f"  longest bar {1e3 * longest_s:.1f} ms", DIM)]


def request_lines(engine: EngineState, height: int) -> list[list[Span]]:
    """Running requests, then waiting ones. If not all fit, at least half of the lines are for those that wait."""
    running, waiting = engine.running(), engine.waiting()
    num_hidden = max(0, engine.line["num_waiting"] - sum(row["state"] == "waiting" for row in waiting))
    num_rows = len(running) + len(waiting)
    if not num_rows or height < 2:
        return []
    fits = num_rows + bool(num_hidden) <= height - 1
    num_shown = num_rows if fits else max(0, height - 2)
    num_running = max(num_shown - len(waiting), min(len(running), num_shown // 2))
    shown = [*running[:num_running], *waiting[: num_shown - num_running]]
    lines = [[(HEADING, DIM)], *map(request_line, shown)]
    if left := num_rows - num_shown + num_hidden:
        lines.append([(f"      and {left:,} more requests", DIM)])
    return lines


def request_line(row: Document) -> list[Span]:
    name = shorten(row["id"] if row["own"] else "(another tenant's)", 20)
    style = foreground(OWNER_COLORS[row["number"] % len(OWNER_COLORS)]) if row["blocks"] else DIM
    spans: list[Span] = [(f"{row['number']:>5} {name:<20} ", style), (f"{row['state']:<9} ", PLAIN)]
    if (wait := row["wait"]) is not None:
        return [*spans, (f"{row['prompt_tokens']:>9,}   {describe_estimate(wait)}{wait['sentence']}", PLAIN)]
    prompt = f"{min(row['computed_tokens'], row['prompt_tokens']):,}/{row['prompt_tokens']:,}"
    output = f"{row['output_tokens']:,}/{row['max_tokens']:,}"
    spans.append((f"{prompt:>9} {row['cached_tokens']:>7,} {output:>11} {row['blocks']:>7,}", PLAIN))
    if row["preemptions"]:
        spans.append((f"   preempted {row['preemptions']} times", DIM))
    return spans


def describe_estimate(wait: Document) -> str:
    if wait["estimate_s"] is None or wait["resource"] == "step":
        return ""
    return "less than 0.1 s. " if wait["estimate_s"] < 0.1 else f"about {wait['estimate_s']:g} s. "


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def foreground(color: int) -> str:
    return f"38;5;{color}"


def clip(spans: Iterable[Span], width: int) -> list[Span]:
    """The first `width` characters. What is not printable becomes a question mark: a server's text is not trusted."""
    clipped: list[Span] = []
    for text, style in spans:
        printable = "".join(each if each.isprintable() else "?" for each in text[:width])
        if printable:
            clipped.append((printable, style))
        width -= len(printable)
    return clipped


def render(spans: Sequence[Span], *, colored: bool) -> str:
    """The escape sequences are written where the style changes."""
    if not colored:
        return "".join(text for text, _ in spans)
    parts, before = [], PLAIN
    for text, style in spans:
        parts.append(text if style == before else f"\x1b[0;{style}m{text}" if style else f"\x1b[0m{text}")
        before = style
    return "".join(parts) + ("\x1b[0m" if before else "")
