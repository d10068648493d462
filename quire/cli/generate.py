"""`quire generate`: answer prompts and exit."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.options import JsonOption, say, takes_engine_options
from quire.config import EngineConfig
from quire.core.outputs import RequestOutput
from quire.core.params import SamplingParams
from quire.errors import EmptyPrompt

if TYPE_CHECKING:
    from quire.llm import LLM

SAMPLING = "Sampling"


@takes_engine_options
def generate(
    config: EngineConfig,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; give it again for more.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", rich_help_panel=SAMPLING)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)] = 0.7,
    top_p: Annotated[
        float, typer.Option(help="Keep the likeliest tokens up to this.", rich_help_panel=SAMPLING)
    ] = 0.95,
    top_k: Annotated[int, typer.Option(help="Keep that many tokens; 0 keeps all.", rich_help_panel=SAMPLING)] = 0,
    samples: Annotated[int, typer.Option("-n", help="Answers to each prompt.", rich_help_panel=SAMPLING)] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends the answer.", rich_help_panel=SAMPLING)
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Answer prompts and exit. Without -p the prompt is read from standard input."""
    params = SamplingParams(
        n=samples, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop=stop or (),
        seed=config.seed,
    )  # fmt: skip
    prompts = prompt or [read_prompt()]
    from quire.llm import LLM

    llm = LLM(**asdict(config))
    say(llm.info.summary)
    asked = [llm.render([{"role": "user", "content": text}]) if chat else text for text in prompts]
    if as_json:
        outputs = llm.generate(asked, params)
        print(json.dumps({"model": config.model, "outputs": [document(output) for output in outputs]}))
    elif len(asked) == 1 and samples == 1:
        stream(llm, asked[0], params)
    else:
        show(prompts, llm.generate(asked, params))


def read_prompt() -> str:
    if sys.stdin.isatty():
        raise EmptyPrompt('There is no prompt; give one with -p "...", or pipe one in.')
    return sys.stdin.read()


def stream(llm: LLM, prompt: object, params: SamplingParams) -> None:
    """Print the answer as it grows."""
    shown = 0
    for output in llm.stream(prompt, params):  # type: ignore[arg-type]
        answer = output.outputs[0]
        print(answer.text[shown:], end="", flush=True)
        shown = len(answer.text)
        if answer.error:
            say(f"error: {answer.error}")
    print()


def show(prompts: list[str], outputs: list[RequestOutput]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        for answer in output.outputs:
            print(f"── {prompt}\n{answer.error or answer.text.strip()}\n")


def document(output: RequestOutput) -> dict[str, object]:
    return {
        "prompt": output.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "outputs": [
            {"text": answer.text, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
            | ({"error": answer.error} if answer.error else {})
            for answer in output.outputs
        ],
    }
