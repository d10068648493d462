"""OutputProcessor: the engine's updates for one prompt become its RequestOutput.

`InputProcessor` makes one for each prompt. `LLM`, `AsyncLLM` and the server submit its requests and pass the engine's
updates to `process`, which detokenizes, applies stop strings and collects log probabilities. No engine and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from quire.core.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from quire.core.plan import TokenLogprobs, Update
from quire.core.request import Finish, Request
from quire.text.detokenizer import Detokenizer, TextEnd
from quire.text.tokenizers.tokenizer import Tokenizer


class OutputProcessor:
    """The requests of one prompt and the output that grows with their updates.

    There is one request for each of the n answers, or a single one that searches them.
    """

    def __init__(
        self,
        request_id: str,
        requests: Sequence[Request],
        text: str | None,
        tokenizer: Tokenizer,
        keep_special_ids: frozenset[int] = frozenset(),
        make_text_end: Callable[[], TextEnd] | None = None,
    ) -> None:
        """`make_text_end` makes what says where an answer ends, one for each answer."""
        params, prompt = requests[0].params, list(requests[0].prompt)
        self.requests = list(requests)
        self.num_sequences = params.num_sequences  # computed side by side for this prompt
        self.output = RequestOutput(request_id, text, prompt, [CompletionOutput(i) for i in range(params.n)])
        self._tokenizer = tokenizer
        self._indices = {request.id: index for index, request in enumerate(requests)}
        self._detokenizers = [
            Detokenizer(
                tokenizer,
                stop=params.stop_strings,
                skip_special_tokens=params.skip_special_tokens,
                keep_special_ids=keep_special_ids,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                continues=True,
                text_end=make_text_end() if make_text_end is not None else None,
            )
            for _ in self.output.outputs
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
    def unfinished_ids(self) -> list[str]:
        """The ids of the requests whose answers have not finished."""
        return [request_id for request_id, index in self._indices.items() if not self.output.outputs[index].finished]

    def process(self, update: Update) -> bool:
        """Add an update to the output. True if its text has ended the answer: the caller aborts the request."""
        index = self._indices[update.id]
        request, answer = self.requests[index], self.output.outputs[index]
        if answer.finish_reason is not None:
            return False
        self._add_detail(update, answer)
        if request.params.use_beam_search:
            self._add_beams(request, update)
            return False
        answer.token_ids += update.tokens
        detokenizer = self._detokenizers[index]
        self._add_text(request, answer, detokenizer, update)
        return detokenizer.has_ended and update.finish is None

    def snapshot(self) -> RequestOutput:
        """A copy of the output that later updates do not change."""
        outputs = [
            replace(answer, token_ids=list(answer.token_ids), logprobs=answer.logprobs and list(answer.logprobs))
            for answer in self.output.outputs
        ]
        return replace(self.output, outputs=outputs)

    def _add_beams(self, request: Request, update: Update) -> None:
        """Add the answers of a beam search. They come with its last update; there may be fewer than n."""
        if update.finish is None:
            return
        found = update.detail.beams if update.detail else None
        if found is None:
            for answer in self.output.outputs:
                answer.finish_reason, answer.error = update.finish.value, self.output.outputs[0].error
                answer.refused = self.output.outputs[0].refused
            return
        del self.output.outputs[len(found) :]
        for answer, beam, detokenizer in zip(self.output.outputs, found, self._detokenizers, strict=False):
            answer.token_ids = list(beam.tokens)
            if beam.logprobs is not None:
                answer.logprobs = [self._to_logprobs(scored) for scored in beam.logprobs]
            answer.cumulative_logprob = beam.cum_logprob
            self._add_text(request, answer, detokenizer, Update(update.id, beam.tokens, beam.finish))

    def _add_text(self, request: Request, answer: CompletionOutput, detokenizer: Detokenizer, update: Update) -> None:
        tokens = update.tokens
        by_token = update.finish is Finish.STOP
        if request.params.use_beam_search and by_token:
            by_token = tokens[-1] in request.stop_ids  # otherwise by a stop string
        if by_token and not request.params.include_stop_str_in_output:
            tokens = tokens[:-1]
        answer.text += detokenizer.push(tokens)
        if update.finish and not detokenizer.has_ended:
            answer.text += detokenizer.finish()
        if detokenizer.has_ended:
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

    def _add_detail(self, update: Update, answer: CompletionOutput) -> None:
        detail = update.detail
        if detail is None:
            return
        if detail.num_cached is not None and answer.index == 0:
            self.output.num_cached_tokens = detail.num_cached
        self.output.num_drafted_tokens += detail.num_drafted
        self.output.num_accepted_tokens += detail.num_accepted
        self.output.num_exited_tokens += detail.num_exited
        answer.error, answer.refused = detail.message or None, detail.refused
        if answer.index == 0:  # other answers to the same prompt may report the prompt's log probabilities too
            for scored in detail.prompt_logprobs or ():
                assert self.output.prompt_logprobs is not None
                self.output.prompt_logprobs.append(self._to_logprobs(scored))
        for scored in detail.logprobs or ():
            assert answer.logprobs is not None
            assert answer.cumulative_logprob is not None
            answer.logprobs.append(self._to_logprobs(scored))
            answer.cumulative_logprob += scored.chosen[1]

    def _to_logprobs(self, scored: TokenLogprobs) -> PositionLogprobs:
        return {
            token: Logprob(logprob, rank, self._tokenizer.token_text(token))
            for token, logprob, rank in (scored.chosen, *scored.top)
        }
