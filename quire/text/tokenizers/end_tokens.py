"""End tokens that are known by name (llama.cpp's EOG tokens).

Model files often declare one end token although a chat model ends its turns with another. Both tokenizer readers
therefore add the special tokens that are listed here.
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


def find_end_ids(token_to_id: Callable[[str], int | None], special_ids: frozenset[int]) -> Iterable[int]:
    """The ids of the listed tokens that are special tokens of a vocabulary."""
    found = {name: token_id for name in END_TOKENS if (token_id := token_to_id(name)) in special_ids}
    if "<|return|>" in found and "<|call|>" in found:
        found.pop("<|end|>", None)  # ends a message of one channel, not the answer
    return [token_id for token_id in found.values() if token_id is not None]
