"""A model's chat template, rendered in the environment that templates are written for, within limits.

Gives what transformers gives for the same template. Knows conversations and strings; no tokens.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from coordinator.text_error import TextError

RENDER_SECONDS = 2.0
MAX_RENDERED_CHARACTERS = 16 * 2**20


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
