"""`quire chat`: a conversation in the terminal. Ctrl-C stops an answer, not the program."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from quire.cli.errors import say
from quire.cli.generate import add_sampling, sampling_options
from quire.cli.imports import import_llm
from quire.cli.options import add_engine_options, engine_config
from quire.core.params import SamplingParams
from quire.errors import QuireError

if TYPE_CHECKING:
    from quire.llm import LLM

HELP = """\
/help           this text
/reset          forget the conversation
/system TEXT    set the system prompt, and start a new conversation
/history        show the conversation
/exit           leave (as does Ctrl-D)
Ctrl-C          stop the answer"""
# Options that have an effect on concurrent requests only.
BATCH_OPTIONS = (
    "order", "batching", "batch_size", "batch_wait", "waiting_served_ratio", "max_waiting_tokens", "itl_target_ms",
    "max_requests",
)  # fmt: skip


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the model and parameters that answer them."""

    llm: LLM
    params: SamplingParams
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def answer(self, text: str) -> None:
        """Stream the answer to the terminal. The history keeps what was printed, also of a stopped answer."""
        self.messages.append({"role": "user", "content": text})
        shown = ""
        try:
            for output in self.llm.stream(self.llm.render(self.all_messages()), self.params):
                grown = output.outputs[0].text
                print(grown[len(shown) :], end="", flush=True)
                shown = grown
                if output.outputs[0].error:
                    say(f"error: {output.outputs[0].error}")
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except QuireError as error:
            say(f"error: {error} (/reset starts a new conversation)")
        finally:
            print(flush=True)
            if shown:
                self.messages.append({"role": "assistant", "content": shown})
            else:
                self.messages.pop()

    def all_messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.messages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    add_sampling(parser, max_tokens=None)
    add_engine_options(parser, without=BATCH_OPTIONS)


def run(arguments: argparse.Namespace) -> None:
    """Chat with a model; /help lists the commands."""
    options = sampling_options(arguments)
    config = engine_config(arguments)
    llm = import_llm()(**asdict(config))
    say(llm.info.summary)
    say("Type a message; /help lists the commands, Ctrl-D leaves.")
    talk(Conversation(llm, replace(llm.get_default_sampling_params(), **options), arguments.system))


def talk(conversation: Conversation) -> None:
    """Read lines until the end of input. Ctrl-C never ends the conversation."""
    while True:
        try:
            text = read_line()
            if text in ("/exit", "/quit"):
                return
            if text.startswith("/"):
                run_command(conversation, text)
            elif text:
                conversation.answer(text)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            say("Ctrl-D or /exit leaves.")


def read_line() -> str:
    if sys.stdin.isatty():
        import readline  # noqa: F401  # gives input() history and editing
    return input("> " if sys.stdin.isatty() else "").strip()


def run_command(conversation: Conversation, text: str) -> None:
    command, _, rest = text.partition(" ")
    if command == "/help":
        print(HELP)
    elif command == "/reset":
        conversation.messages.clear()
    elif command == "/system":
        conversation.system = rest.strip() or None
        conversation.messages.clear()
    elif command == "/history":
        for message in conversation.all_messages():
            print(f"{message['role']}: {message['content']}")
    else:
        say(f"There is no {command}; /help lists the commands.")
