"""How long the parts of a call took, as TGI's x-* headers say it: milliseconds, but x-compute-time is in seconds.

This process sees a request begin with its first token, so x-queue-time counts the prompt's computation too.
"""

from __future__ import annotations

import time

from quire.server.context import Context
from quire.text.output_processor import OutputProcessor


class Timing:
    """One call's moments: it arrives, it is checked, its first token is there, it ends."""

    def __init__(self) -> None:
        self._arrival_s = time.monotonic()
        self._checked_s = self._arrival_s
        self._begun_s: float | None = None

    def checked(self) -> None:
        """The request is known to be good and goes to the engine now."""
        self._checked_s = time.monotonic()

    def grown(self) -> None:
        """There is something of the answer."""
        if self._begun_s is None:
            self._begun_s = time.monotonic()

    def headers(self, call: Context, inputs: str, exchange: OutputProcessor, num_generated: int) -> dict[str, str]:
        """The answer is complete."""
        end_s = time.monotonic()
        begun_s = end_s if self._begun_s is None else self._begun_s
        inference_s = end_s - begun_s
        times_s = {
            "x-total-time": end_s - self._arrival_s,
            "x-validation-time": self._checked_s - self._arrival_s,
            "x-queue-time": begun_s - self._checked_s,
            "x-inference-time": inference_s,
            "x-time-per-token": inference_s / max(1, num_generated),
        }
        return {
            **base_headers(call, inputs),
            "x-compute-time": f"{end_s - self._arrival_s:.6f}",
            **{name: str(round(1000 * seconds)) for name, seconds in times_s.items()},
            "x-prompt-tokens": str(len(exchange.output.prompt_token_ids)),
            "x-generated-tokens": str(num_generated),
        }


def base_headers(call: Context, inputs: str) -> dict[str, str]:
    """What is known before the first token."""
    return {
        **call.headers(),
        "x-compute-type": call.service.ready.device,
        "x-compute-characters": str(len(inputs)),
    }
