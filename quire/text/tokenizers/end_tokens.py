"""Which tokens end an answer, by their text.

Model files often name one end token where a chat model uses another (the end of a turn, not of the text), so both the
GGUF and the directory reader add the ones that are known by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

END_TOKENS = frozenset(
    {
        "</s>",
        "<eos>",
        "<EOT>",
        "<end_of_turn>",
        "<turn|>",
        "<end_of_utterance>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|eot|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|end_of_turn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|return|>",
        "<|call|>",
        "<|role_end|>",
        "<｜end▁of▁sentence｜>",
        "<｜end▁of▁turn｜>",
        "[EOS]",
        "[|endofturn|]",
    }
)


def known_end_ids(token_to_id: Callable[[str], int | None], special_ids: frozenset[int]) -> Iterable[int]:
    """The ids of special tokens that end an answer or a turn."""
    found = {name: token_id for name in END_TOKENS if (token_id := token_to_id(name)) in special_ids}
    if "<|return|>" in found and "<|call|>" in found:
        found.pop("<|end|>", None)  # ends only a message here: the answer goes on in another channel
    return [token_id for token_id in found.values() if token_id is not None]
