"""Text to token ids and back: the folder's tokenizer, its chat template, and text that grows token by token.

Gives what transformers gives for the same folder, without loading it (it pulls in torch). Knows nothing of
sessions, requests or models.
"""

import codecs
import json
import re
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import AddedToken, Tokenizer

RENDER_SECONDS = 2.0
MAX_RENDERED_CHARACTERS = 16 * 2**20


class TextError(ValueError):
    """A folder, prompt or conversation that cannot be used; the message names the field and the value."""


class TextStream(Protocol):
    """The text of one growing sequence of ids, special tokens left out, as the tokenizer decodes the whole.

    All that `push` and `flush` have returned, joined, is `tokenizer.decode(ids, skip_special_tokens=True)`,
    whatever the ids. A token's cost does not depend on how many came before.
    """

    def push(self, token_id: int) -> str:
        """The text that this token completes: '' inside a character, for special and for unknown ids."""

    def flush(self) -> str:
        """The text held back for a character that never came to its end; call it once, last."""


class Text:
    """A model folder's tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer, template: "ChatTemplate | str") -> None:
        """`template` may be the reason why there is none, as it continues 'this model has'."""
        self._tokenizer = tokenizer
        self._template = template
        self._decoder_steps = _decoder_steps(tokenizer)
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
            return _ByteLevelStream(self._tokenizer, self._special_ids)
        return _PieceStream(self._tokenizer, self._special_ids, "ByteFallback" in self._decoder_steps)

    def _ids(self, field: str, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError(
                f"{field}: is not Unicode text; character {error.start} is half a pair"
            ) from error
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


# ---- the tokenizer, as transformers sets it up from the same files


_NAMED = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"]


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


# ---- the chat template


def _find_template(
    folder: Path, config: dict[str, Any], special_tokens: Mapping[str, str]
) -> "ChatTemplate | str":
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


class ChatTemplate:
    """A chat template in the environment that templates are written for, and within limits.

    The sandbox keeps Python's internals from it and `range` below 100,000; the time is looked at in each call
    and each turn of a loop, the length with each piece of output. That ends accidents. It does not make a
    hostile template safe (one multiplication can ask for all the memory): trust it as far as its folder.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises TemplateError on a source that does not compile."""
        self._template = _Sandbox().compile_limited(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The conversation of (role, content) as one text; raises TextError with the template's own words."""
        variables = {
            "messages": [{"role": role, "content": content} for role, content in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        pieces = []
        length = 0
        token = _deadline.set(time.monotonic() + RENDER_SECONDS)
        try:
            for piece in self._template.generate(self._special_tokens | variables):
                _look_at_the_time()
                length += len(piece)
                if length > MAX_RENDERED_CHARACTERS:
                    raise TemplateError(f"its output is longer than {MAX_RENDERED_CHARACTERS} characters")
                pieces.append(piece)
        except Exception as error:  # a template can raise whatever Python can
            raise TextError(f"messages: the chat template failed: {error}") from error
        finally:
            _deadline.reset(token)
        return "".join(pieces)


_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))


def _look_at_the_time() -> None:
    if time.monotonic() > _deadline.get():
        raise TemplateError(f"it took more than {RENDER_SECONDS} seconds")


class _Sandbox(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda format_: datetime.now().strftime(format_),
            "dict": _DictGlobal(),
            "namespace": _TemplateNamespace,
        }

    def compile_limited(self, source: str) -> Template:
        """The template with a call, hence a look at the time, put into each turn of each loop."""
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            turn = nodes.Call(nodes.EnvironmentAttribute("turn"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(turn))
            if loop.test is not None:
                loop.test = nodes.And(nodes.Not(turn), loop.test)
            loop.set_lineno(loop.lineno).set_environment(self)
        code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None))

    @staticmethod
    def turn() -> None:
        """Called by the loops; `call` does the work."""

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _look_at_the_time()
        return super().call(context, function, *args, **kwargs)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks an answer for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja's declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class _DictGlobal:
    """`dict` without the type's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """A namespace that refuses underscored names, which could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # like jinja's: 'self' may be a key
        self, *positional = args
        values = dict(*positional, **kwargs)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}, which begins with an underscore")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would change the prompt."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


# ---- from ids to text. The library's DecodeStream is not used: it raises where bytes that began a character
# turn out not to be one, holds everything from an invalid byte on (so that a token's cost grows), and never
# tells what it holds.


_LOCAL_STEPS = {"BPEDecoder", "ByteFallback", "CTC", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}


def _decoder_steps(tokenizer: Tokenizer) -> list[str]:
    """The names of the decoder's steps; raises TextError where a token's text depends on far ones."""
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    steps = _flatten(json.loads(decoder.__getstate__()))
    names = [step["type"] for step in steps]
    if names != ["ByteLevel"]:
        for step in steps:
            strips_more = step["type"] == "Strip" and (step["start"] > 1 or step["stop"] > 0)
            if step["type"] not in _LOCAL_STEPS or strips_more:
                raise TextError(f"tokenizer.json: decoder: {step} cannot be streamed within {names}")
    return names


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for outer in step["decoders"] for inner in _flatten(outer)]


def _byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies write a printable byte as its Latin-1 character, the n-th other as 256 + n."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class _ByteLevelStream:
    """Tokens are bytes, and the text is their UTF-8."""

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return ""
        try:
            data = bytes(_BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:  # an added token in its own words
            data = token.encode()
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceStream:
    """Tokens are pieces of text or, with byte fallback, single bytes `<0xE4>`.

    A piece's text depends on the piece before it at most (the first loses its space), so it is what decoding
    both gives beyond decoding that one alone. A run of bytes is decoded as a whole: as its characters or, if
    one of them is not complete, as one U+FFFD a byte. So a run is held until a piece ends it.
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int], has_byte_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._byte_token = re.compile(r"<0x..>" if has_byte_tokens else r"(?!)")
        self._before: list[int] = []  # the last piece
        self._held: list[int] = []  # bytes after it

    def push(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return ""
        self._held.append(token_id)
        if self._byte_token.fullmatch(token):
            return ""
        text = self._decode_held()
        self._before, self._held = [token_id], []
        return text

    def flush(self) -> str:
        return self._decode_held()

    def _decode_held(self) -> str:
        emitted = self._tokenizer.decode(self._before)
        return self._tokenizer.decode(self._before + self._held)[len(emitted) :]
