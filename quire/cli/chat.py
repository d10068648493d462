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
    from quire.text.reasoning.parser import AnswerParser
    from quire.text.tokenizers.tokenizer import Tokenizer

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
        """Stream the answer to the terminal. The history keeps what was printed, also of a stopped answer. Reasoning is
        printed dim, and not kept: chat templates drop it where no tools are called."""
        self.messages.append({"role": "user", "content": text})
        shown = ""
        try:
            prompt = self.llm.render(self.all_messages())
            reader = AnswerReader.of(self.llm.get_tokenizer(), prompt["prompt"])
            for output in self.llm.stream(prompt, replace(self.params, skip_special_tokens=not reader.has_markers)):
                reasoning, grown = reader.read(output.outputs[0].text, is_last=output.finished)
                gap = "\n\n" if grown and not shown and reader.has_reasoned else ""
                print(dim(reasoning) + gap + grown, end="", flush=True)
                shown += grown
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


@dataclass(slots=True)
class AnswerReader:
    """Splits an answer into reasoning and text while it grows. Its markers may be special tokens, which it needs."""

    parser: AnswerParser
    has_markers: bool
    num_chars: int = 0
    has_reasoned: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, prompt: str) -> AnswerReader:
        from quire.text.answer_format import AnswerFormat
        from quire.text.templates.capabilities import detect_capabilities
        from quire.text.templates.chat_template import ChatTemplate
        from quire.text.tools.definitions import NO_TOOLS

        assert tokenizer.chat_template is not None, "the prompt was rendered with it"
        template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
        format = AnswerFormat.of(detect_capabilities(template), NO_TOOLS, prompt)
        return cls(format.parser(), bool(format.special_markers(tokenizer)))

    def read(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """What is new of reasoning and of text. `text` is the whole answer so far."""
        from quire.text.tools.events import ReasoningDelta, TextDelta

        events = self.parser.push(text[self.num_chars :]) + (self.parser.finish() if is_last else [])
        self.num_chars = len(text)
        reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        content = "".join(event.text for event in events if isinstance(event, TextDelta))
        self.has_reasoned = self.has_reasoned or bool(reasoning)
        return reasoning, content


def dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if text and sys.stdout.isatty() else text


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
