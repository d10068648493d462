"""The tokenizer files of a Hugging Face model directory: reads and checks them for `Tokenizer.from_directory`.

Only tokenizer.json is required. In its place a directory may have vocab.json and merges.txt, as OPT's and the first
files of GPT-2 do: byte-level BPE with GPT-2's rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import BadModelFile, ModelNotFound

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The parsed files. A missing file is an empty mapping."""

    path: Path
    backend: Backend
    tokenizer_config: Mapping[str, Any]
    special_tokens_map: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    config: Mapping[str, Any]

    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token, ... by name. tokenizer_config.json has precedence."""
        found = {}
        for name in _SPECIAL_NAMES:
            for source in (self.special_tokens_map, self.tokenizer_config):
                if (content := _content(source.get(name))) is not None:
                    found[name] = content
        return found

    def end_ids(self) -> set[int]:
        """The EOS token ids of generation_config.json and config.json."""
        return {
            *self._eos_of(self.generation_config, "generation_config.json"),
            *self._eos_of(self.config, "config.json"),
        }

    def _eos_of(self, source: Mapping[str, Any], name: str) -> Iterable[int]:
        value = source.get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise BadModelFile(
                f"{self.path / name} has the eos_token_id {value!r}; it is a token id or a list of them."
            )
        return values

    def chat_template(self) -> str | None:
        """The chat template: chat_template.jinja first, then tokenizer_config.json, which may hold a list of them."""
        if (path := self.path / "chat_template.jinja").is_file():
            return _read_text(path)
        template = self.tokenizer_config.get("chat_template")
        if isinstance(template, list):
            return _pick_template(template, self.path)
        if template is None or isinstance(template, str):
            return template
        raise BadModelFile(
            f"{self.path / 'tokenizer_config.json'} has a chat_template that is neither text nor a list."
        )


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read the files of a directory."""
    if not path.is_dir():
        raise ModelNotFound(f"{path} is not a directory.")
    tokenizer_config = _read_json(path / "tokenizer_config.json")
    return TokenizerFiles(
        path,
        _read_backend(path / "tokenizer.json", tokenizer_config),
        tokenizer_config,
        _read_json(path / "special_tokens_map.json"),
        _read_json(path / "generation_config.json"),
        _read_json(path / "config.json"),
    )


def _read_backend(path: Path, tokenizer_config: Mapping[str, Any]) -> Backend:
    from tokenizers import Tokenizer as Backend

    parts = path.with_name("vocab.json"), path.with_name("merges.txt")
    if not path.is_file() and not all(part.is_file() for part in parts):
        raise BadModelFile(f"{path.parent} has no tokenizer.json, so its model cannot read text. Save one beside it.")
    try:
        backend = Backend.from_file(str(path)) if path.is_file() else _read_gpt2(*parts, tokenizer_config)
    except Exception as error:
        name = path if path.is_file() else f"{parts[0]} with merges.txt"
        raise BadModelFile(f"{name} cannot be read as a tokenizer: {error}.") from error
    # tokenizer.json may enable these, but quire refuses a text that is too long instead of truncating it.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_gpt2(vocabulary: Path, merges: Path, tokenizer_config: Mapping[str, Any]) -> Backend:
    """GPT-2's tokenizer from its two files. `add_bos_token` puts the first token before each text."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE.from_file(str(vocabulary), str(merges)))
    prefix = tokenizer_config.get("add_prefix_space") is True
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    named = {name: text for name in _SPECIAL_NAMES if (text := _content(tokenizer_config.get(name))) is not None}
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in dict.fromkeys(named.values())])
    if tokenizer_config.get("add_bos_token") is True and "bos_token" in named:
        bos = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return backend


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise BadModelFile(f"{path} holds a JSON {type(value).__name__}; it must be an object.")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadModelFile(f"{path} cannot be read: {error}.") from error


def _content(token: Any) -> str | None:
    """A special token is stored as a string or as an object with `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _pick_template(templates: list[Any], path: Path) -> str | None:
    try:
        named = {str(entry["name"]): str(entry["template"]) for entry in templates}
    except (TypeError, KeyError) as error:
        raise BadModelFile(f"{path / 'tokenizer_config.json'} has a list of chat templates without names.") from error
    return named.get("default", next(iter(named.values()), None))
