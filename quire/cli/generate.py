"""`quire generate`: answer prompts and exit."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from quire.cli.errors import say
from quire.cli.imports import import_llm
from quire.cli.options import add_engine_options, add_json, engine_config
from quire.core.outputs import RequestOutput
from quire.core.params import SamplingParams
from quire.errors import EmptyPrompt

if TYPE_CHECKING:
    from quire.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-p", "--prompt", action="append", metavar="TEXT", help="a prompt; repeat it for several prompts"
    )
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template to each prompt")
    add_json(parser)
    add_sampling(parser, max_tokens=128)
    group = parser.add_argument_group("answers")
    group.add_argument("-n", type=int, default=1, metavar="N", help="answers to each prompt; default %(default)s")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="a string that ends the answer")
    add_engine_options(parser, without=["order"])  # prompts on the command line have no priorities


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    group = parser.add_argument_group("sampling")
    longest = "longest answer, in tokens; " + (
        "default %(default)s" if max_tokens else "limited by max_len if not given"
    )
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=longest)
    own = "the model's default if not given (see quire info)"
    group.add_argument("--temperature", type=float, metavar="T", help=f"0 is greedy; {own}")
    group.add_argument(
        "--top-p", type=float, metavar="P", help=f"keep the likeliest tokens up to this total probability; {own}"
    )
    group.add_argument("--top-k", type=int, metavar="K", help=f"keep the K likeliest tokens, 0 keeps all; {own}")
    exits = "take tokens from the exit of --exit-head where its confidence, between 0 and 1, reaches C; approximate"
    group.add_argument("--early-exit", type=float, metavar="C", help=exits)


def sampling_options(arguments: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """The sampling options of the command line, checked before a model is loaded."""
    names = ("temperature", "top_p", "top_k", "early_exit", "seed")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    options = {**given, **more, "max_tokens": arguments.max_tokens}
    SamplingParams.of(options)
    return options


def run(arguments: argparse.Namespace) -> None:
    """Answer prompts and exit. Without -p the prompt is read from standard input."""
    options = sampling_options(arguments, n=arguments.n, stop=arguments.stop)
    config = engine_config(arguments)
    prompts = arguments.prompt or [read_prompt()]
    llm = import_llm()(**asdict(config))
    say(llm.info.summary)
    params = replace(llm.get_default_sampling_params(), **options)
    inputs = [llm.render([{"role": "user", "content": text}]) if arguments.chat else text for text in prompts]
    if arguments.json:
        outputs = llm.generate(inputs, params)
        print(json.dumps({"model": config.model, "outputs": [document(output) for output in outputs]}))
    elif len(inputs) == 1 and params.n == 1:
        outputs = [stream(llm, inputs[0], params)]
    else:
        outputs = llm.generate(inputs, params)
        show(prompts, outputs)
    if any(answer.error for output in outputs for answer in output.outputs):
        sys.exit(1)


def read_prompt() -> str:
    if sys.stdin.isatty():
        raise EmptyPrompt('There is no prompt. Give one with -p "...", or pipe one in.')
    return sys.stdin.read()


def stream(llm: LLM, prompt: object, params: SamplingParams) -> RequestOutput:
    """Print the answer while it is generated."""
    num_printed = 0
    output: RequestOutput
    for output in llm.stream(prompt, params):  # type: ignore[arg-type]
        answer = output.outputs[0]
        print(answer.text[num_printed:], end="", flush=True)
        num_printed = len(answer.text)
        if answer.error:
            say(f"error: {answer.error}")
    print()
    return output


def show(prompts: list[str], outputs: list[RequestOutput]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        for answer in output.outputs:
            print(f"── {prompt}\n{answer.error or answer.text.strip()}\n")


def document(output: RequestOutput) -> dict[str, object]:
    return {
        "prompt": output.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "early_exit_tokens": output.num_exited_tokens,
        "outputs": [
            {"text": answer.text, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
            | ({"error": answer.error} if answer.error else {})
            for answer in output.outputs
        ],
    }
