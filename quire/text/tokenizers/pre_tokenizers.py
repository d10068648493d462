"""Pre-tokenizers of byte-level BPE vocabularies, by their name in GGUF (`tokenizer.ggml.pre`).

A wrong pre-tokenizer gives plausible but wrong tokens, so an unknown name is refused.
The `tokenizers` library is loaded when the first pre-tokenizer is made.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from quire.errors import UnsupportedModel

if TYPE_CHECKING:
    from tokenizers import normalizers, pre_tokenizers

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = _REST.replace(r"[\r\n]*|", r"[\r\n/]*|", 1)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"

_LLAMA3 = rf"{_ENDINGS}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|{_LEAD}\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = rf"{_ENDINGS}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = rf"{_LEAD}{_UPPER}*{_LOWER}+%s|{_LEAD}{_UPPER}+{_LOWER}*%s|\p{{N}}%s|{_REST_SLASH}"
_TEKKEN = _CASED % ("", "", "")
_GPT4O = _CASED % (f"{_ENDINGS}?", f"{_ENDINGS}?", "{1,3}")

_HAN_AND_HANGUL = "[一-龥ࠀ-一가-퟿]+"
# Letters with case, as DeepSeek lists them: code points and ranges of them.
_DEEPSEEK_SPANS = (
    "- - 41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C "
    "38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 "
    "1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE "
    "1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 "
    "2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_LETTERS = re.sub("[0-9A-F]+", r"\\x{\g<0>}", _DEEPSEEK_SPANS).replace(" ", "")
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _HAN_AND_HANGUL,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


class PreTokenizerSpec(NamedTuple):
    """How text is split into words before BPE.

    patterns        regular expressions that are applied one after another
    gpt2            GPT-2's own pattern is applied last
    punctuation     runs of punctuation are split off first
    nfc             the text is normalized to NFC
    ignore_merges   a word that is a token becomes that token without merging
    add_bos         the default for vocabularies that do not specify it
    """

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    punctuation: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer, with the byte-level alphabet as its last step."""
        from tokenizers import Regex, pre_tokenizers

        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.punctuation:
            steps = [pre_tokenizers.Punctuation("contiguous"), _byte_level(True)]
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        if not self.punctuation:
            steps.append(_byte_level(self.gpt2))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        """The normalizer, if there is one."""
        from tokenizers import normalizers

        return normalizers.NFC() if self.nfc else None


def _byte_level(use_regex: bool) -> pre_tokenizers.ByteLevel:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


_GPT2 = PreTokenizerSpec(gpt2=True)
_GPT2_NFC = PreTokenizerSpec(gpt2=True, nfc=True)
_GPT2_DIGITS = PreTokenizerSpec((r"\p{N}",), gpt2=True)
_LLAMA3_SPLIT = PreTokenizerSpec((_LLAMA3,), ignore_merges=True, add_bos=True)
_LLAMA3_MERGED = PreTokenizerSpec((_LLAMA3,))
_QWEN2_SPLIT = PreTokenizerSpec((_QWEN2,), nfc=True)

PRE_TOKENIZERS: dict[str, PreTokenizerSpec] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "exaone4": _GPT2,
    "jais": _GPT2,
    "trillion": _GPT2,
    "mpt": _GPT2_NFC,
    "olmo": _GPT2_NFC,
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "codeshell": _GPT2_DIGITS,
    "exaone": _GPT2_DIGITS,
    "command-r": PreTokenizerSpec((r"\p{N}",), gpt2=True, nfc=True),
    "falcon": PreTokenizerSpec((r"\p{N}+", r"[0-9][0-9][0-9]"), punctuation=True),
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "lfm2": _LLAMA3_SPLIT,
    "dbrx": _LLAMA3_MERGED,
    "smaug-bpe": _LLAMA3_MERGED,
    "glm4": _LLAMA3_MERGED,
    "chatglm-bpe": _LLAMA3_MERGED,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "megrez": _QWEN2_SPLIT,
    "qwen35": PreTokenizerSpec((_QWEN35,), nfc=True),
    "stablelm2": PreTokenizerSpec((_QWEN2,)),
    "hunyuan": PreTokenizerSpec((_QWEN2,)),
    "tekken": PreTokenizerSpec((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizerSpec((_GPT4O,)),
    "llama4": PreTokenizerSpec((_GPT4O,)),
    "deepseek-llm": PreTokenizerSpec(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizerSpec(_DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizerSpec(_DEEPSEEK_V3),
}


def find_pre_tokenizer(name: str) -> PreTokenizerSpec:
    """The pre-tokenizer of a name in GGUF."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise UnsupportedModel(
            f"The model's pre-tokenizer (tokenizer.ggml.pre) is {name!r}, which quire does not support; "
            f"it supports {', '.join(sorted(PRE_TOKENIZERS))}."
        ) from None
