"""The output side of TGI's API: documents of answers, whole or token by token, and the text of each token."""

from __future__ import annotations

import codecs
from typing import Any

from quire.core.outputs import CompletionOutput, Logprob, PositionLogprobs
from quire.server.error_response import IncompleteGeneration
from quire.server.tgi.protocol import Parameters
from quire.text.output_processor import OutputProcessor
from quire.text.tokenizers.tokenizer import Tokenizer

Document = dict[str, Any]


class GenerateWriter:
    """Writes the answers of one prompt as TGI's documents."""

    def __init__(
        self, output_processor: OutputProcessor, inputs: str, parameters: Parameters, tokenizer: Tokenizer
    ) -> None:
        self._output_processor = output_processor
        self._inputs = inputs
        self._parameters = parameters
        self._tokenizer = tokenizer
        self._texts = [TokenTexts(tokenizer) for _ in output_processor.output.outputs]
        self._ended = False

    # ── whole ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def response(self, best: CompletionOutput) -> Document:
        """The document of the best answer; its details have the others."""
        document: Document = {"generated_text": self._full_text(best)}
        if not self._parameters.wants_details:
            return document
        document["details"] = self._details(best)
        others = [answer for answer in self._output_processor.output.outputs if answer is not best]
        if others:
            document["details"]["best_of_sequences"] = [
                {"generated_text": self._full_text(answer), **self._details(answer)} for answer in others
            ]
        return document

    def _details(self, answer: CompletionOutput) -> Document:
        tokens = self._tokens(answer, 0)
        details = {**self._summary(answer), "prefill": self._prefill(), "tokens": tokens}
        if self._parameters.top_n_tokens:
            details["top_tokens"] = [self._top_tokens(answer, index) for index in range(len(tokens))]
        return details

    def _prefill(self) -> list[Document]:
        """The tokens of the prompt, if decoder_input_details is set. The first has no log probability."""
        output = self._output_processor.output
        return [
            {"id": token, "text": self._token_text(token), "logprob": position[token].logprob if position else None}
            for token, position in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
        ]

    # ── token by token ────────────────────────────────────────────────────────────────────────────────────────────

    def events(self, answer: CompletionOutput) -> list[Document]:
        """A document for each new token. The last one has the whole text and the details."""
        if self._ended:
            return []
        self._ended = answer.finished
        num_written = self._texts[answer.index].num_taken
        documents: list[Document] = []
        for index, token in enumerate(self._tokens(answer, num_written), num_written):
            document: Document = {"index": index + 1, "token": token}
            if self._parameters.top_n_tokens:
                document["top_tokens"] = self._top_tokens(answer, index)
            documents.append({**document, "generated_text": None, "details": None})
        if answer.finished:
            if not documents:
                raise IncompleteGeneration("The answer was ended before it was complete.")
            documents[-1]["generated_text"] = self._full_text(answer)
            if self._parameters.wants_details:
                num_prompt = len(self._output_processor.output.prompt_token_ids)
                documents[-1]["details"] = {**self._summary(answer), "input_length": num_prompt}
        return documents

    # ── both ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tokens(self, answer: CompletionOutput, start: int) -> list[Document]:
        """The tokens from `start` on whose text is final."""
        return [
            self._token(token, text, chosen_logprob(self._position(answer, index)))
            for index, text in enumerate(self._texts[answer.index].take(answer), start)
            for token in (answer.token_ids[index],)
        ]

    def _top_tokens(self, answer: CompletionOutput, index: int) -> list[Document]:
        position = self._position(answer, index)
        ranked = sorted(position.items(), key=lambda item: item[1].rank)[: self._parameters.top_n_tokens]
        return [self._token(token, self._token_text(token), one) for token, one in ranked]

    def _position(self, answer: CompletionOutput, index: int) -> PositionLogprobs:
        assert answer.logprobs is not None
        return answer.logprobs[index]

    def _token(self, token: int, text: str, one: Logprob) -> Document:
        special = token in self._tokenizer.special_token_ids
        return {"id": token, "text": text, "logprob": one.logprob, "special": special}

    def _token_text(self, token: int) -> str:
        return self._tokenizer.token_text(token)

    def _summary(self, answer: CompletionOutput) -> Document:
        request = self._output_processor.requests[answer.index]
        return {
            "finish_reason": finish_reason(answer),
            "generated_tokens": len(answer.token_ids),
            "seed": None if request.params.greedy else request.seed,
        }

    def _full_text(self, answer: CompletionOutput) -> str:
        return self._inputs + answer.text if self._parameters.return_full_text else answer.text


def chosen_logprob(position: PositionLogprobs) -> Logprob:
    return next(iter(position.values()))


def finish_reason(answer: CompletionOutput) -> str:
    if answer.finish_reason == "length":
        return "length"
    return "stop_sequence" if isinstance(answer.stop_reason, str) else "eos_token"


def best_of(output_processor: OutputProcessor) -> CompletionOutput:
    """The answer with the highest mean log probability; of equals the first."""
    answers = output_processor.output.outputs
    if any(answer.finish_reason == "abort" for answer in answers):
        raise IncompleteGeneration("The answer was ended before it was complete.")
    return answers[0] if len(answers) == 1 else max(answers, key=mean_logprob)


def mean_logprob(answer: CompletionOutput) -> float:
    assert answer.cumulative_logprob is not None
    return answer.cumulative_logprob / max(1, len(answer.token_ids))


class TokenTexts:
    """Splits the text of one answer into a piece for each token.

    A piece has the characters that its token completes. A token that holds only the first bytes of a character has an
    empty piece, and so has a special token, because the answer leaves it out. The pieces together are the answer. Text
    that the detokenizer holds back (it may become a stop string) is held back here too.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ends: list[int] = []  # characters that a token and those before it have completed
        self.num_taken = 0

    def take(self, answer: CompletionOutput) -> list[str]:
        """The new pieces whose text is final.

        The last token has the rest: bytes of an incomplete character, or its text up to the end of the stop string.
        """
        self._measure(answer)
        num_final, length = len(answer.token_ids), len(answer.text)
        if not answer.finished:
            while num_final > self.num_taken and self._ends[num_final - 1] > length:
                num_final -= 1
        indices = range(self.num_taken, num_final)
        self.num_taken = num_final
        last = len(answer.token_ids) - 1 if answer.finished else None
        return [answer.text[self._end(i - 1) : length if i == last else self._end(i)] for i in indices]

    def _end(self, index: int) -> int:
        return self._ends[index] if index >= 0 else 0

    def _measure(self, answer: CompletionOutput) -> None:
        length = self._end(len(self._ends) - 1)
        for token in answer.token_ids[len(self._ends) :]:
            if token not in self._tokenizer.special_token_ids:
                length += len(self._utf8.decode(self._tokenizer.pieces[token]))
            self._ends.append(length)
