"""`quire trace`: recordings of a server. `quire serve --trace FILE` makes one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli import serve
from quire.cli.errors import say
from quire.cli.options import add_fields, add_json
from quire.config import EngineConfig, flag_of, parse_speculate
from quire.errors import InvalidParams, show
from quire.progress import bar
from quire.store import resolve

if TYPE_CHECKING:
    from quire.trace.diff import Comparison, Difference, Place
    from quire.trace.recording import Recording

MAX_SHOWN = 20  # differences that are printed; --json has all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what to do", metavar="ACTION", required=True)
    for name, about, add, run_kind in (
        ("record", "Serve a model and record it, as quire serve --trace FILE does.", add_record, run_record),
        ("show", "Say what is in a recording.", add_show, run_show),
        ("replay", "Compute a recording's requests again, and compare the answers.", add_replay, run_replay),
        ("diff", "Say where the answers of two recordings differ, and why.", add_diff, run_diff),
        ("export", "Write a recording in the formats of other tools.", add_export, run_export),
    ):
        kind = kinds.add_parser(name, help=about, description=about, allow_abbrev=False)
        add(kind)
        kind.set_defaults(run_kind=run_kind)


def run(arguments: argparse.Namespace) -> None:
    """Record a server; replay, compare and export what was recorded."""
    arguments.run_kind(arguments)


def add_file(parser: argparse.ArgumentParser, name: str = "file", text: str = "a recording") -> None:
    parser.add_argument(name, type=Path, metavar=name.upper(), help=text)


def read(path: Path) -> Recording:
    """A recording. One whose end is missing is used, and that is said."""
    from quire.trace.reader import read_recording

    recording = read_recording(path)
    if not recording.is_closed:
        say(f"{path} has no end: its server was killed, or still runs. It is read up to its last whole line.")
    return recording


# ── record ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def add_record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="FILE", help="the new file to record into")
    serve.add_arguments(parser, without=["trace"])


def run_record(arguments: argparse.Namespace) -> None:
    serve.run(arguments)


# ── show ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def add_show(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_json(parser)


def run_show(arguments: argparse.Namespace) -> None:
    recording = read(arguments.file)
    from quire.trace.summary import summarize

    document = summarize(recording)
    if arguments.json:
        print(json.dumps(document))
        return
    for name, value in document.items():
        print(f"{name.replace('_', ' '):<20}{as_text(value)}")


def as_text(value: Any) -> str:
    """A value of a file that may come from anywhere: no control characters reach the terminal."""
    if isinstance(value, dict):
        return ", ".join(f"{as_text(name)} {as_text(item)}" for name, item in value.items() if item is not None) or "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = {None: "-", True: "yes", False: "no"}.get(value) if value is None or isinstance(value, bool) else str(value)
    return "".join(character if character.isprintable() else "?" for character in text or "-")


# ── replay ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def add_replay(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="default: the recorded one")
    parser.add_argument("--base-url", metavar="URL", help="send the requests to this server instead")
    parser.add_argument("--api-key", metavar="KEY", help="bearer token for the server")
    speed = "times as fast as it was recorded, or inf for all requests at once; default 1"
    parser.add_argument("--speed", type=float, default=1.0, metavar="X", help=speed)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the recording of the replay to a new file")
    add_json(parser)
    about = "engine (what is not given is as it was recorded)"
    add_fields(parser, about, EngineConfig, without=["model"], only_given=True)


def run_replay(arguments: argparse.Namespace) -> None:
    if not arguments.speed > 0:
        raise InvalidParams(f"--speed is {arguments.speed}; give a number above 0.")
    recording = read(arguments.file)
    given = {field.name: getattr(arguments, field.name) for field in fields(EngineConfig) if field.name in arguments}
    if arguments.base_url is not None:
        replayed = replay_on_server(arguments, recording, given)
    elif arguments.api_key is not None:
        raise InvalidParams("--api-key needs --base-url; leave it out.")
    else:
        replayed = replay_here(arguments, recording, given)
    if recording.header.anonymous:
        show_lengths(recording, replayed, arguments.json)
        return
    from quire.trace.diff import compare

    show_comparison(compare(recording, replayed), "recorded", "replayed", arguments.json)


def replay_here(arguments: argparse.Namespace, recording: Recording, given: dict[str, Any]) -> Recording:
    if recording.engine is None:
        raise InvalidParams(f"{arguments.file} ended before its engine had started; nothing can be replayed.")
    if given["model"] is None:
        del given["model"]
    check_plugins(recording.engine.config, given)
    config = EngineConfig.of({**recording.engine.config, **given})
    with bar("fetching") as report:
        files = resolve(config.model, progress=lambda what, done, total: report(done, total))
    from quire.bench.replay import replay

    with bar("replaying", unit="requests") as report:
        return replay(recording, config, files.path, speed=arguments.speed, report=report, save=arguments.save)


def check_plugins(recorded: dict[str, Any], given: dict[str, Any]) -> None:
    """A class that `speculate` names is code. Only whoever replays may name it: the file may come from anywhere."""
    if "speculate" in given or "speculate" not in recorded:
        return
    methods = parse_speculate(recorded["speculate"]) or []
    if named := [method.value for method in methods if method.kind == "plugin"]:
        raise InvalidParams(
            f"The recorded engine drafted with code of its own. A replay does not load what a file names: "
            f"{', '.join(named)}. Give --speculate yourself; answers are the same with off."
        )


def replay_on_server(arguments: argparse.Namespace, recording: Recording, given: dict[str, Any]) -> Recording:
    named = ["MODEL" if each.name == "model" else flag_of(each) for each in fields(EngineConfig)
             if given.get(each.name) is not None]  # fmt: skip
    if named or arguments.save is not None:
        raise InvalidParams(
            f"{[*named, '--save'][0]} is for an engine in this process; with --base-url the "
            "server decides it. Leave one out."
        )
    from quire.bench.replay_server import replay_on

    with bar("replaying", unit="requests") as report:
        return replay_on(recording, arguments.base_url, arguments.api_key, speed=arguments.speed, report=report)


def show_lengths(recording: Recording, replayed: Recording, as_json: bool) -> None:
    """Of an anonymous recording: it has no tokens that could be compared."""
    from quire.trace.summary import summarize

    documents = {"recorded": summarize(recording), "replayed": summarize(replayed)}
    if as_json:
        print(json.dumps(documents))
        return
    print("The recording is anonymous: prompts are made up, and no tokens can be compared.")
    for name in ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "steps", "step_seconds", "preemptions"):
        values = [as_text(document[name]) for document in documents.values()]
        print(f"{name.replace('_', ' '):<20}{values[0]:>14} recorded{values[1]:>14} replayed")


# ── diff ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def add_diff(parser: argparse.ArgumentParser) -> None:
    add_file(parser, "a")
    add_file(parser, "b", "another recording, of the same requests or similar ones")
    add_json(parser)


def run_diff(arguments: argparse.Namespace) -> None:
    from quire.trace.diff import compare

    found = compare(read(arguments.a), read(arguments.b))
    show_comparison(found, "A", "B", arguments.json)


def show_comparison(found: Comparison, first: str, second: str, as_json: bool) -> None:
    """Print it. The exit status is 1 if answers differ, as that of diff is."""
    if as_json:
        print(json.dumps({"identical": found.identical, "causes": found.causes, **asdict(found)}))
    else:
        print("\n".join(describe(found, first, second)))
    if not found.identical:
        sys.exit(1)


def describe(found: Comparison, first: str, second: str) -> Iterable[str]:
    num_equal = found.num_compared - len(found.differences)
    yield f"{num_equal:,} of {found.num_compared:,} answers are identical, {found.num_tokens:,} tokens."
    if found.num_cut:
        yield f"{found.num_cut:,} were ended from outside, by a stop string or their client: compared up to there."
    for name, ids in ((first, found.only_first), (second, found.only_second)):
        if ids:
            yield f"Only {name} has {len(ids):,} requests: {as_text(', '.join(ids[:MAX_SHOWN]))}"
    for difference in found.differences[:MAX_SHOWN]:
        yield from describe_difference(difference, first, second)
    if len(found.differences) > MAX_SHOWN:
        yield f"\n… and {len(found.differences) - MAX_SHOWN:,} more; --json has all."
    if found.causes:
        yield "\nReasons: " + ", ".join(f"{cause} {count:,}" for cause, count in found.causes.items())


def describe_difference(difference: Difference, first: str, second: str) -> Iterable[str]:
    ids = {difference.first_id: None, difference.second_id: None}
    which = f" of answer {difference.answer}" if difference.answer else ""
    yield f"\nrequest {as_text(' / '.join(ids))}: token {difference.token}{which} is the first that differs"
    for name, token, place in (
        (first, difference.first_token, difference.first_place),
        (second, difference.second_token, difference.second_place),
    ):
        what = "the answer has ended" if token is None else f"token {token}"
        yield f"  {name:<10}{what}{describe_place(place)}"
    for number, reason in enumerate(difference.reasons):
        yield f"  {'because of' if not number else 'and'} {reason.cause}: {as_text(reason.detail)}"


def describe_place(place: Place | None) -> str:
    if place is None:
        return ""
    count = len(place.batch)
    return f", in step {place.step} with {count} row{'s' if count > 1 else ''} ({as_text(show(' '.join(place.batch)))})"


# ── export ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def add_export(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    chrome = "a timeline for ui.perfetto.dev and chrome://tracing"
    parser.add_argument("--chrome", type=Path, metavar="OUT", help=chrome)
    mooncake = "JSON lines of times, lengths and shared blocks, as other simulators and load generators read them"
    parser.add_argument("--mooncake", type=Path, metavar="OUT", help=mooncake)


def run_export(arguments: argparse.Namespace) -> None:
    if arguments.chrome is None and arguments.mooncake is None:
        raise InvalidParams("Say what to write: --chrome OUT or --mooncake OUT.")
    recording = read(arguments.file)
    from quire.trace.chrome import chrome_document
    from quire.trace.mooncake import mooncake_lines

    if arguments.chrome is not None:
        write(arguments.chrome, chrome_document(recording))
    if arguments.mooncake is not None:
        write(arguments.mooncake, (f"{line}\n" for line in mooncake_lines(recording)))


def write(path: Path, pieces: Iterable[str]) -> None:
    """Write a new file."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.writelines(pieces)
    except FileExistsError:
        raise InvalidParams(f"{path} exists; name another file, or remove it.") from None
    except OSError as error:
        raise InvalidParams(f"{path} cannot be written: {error.strerror}.") from None
    say(f"Written to {path}")
