"""Chat templates: Jinja as Hugging Face's checkpoints expect it, in a sandbox that a hostile template cannot stall.

What is bounded: the template's size, attribute access (the immutable sandbox of Jinja), how often loop and macro
bodies run, the time of the whole rendering (looked at in each of those), ranges, products, sums and replacements of
strings and lists, and the text that comes out. What is not bounded: the time of a single filter over data of bounded
size, and recursion inside Jinja's own parser, which ends in an error. Nothing here opens files or sockets.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import ext, nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from mlxinfer.errors import InvalidRequestError, ModelFileError

MAX_TEMPLATE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 32 << 20
MAX_VALUE_SIZE = 32 << 20
"""Longest string or list an expression may build."""
MAX_STEPS = 300_000
"""Loop and macro bodies that one rendering may run."""
MAX_SECONDS = 5.0
MAX_PADDING = 10_000
"""Widest field a formatting filter may pad to."""

_UNSAFE_STR_METHODS = frozenset({"center", "expandtabs", "format_map", "ljust", "rjust", "zfill"})
_UNSAFE_FILTERS = (
    "center", "filesizeformat", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr",
)  # fmt: skip
_WIDE_FORMAT = re.compile(r"\d{5,}|\*|\{[^}]*\{")


class _TemplateLimitError(Exception):
    """A template went past one of the limits above."""


class _TemplateRaisedError(Exception):
    """The template called raise_exception."""


@dataclass(slots=True)
class _Budget:
    deadline: float
    steps: int = MAX_STEPS

    def spend(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise _TemplateLimitError(f"its loops ran more than {MAX_STEPS:,} times")
        if time.monotonic() > self.deadline:
            raise _TemplateLimitError(f"it took longer than {MAX_SECONDS:g} s")


_budget: contextvars.ContextVar[_Budget | None] = contextvars.ContextVar("chat_template_budget", default=None)


class _GenerationTag(ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant tokens for training; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` without underscored names, so that a template cannot overwrite the object's own."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r:.80}; names may not begin with an underscore")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def mlxinfer_tick(self) -> bool:
        """Called by each loop and macro body; see _Instrument."""
        if (budget := _budget.get()) is not None:
            budget.spend()
        return True

    def mlxinfer_concat(self, *parts: Any) -> str:
        """The `~` operator."""
        _check_text_size(parts)
        return "".join(map(str, parts))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not (_is_number(left) and _is_number(right) and abs(left) <= 1000 and abs(right) <= 100):
                raise _TemplateLimitError("a power is too large")
        elif operator == "*":
            _check_product(left, right)
            _check_product(right, left)
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_size(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
            _check_text_size(right)
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse at once; Jinja would print an unsafe attribute as nothing and only raise when it is used."""
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is refused")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _UNSAFE_STR_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):
            name = getattr(obj, "__name__", "")
            if name == "replace" and len(args) >= 2:
                _check_replace(text, args[0], args[1])
            elif name == "join" and args:
                _check_join(args[0], text)
        elif getattr(obj, "__name__", "") == "format" and isinstance(
            wrapped := getattr(getattr(obj, "__wrapped__", None), "__self__", None), str
        ):
            _check_format(wrapped)
            _check_text_size([args, kwargs])
        return super().call(context, obj, *args, **kwargs)


class _Instrument(NodeTransformer):
    """Makes every loop and macro body count itself, and `~` check the size of what it builds."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        line = node.lineno
        if isinstance(node, nodes.Concat):
            return _call_environment("mlxinfer_concat", list(node.nodes), line)
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.FilterBlock | nodes.Block):
            node.body.insert(0, nodes.ExprStmt(_call_environment("mlxinfer_tick", [], line), lineno=line))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(_call_environment("mlxinfer_tick", [], line), node.test, lineno=line)
        return node


def _call_environment(method: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None, lineno=line)


class ChatTemplate:
    """One compiled chat template. Thread-safe.

    Raises ModelFileError when it is too large or does not parse.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelFileError(f"the chat template has {len(source):,} characters; at most {MAX_TEMPLATE_CHARS:,}")
        self._environment = _environment()
        try:
            tree = _Instrument().visit(self._environment.parse(source))
            code = self._environment.compile(tree)
            self._template = jinja2.Template.from_code(self._environment, code, self._environment.globals)
        except jinja2.TemplateError as error:
            raise ModelFileError(f"the chat template does not parse: {error}") from error
        except (RecursionError, MemoryError, SyntaxError, OverflowError, _TemplateLimitError) as error:
            raise ModelFileError(f"the chat template cannot be compiled: {error or type(error).__name__}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text for `variables`. Raises InvalidRequestError with the template's own message, or the limit it hit."""
        token = _budget.set(_Budget(time.monotonic() + MAX_SECONDS))
        try:
            return _collect(self._template.generate(**variables))
        except _TemplateRaisedError as error:
            raise InvalidRequestError(str(error), param="messages") from error
        except _TemplateLimitError as error:
            raise InvalidRequestError(f"the chat template was stopped: {error}", param="messages") from error
        except jinja2.TemplateError as error:  # SecurityError and UndefinedError among them
            raise InvalidRequestError(f"the chat template failed: {error}", param="messages") from error
        except _FOREIGN as error:
            raise InvalidRequestError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}", param="messages"
            ) from error
        finally:
            _budget.reset(token)


# What an expression of a template can raise by itself: it runs on the caller's data.
_FOREIGN = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)


def _collect(pieces: Iterator[str]) -> str:
    budget, parts, size = _budget.get(), [], 0
    assert budget is not None
    for piece in pieces:
        budget.spend()
        size += len(piece)
        if size > MAX_OUTPUT_CHARS:
            raise _TemplateLimitError(f"its text is longer than {MAX_OUTPUT_CHARS:,} characters")
        parts.append(piece)
    return "".join(parts)


def _environment() -> _Environment:
    env = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[ext.loopcontrols, _GenerationTag],
        optimized=False,  # no folding of constants: what is built is built under the budget
        finalize=_finalize,
    )
    for name in ("lipsum", "cycler", "joiner"):
        env.globals.pop(name, None)
    env.globals["namespace"] = _Namespace
    env.globals["dict"] = _dict
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    for name in _UNSAFE_FILTERS:
        env.filters.pop(name, None)
    env.filters["tojson"] = _tojson
    for name in ("indent", "truncate", "batch", "slice", "round"):
        env.filters[name] = _padding_checked(env.filters[name])
    env.filters["string"] = _string_filter
    env.filters["format"] = _format_filter
    env.filters["replace"] = _replace_filter
    env.filters["join"] = _join_filter(env.filters["join"])
    return env


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict()` as a plain function: the type itself has attributes."""
    return dict(*args, **kwargs)


def _finalize(value: Any) -> Any:
    """What `{{ … }}` prints."""
    if not isinstance(value, str):
        _check_text_size(value)
    return value


def _raise_exception(message: Any = "") -> None:
    raise _TemplateRaisedError(str(message))


def _strftime_now(format: str) -> str:
    _check_format(str(format).replace("%", ""))
    return time.strftime(str(format))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes <, >, & and ' for HTML, which models were not trained on."""
    if isinstance(indent, int) and indent > 64:
        raise _TemplateLimitError(f"tojson indent is {indent}; at most 64")
    _check_text_size(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _padding_checked(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose integer arguments say how much to pad."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        for value in values[1:] if args else values:
            if _is_number(value) and abs(value) > MAX_PADDING:
                raise _TemplateLimitError(f"a filter pads by {value}; at most {MAX_PADDING}")
            if isinstance(value, str) and len(value) > MAX_PADDING:
                raise _TemplateLimitError(f"a filter pads with {len(value)} characters; at most {MAX_PADDING}")
        return filter_(*args, **kwargs)

    for attribute in ("jinja_pass_arg", "__name__"):  # Jinja's mark of filters that want the environment first
        with contextlib.suppress(AttributeError):
            setattr(checked, attribute, getattr(filter_, attribute))
    return checked


def _string_filter(value: Any) -> str:
    _check_text_size(value)
    return str(value)


def _format_filter(value: Any, *args: Any, **kwargs: Any) -> str:
    _check_format(str(value))
    _check_text_size([args, kwargs])
    return str(value) % (kwargs or args)


def _replace_filter(value: Any, old: str, new: str, count: int = -1) -> str:
    _check_replace(str(value), old, new)
    return str(value).replace(old, new, count)


def _join_filter(filter_: Callable[..., Any]) -> Callable[..., Any]:
    @jinja2.pass_eval_context
    def join(eval_ctx: Any, value: Any, d: str = "", attribute: str | int | None = None) -> Any:
        items = list(value)
        _check_join(items, d)
        return filter_(eval_ctx, items, d, attribute)

    return join


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _check_size(size: int) -> None:
    if size > MAX_VALUE_SIZE:
        raise _TemplateLimitError(f"it builds a value of {size:,} items; at most {MAX_VALUE_SIZE:,}")


def _check_product(sequence: Any, times: Any) -> None:
    if isinstance(times, int):
        if isinstance(sequence, str | bytes | list | tuple):
            _check_size(len(sequence) * times)
        elif isinstance(sequence, int) and sequence.bit_length() + times.bit_length() > 4096:
            raise _TemplateLimitError("a product is too large")


def _check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _check_size(len(text) + text.count(old) * len(new))


def _check_join(items: Any, separator: Any) -> None:
    if isinstance(items, Sequence):
        _check_text_size(items)
        _check_size(len(items) * len(str(separator)))


def _check_text_size(value: Any) -> None:
    """Refuse what would be too long as text; containers may hold one long string many times."""
    size, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            stack += item
        size += 1
        if size > MAX_VALUE_SIZE or len(stack) > MAX_VALUE_SIZE:
            raise _TemplateLimitError(f"it writes a value of more than {MAX_VALUE_SIZE:,} characters")


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise _TemplateLimitError("a format string has a field that is too wide")
