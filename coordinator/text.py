"""Text to token ids and back: the folder's tokenizer with its chat template.

Gives what transformers gives for the same folder, without loading it (it pulls in torch). Knows nothing of
sessions, requests or models.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer

from coordinator.chat_template import ChatTemplate
from coordinator.text_error import TextError
from coordinator.text_stream import ByteLevelStream, PieceStream, TextStream, decoder_steps

_NAMED = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"]


class Text:
    """A model folder's tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | str) -> None:
        """`template` may be the reason why there is none, as it continues 'this model has'."""
        self._tokenizer = tokenizer
        self._template = template
        self._decoder_steps = decoder_steps(tokenizer)
        self._special_ids = _special_ids(tokenizer)
        self.num_tokens = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """The largest id + 1, added tokens included; the model's vocabulary may be padded beyond it."""

    @classmethod
    def load(cls, folder: Path) -> "Text":
        """Read tokenizer.json and, where they exist, its companions.

        Raises TextError on a file that is missing or cannot be read, or a decoder that cannot be streamed.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TextError(f"{folder}: has no tokenizer.json; only models that carry one can be served")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise TextError(f"{file}: cannot be read: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _configure(tokenizer, config, _read_json(folder / "special_tokens_map.json"))
        return cls(tokenizer, _find_template(folder, config, special_tokens))

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can be used."""
        return isinstance(self._template, ChatTemplate)

    def encode(self, text: str) -> list[int]:
        """The ids of a plain text, with the special tokens that the tokenizer puts around every text.

        As in transformers, the written form of a special token becomes that token.
        """
        return self._ids("text", text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """The ids of a conversation of (role, content), up to where the assistant's answer begins.

        Rendering blocks, RENDER_SECONDS at most. Raises TextError when there is no template, a role is not
        a word, or the template refuses the conversation.
        """
        if not isinstance(self._template, ChatTemplate):
            raise TextError(f"messages: this model has {self._template}; send text or token_ids")
        if not messages:
            raise TextError("messages: is empty; send at least one")
        for i, (role, _) in enumerate(messages):
            if not re.fullmatch(r"[\w-]+", role):  # more could forge the template's own marks
                raise TextError(
                    f"messages[{i}].role: is {role!r}; send one word, such as 'user' or 'assistant'"
                )
        return self._ids("messages", self._template.render(messages), add_special_tokens=False)

    def stream(self) -> TextStream:
        """A new, empty stream."""
        if self._decoder_steps == ["ByteLevel"]:
            return ByteLevelStream(self._tokenizer, self._special_ids)
        return PieceStream(self._tokenizer, self._special_ids, "ByteFallback" in self._decoder_steps)

    def _ids(self, field: str, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError(
                f"{field}: is not Unicode text; character {error.start} is half a pair"
            ) from error
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TextError(f"{file}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TextError(f"{file}: is not a JSON object")
    return content


def _configure(
    tokenizer: Tokenizer, config: dict[str, Any], special_tokens_map: dict[str, Any]
) -> dict[str, str]:
    """Add the tokens that only the configuration knows; returns the named ones, `bos_token` and so on.

    special_tokens_map.json is an older form of `added_tokens_decoder`, and is not looked at beside it.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))

    added = config.get("added_tokens_decoder")
    settings = config if added is not None else config | special_tokens_map
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    named = {name: settings[name] for name in _NAMED if name in settings}
    named |= {name: value for name, value in settings.items() if name.endswith("_token")}
    if isinstance(extra, dict):
        named, extra = named | extra, []
    named = {name: value for name, value in named.items() if isinstance(value, str | dict)}

    tokens = [
        _added_token(token) for _, token in sorted((added or {}).items(), key=lambda item: int(item[0]))
    ]
    known = {token.content for token in [*tokens, *tokenizer.get_added_tokens_decoder().values()]}
    for token in map(_special_token, [*named.values(), *extra]):
        if token.content not in known:
            tokens.append(token)
            known.add(token.content)
    tokenizer.add_tokens(tokens)
    return {name: _special_token(value).content for name, value in named.items()}


def _added_token(value: dict[str, Any]) -> AddedToken:
    return AddedToken(**{name: setting for name, setting in value.items() if name != "__type"})


def _special_token(value: str | dict[str, Any]) -> AddedToken:
    return (
        AddedToken(value, special=True) if isinstance(value, str) else _added_token(value | {"special": True})
    )


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that decoding leaves out; tried, because it goes by a token's content and not by its flag."""

    def is_left_out(token_id: int) -> bool:
        return tokenizer.decode([token_id]) != tokenizer.decode([token_id], skip_special_tokens=False)

    added = tokenizer.get_added_tokens_decoder().items()
    return frozenset(token_id for token_id, token in added if token.special or is_left_out(token_id))


def _find_template(
    folder: Path, config: dict[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | str:
    """chat_template.jinja, else the configuration's `chat_template`; or the reason why there is none."""
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        named = {str(entry["name"]): entry["template"] for entry in source}
        if "default" not in named:
            return f"several chat templates ({', '.join(sorted(named))}) and none is named 'default'"
        source = named["default"]
    if source is None:
        return "no chat template"
    try:
        return ChatTemplate(source, special_tokens)
    except (TemplateError, SyntaxError) as error:  # text and token ids go on working
        return f"a chat template that cannot be compiled ({error})"
