"""`quire bench`: measure."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from quire.cli.options import JsonOption, takes_engine_options
from quire.config import EngineConfig
from quire.errors import InvalidParams
from quire.progress import bar
from quire.weights.store import resolve

app = typer.Typer(help="Measure speed.", no_args_is_help=True)
COLUMNS = ("batch", "prefill_tokens_per_s", "decode_tokens_per_s", "ttft_ms", "tpot_ms", "total_s")


@app.callback()
def group() -> None:
    """Measure speed."""


@app.command("offline")
@takes_engine_options
def offline(
    config: EngineConfig,
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1,8,16,32",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens in each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="New tokens for each prompt.")] = 64,
    repeats: Annotated[int, typer.Option(help="Runs of each size; the median is reported.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Time prefill and decode of the engine alone: random prompts, greedy, no prefix cache."""
    batches = parse_batches(batch)
    from quire.bench.offline import run

    files = resolve(config.model)
    with bar("measuring", unit="batches") as report:
        document = run(
            config,
            files.path,
            batches=batches,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            repeats=repeats,
            report=report,
        )
    if as_json:
        print(json.dumps(document))
    else:
        show(document)


def parse_batches(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidParams(f"--batch is {text!r}; give whole numbers with commas, such as 1,8,16.") from None


def show(document: dict[str, Any]) -> None:
    machine = document["machine"]
    print(
        f"{document['model']} on {machine['cpu']}, {machine['threads']} threads, ready in {document['start_s']:.2f} s"
    )
    print("  ".join(f"{name:>20}" for name in COLUMNS))
    for row in document["rows"]:
        print("  ".join(f"{row[name]:>20,.2f}" if name != "batch" else f"{row[name]:>20}" for name in COLUMNS))
