"""Log probabilities of completions: every token has its own text, bytes and offset, whatever its bytes are."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from quire.core.plan import Detail, TokenLogprobs, Update
from quire.core.request import Finish
from quire.server.admission import Admission
from quire.server.openai.completions import open_prompts, sampling_params
from quire.server.openai.output import chat_logprobs, list_choices
from quire.server.openai.protocol import CompletionRequest
from quire.text.detokenizer import PromptText, locate_prompt
from quire.text.input_processor import InputProcessor
from quire.text.output_processor import OutputProcessor
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level, sentencepiece

pytestmark = pytest.mark.cpu

BYTE_LEVEL = Tokenizer.from_gguf(byte_level())
SENTENCEPIECE = Tokenizer.from_gguf(sentencepiece())
NUM_PADDED = 4  # ids that the model has beyond the tokenizer's


class Service:
    """As much of a service as the route needs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.model = "tiny"
        self.config = SimpleNamespace(max_prompts=8)
        self.ready = SimpleNamespace(sampling={})
        self.admission = Admission(8, 8, 1000)
        self.intake = InputProcessor(tokenizer, tokenizer.vocab_size + NUM_PADDED, 100)

    async def check_grammar(self, params: Any) -> None:
        pass

    async def open(self, prompt: Any, params: Any, context: Any, priority: int) -> OutputProcessor:
        return self.intake.process(prompt, params, "a", priority=priority)

    async def locate_prompt(self, output_processor: OutputProcessor) -> PromptText:
        return locate_prompt(self.tokenizer, output_processor.output.prompt, output_processor.output.prompt_token_ids)


class Call:
    """One call of the route, whose answers the test writes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.service = Service(tokenizer)
        self.request_id, self.created_s = "one", int(time.time())


def scored(tokens: list[int], others: tuple[int, ...] = ()) -> list[TokenLogprobs]:
    """The token at each position is the second likeliest if there are others."""
    top = [(token, -0.5 - index, 1 + index) for index, token in enumerate(others)]
    return [TokenLogprobs((token, -1.0, 2 if others else 1), top) for token in tokens]


def complete(
    tokenizer: Tokenizer, prompt: str | list[int], answer: list[int], others: tuple[int, ...] = (), **fields: Any
) -> list[dict[str, Any]]:
    """The documents of a completion that answers with these tokens, one for each of them when it streams."""
    body = CompletionRequest.model_validate({"prompt": prompt, **fields})
    call = Call(tokenizer)
    output_processors, writer = asyncio.run(open_prompts(call, body))  # type: ignore[arg-type]
    (output_processor,), (choice,) = output_processors, list_choices(output_processors)
    ids = output_processor.output.prompt_token_ids
    prompt_scores = scored(ids[1:], others) if output_processor.output.prompt_logprobs is not None else None
    groups = [[token] for token in answer] if body.stream else [answer]
    documents = []
    for index, group in enumerate(groups):
        finish = Finish.LENGTH if index == len(groups) - 1 else None
        logprobs = scored(group, others) if body.logprobs is not None else None
        output_processor.process(Update("a", list(group), finish, Detail(logprobs, None if index else prompt_scores)))
        documents += filter(None, [choice.write(writer.write)])
    return documents


def columns(document: dict[str, Any]) -> tuple[list[str], list[int]]:
    return document["logprobs"]["tokens"], document["logprobs"]["text_offset"]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_an_echoed_prompt_begins_with_its_first_token() -> None:
    answer = encode(BYTE_LEVEL, " world")
    (made,) = complete(BYTE_LEVEL, "hello world", answer, echo=True, logprobs=1)
    assert made["text"] == "hello world world"
    assert columns(made) == (["hello", " world", " world"], [0, 5, 11])
    assert made["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert made["logprobs"]["top_logprobs"][0] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "sentencepiece"])
def test_offsets_lead_to_the_tokens_characters(tokenizer, as_ids, stream) -> None:
    text = "hello 🦙é world 日本"
    prompt = tokenizer.encode(text) if as_ids else text
    answer = encode(tokenizer, "wor é🦙d")
    documents = complete(tokenizer, prompt, answer, echo=True, logprobs=1, stream=stream)
    whole = "".join(document["text"] for document in documents)
    assert whole.startswith(text)
    tokens = [token for document in documents for token in columns(document)[0]]
    offsets = [offset for document in documents for offset in columns(document)[1]]
    ids = [*tokenizer.encode(text), *answer]
    assert len(tokens) == len(offsets) == len(ids)
    assert offsets == sorted(offsets)
    begun = b""
    for token_id, token, offset in zip(ids, tokens, offsets, strict=True):
        if token_id in tokenizer.special_token_ids:
            continue
        piece = tokenizer.pieces[token_id]
        if not begun and tokenizer is SENTENCEPIECE:
            piece = piece.removeprefix(b" ")  # the encoder put it there
        start = len(begun.decode("utf-8", "ignore"))
        assert offset == start
        if not token.startswith("bytes:"):
            assert whole[offset:].startswith(piece.decode())
        begun += piece
    assert begun.decode() == whole


def test_an_echoed_text_may_hold_special_tokens_and_others_are_put_around_it() -> None:
    (made,) = complete(SENTENCEPIECE, "he</s>he", encode(SENTENCEPIECE, "he")[-1:], echo=True, logprobs=0)
    tokens, offsets = columns(made)
    place = tokens.index("</s>")
    assert (tokens[0], offsets[:2]) == ("<s>", [0, 0])
    assert made["text"][offsets[place] : offsets[place + 1]] == "</s>"
    assert offsets[-1] == len("he</s>he")


def test_a_text_that_the_tokenizer_normalizes_keeps_its_own_offsets() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(pre="qwen2"))
    decomposed = "e\u0301 hello"
    (made,) = complete(tokenizer, decomposed, encode(tokenizer, "he"), echo=True, logprobs=0)
    tokens, offsets = columns(made)
    assert made["text"] == decomposed + "he"
    assert (tokens[-1], offsets[-1]) == ("he", len(decomposed))
    assert offsets[tokens.index("hello")] == 3


def test_tokens_that_share_a_text_keep_an_entry_each() -> None:
    halves = [BYTE_LEVEL.token_to_id(mark) for mark in ("Ã", "Â", "©")]
    padded = (BYTE_LEVEL.vocab_size, BYTE_LEVEL.vocab_size + 1)
    (made,) = complete(BYTE_LEVEL, "he", halves[:1], (halves[1], halves[2], *padded), logprobs=4)
    (top,) = made["logprobs"]["top_logprobs"]
    assert top == {
        "bytes:\\xc3": -1.0,
        "bytes:\\xc2": -0.5,
        "bytes:\\xa9": -1.5,
        f"token_id:{padded[0]}": -2.5,
        f"token_id:{padded[1]}": -3.5,
    }
    assert made["logprobs"]["tokens"][0] in top


def test_a_byte_and_a_word_with_the_same_text_keep_an_entry_each() -> None:
    word, byte = SENTENCEPIECE.token_to_id("h"), SENTENCEPIECE.token_to_id("<0x68>")
    (made,) = complete(SENTENCEPIECE, "he", [word], (byte,), logprobs=1)
    assert sorted(made["logprobs"]["top_logprobs"][0].values()) == [-1.0, -0.5]


def test_a_token_keeps_the_space_that_it_begins_with() -> None:
    token = SENTENCEPIECE.token_to_id("▁wor")
    (made,) = complete(SENTENCEPIECE, "he", [token], logprobs=0)
    assert columns(made)[0] == [" wor"]


def test_bytes_are_the_tokens_own() -> None:
    padded = BYTE_LEVEL.vocab_size + 1
    llama = encode(BYTE_LEVEL, "🦙")
    output_processor = Service(BYTE_LEVEL).intake.process("he", sampling_params(request_body(logprobs=1), {}), "a")
    output_processor.process(Update("a", list(llama), Finish.LENGTH, Detail(scored(llama, (padded,)))))
    content = chat_logprobs(output_processor.output.outputs[0].logprobs, 1, BYTE_LEVEL)["content"]
    assert bytes(byte for one in content for byte in one["bytes"]) == "🦙".encode()
    (top,) = content[0]["top_logprobs"]
    assert (top["token"], top["bytes"]) == ("", [])


def request_body(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "he", **fields})


def test_no_tokens_at_all_score_the_prompt() -> None:
    (made,) = complete(BYTE_LEVEL, "hello world", [], echo=True, logprobs=1, max_tokens=0)
    assert (made["text"], made["finish_reason"]) == ("hello world", "length")
    assert columns(made) == (["hello", " world"], [0, 5])


def test_prompt_logprobs_and_echo_each_have_the_number_that_was_asked_for() -> None:
    others = tuple(encode(BYTE_LEVEL, "wd"))
    (made,) = complete(BYTE_LEVEL, "hello world", [], others, echo=True, logprobs=2, max_tokens=0, prompt_logprobs=0)
    assert len(made["logprobs"]["top_logprobs"][1]) == 3
    assert len(made["prompt_logprobs"][1]) == 1


def test_a_padded_id_can_be_a_prompts() -> None:
    padded = BYTE_LEVEL.vocab_size
    (made,) = complete(BYTE_LEVEL, [*encode(BYTE_LEVEL, "he"), padded], [padded], echo=True, logprobs=1)
    assert made["text"] == "he"
    assert columns(made) == (["he", f"token_id:{padded}", f"token_id:{padded}"], [0, 2, 2])
