"""Exchange: one prompt and its answers, from a user's words to requests, and from updates back to words.

`Intake` checks a prompt against the model's limits and opens an Exchange; `LLM`, `AsyncLLM` and the server feed it the
engine's updates. No engine and no torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.core.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from quire.core.plan import TokenLogprobs, Update
from quire.core.request import Finish, Request
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizers.tokenizer import Tokenizer


class Exchange:
    """The requests of one prompt (n of them) and the output they fill."""

    def __init__(
        self,
        request_id: str,
        requests: Sequence[Request],
        text: str | None,
        tokenizer: Tokenizer,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        params, prompt = requests[0].params, list(requests[0].prompt)
        self.requests = list(requests)
        self.output = RequestOutput(request_id, text, prompt, [CompletionOutput(i) for i in range(len(requests))])
        self._tokenizer = tokenizer
        self._places = {request.id: index for index, request in enumerate(requests)}
        self._detokenizers = [
            Detokenizer(
                tokenizer,
                stop=params.stop_strings,
                skip_special_tokens=params.skip_special_tokens,
                kept=kept,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                continues=True,
            )
            for _ in requests
        ]
        if params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None]
        if params.logprobs is not None:
            for answer in self.output.outputs:
                answer.logprobs, answer.cumulative_logprob = [], 0.0

    @property
    def finished(self) -> bool:
        return self.output.finished

    @property
    def open_ids(self) -> list[str]:
        """The requests whose answers have not ended."""
        return [request_id for request_id, index in self._places.items() if not self.output.outputs[index].finished]

    def take(self, update: Update) -> bool:
        """Take news in. True when a stop string has ended an answer that the engine still works on: abort it."""
        index = self._places[update.id]
        request, answer = self.requests[index], self.output.outputs[index]
        if answer.finished:
            return False
        self._take_detail(update, answer)
        answer.token_ids += update.tokens
        self._take_text(request, answer, self._detokenizers[index], update)
        return answer.finished and update.finish is None

    def snapshot(self) -> RequestOutput:
        """The output as it is now; it does not change when more arrives."""
        outputs = [
            replace(answer, token_ids=list(answer.token_ids), logprobs=answer.logprobs and list(answer.logprobs))
            for answer in self.output.outputs
        ]
        return replace(self.output, outputs=outputs)

    def _take_text(self, request: Request, answer: CompletionOutput, detokenizer: Detokenizer, update: Update) -> None:
        tokens = update.tokens
        by_token = update.finish is Finish.STOP
        if by_token and not request.params.include_stop_str_in_output:
            tokens = tokens[:-1]
        answer.text += detokenizer.push(tokens)
        if update.finish and detokenizer.stop_hit is None:
            answer.text += detokenizer.finish()
        if detokenizer.stop_hit is not None:
            del answer.token_ids[detokenizer.num_tokens_used :]
            if answer.logprobs is not None:
                del answer.logprobs[detokenizer.num_tokens_used :]
                kept = zip(answer.token_ids, answer.logprobs, strict=True)
                answer.cumulative_logprob = sum(entry[token].logprob for token, entry in kept)
            answer.finish_reason, answer.stop_reason = Finish.STOP.value, detokenizer.stop_hit
        elif update.finish:
            answer.finish_reason = update.finish.value
            if by_token and update.tokens[-1] in request.params.stop_token_ids:
                answer.stop_reason = update.tokens[-1]

    def _take_detail(self, update: Update, answer: CompletionOutput) -> None:
        detail = update.detail
        if detail is None:
            return
        if detail.num_cached is not None and answer.index == 0:
            self.output.num_cached_tokens = detail.num_cached
        answer.error, answer.refused = detail.message or None, detail.refused
        if answer.index == 0:  # other samples may have computed the prompt as well
            for scored in detail.prompt_logprobs or ():
                assert self.output.prompt_logprobs is not None
                self.output.prompt_logprobs.append(self._words(scored))
        for scored in detail.logprobs or ():
            assert answer.logprobs is not None
            assert answer.cumulative_logprob is not None
            answer.logprobs.append(self._words(scored))
            answer.cumulative_logprob += scored.chosen[1]

    def _words(self, scored: TokenLogprobs) -> PositionLogprobs:
        return {
            token: Logprob(logprob, rank, self._tokenizer.token_text(token))
            for token, logprob, rank in (scored.chosen, *scored.top)
        }
