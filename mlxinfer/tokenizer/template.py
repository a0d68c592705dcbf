"""Chat templates: Jinja as Hugging Face's checkpoints expect it, in a sandbox that a hostile template cannot stall.

What is bounded: the template's size, attribute access (the immutable sandbox of Jinja), how often loop and macro
bodies run, the time of the whole rendering (looked at in each of those, and at every call, filter, comparison and
container), the size of each value and of all together (budget.py), and the text that comes out. A call in C whose time
grows with the square of its arguments is refused for long ones (filters.py): it cannot be interrupted, and no other
thread runs meanwhile. What is not bounded: recursion inside Jinja's own parser, which ends in an error. Nothing here
opens files or sockets.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import ext, nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from mlxinfer.errors import ContextLengthError, InvalidRequestError, ModelFileError
from mlxinfer.tokenizer import filters
from mlxinfer.tokenizer.budget import (
    MAX_VALUE_SIZE,
    TemplateLimitError,
    check_size,
    current,
    rendering,
    weight,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_TEMPLATE_CHARS = 1 << 17
MAX_OUTPUT_CHARS = MAX_VALUE_SIZE
_UNSAFE_STR_METHODS = frozenset(
    {"center", "encode", "expandtabs", "format_map", "ljust", "maketrans", "rjust", "translate", "zfill"}
)


class _TemplateRaisedError(Exception):
    """The template called raise_exception."""


class _GenerationTag(ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant tokens for training; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` without underscored names, so that a template cannot overwrite the object's own."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        filters.check_pairs(args)
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # what it holds is not weighed


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r:.80}; names may not begin with an underscore")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def mlxinfer_tick(self, text_size: int) -> bool:
        """Called by each loop and macro body with the length of the text that stands in it; see _Instrument."""
        budget = current()
        budget.step()
        budget.build(text_size)
        return True

    def mlxinfer_clock(self) -> bool:
        current().clock()
        return True

    def mlxinfer_built(self, value: Any) -> Any:
        return current().account(value)

    def mlxinfer_concat(self, *parts: Any) -> str:
        """The `~` operator."""
        check_size(sum(len(part) if isinstance(part, str) else weight(part) for part in parts))
        return current().account("".join(map(str, parts)))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not (filters.is_number(left) and filters.is_number(right) and abs(left) <= 1000 and abs(right) <= 100):
                raise TemplateLimitError("a power is too large")
        elif operator == "*":
            filters.check_product(left, right)
            filters.check_product(right, left)
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            check_size(filters.sum_of_sizes(left, right))
        elif operator == "%" and isinstance(left, str):
            filters.check_format(left, right)
        return current().account(super().call_binop(context, operator, left, right))

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse at once; Jinja would print an unsafe attribute as nothing and only raise when it is used."""
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is refused")

    def getitem(self, obj: Any, argument: Any) -> Any:
        current().clock()  # filters follow attributes through here, item by item
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _UNSAFE_STR_METHODS:
            return False
        if isinstance(obj, bytes) or attr == "fromkeys":
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        text = getattr(obj, "__self__", None)
        name = getattr(obj, "__name__", "")
        if isinstance(text, str):
            filters.check_method(name, (*args, *kwargs.values()))
            if name == "replace" and len(args) >= 2:
                filters.check_replace(text, args[0], args[1])
            elif name == "join" and args:
                args = (list(args[0]), *args[1:])
                filters.check_join(args[0], text)
            elif name in ("split", "rsplit", "splitlines"):
                filters.check_split(text, args, kwargs)
        elif name == "format" and isinstance(
            wrapped := getattr(getattr(obj, "__wrapped__", None), "__self__", None), str
        ):
            filters.check_format(wrapped, [args, kwargs])
        budget = current()
        budget.clock()
        return budget.account(super().call(context, obj, *args, **kwargs))


class _Instrument(NodeTransformer):
    """Makes every loop and macro body count itself, and whatever builds or compares values pay for it."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        line = node.lineno
        if isinstance(node, nodes.Concat):
            return _call_environment("mlxinfer_concat", list(node.nodes), line)
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.FilterBlock | nodes.Block):
            node.body.insert(0, nodes.ExprStmt(_tick(node, line), lineno=line))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(_tick(node.test, line), node.test, lineno=line)
        if isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
            return _call_environment("mlxinfer_built", [node], line)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return _call_environment("mlxinfer_built", [node], line)
        if isinstance(node, nodes.Compare):
            return nodes.And(_call_environment("mlxinfer_clock", [], line), node, lineno=line)
        return node


def _tick(node: nodes.Node, line: int) -> nodes.Call:
    size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    return _call_environment("mlxinfer_tick", [nodes.Const(size)], line)


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
        except (RecursionError, MemoryError, SyntaxError, OverflowError, TemplateLimitError) as error:
            raise ModelFileError(f"the chat template cannot be compiled: {error or type(error).__name__}") from error

    def render(self, variables: Mapping[str, Any], *, max_chars: int | None = None) -> str:
        """The text for `variables`. Raises InvalidRequestError with the template's own message, or the limit it hit,
        and ContextLengthError when the text gets longer than `max_chars`."""
        try:
            with rendering() as budget:
                for value in variables.values():
                    budget.account(value)
                return _collect(self._template.generate(**variables), max_chars)
        except ContextLengthError:  # a ValueError too
            raise
        except _TemplateRaisedError as error:
            raise InvalidRequestError(str(error), param="messages") from error
        except TemplateLimitError as error:
            raise InvalidRequestError(f"the chat template was stopped: {error}", param="messages") from error
        except jinja2.TemplateError as error:  # SecurityError and UndefinedError among them
            raise InvalidRequestError(f"the chat template failed: {error}", param="messages") from error
        except _FOREIGN as error:
            raise InvalidRequestError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}", param="messages"
            ) from error


# What an expression of a template can raise by itself: it runs on the caller's data.
_FOREIGN = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)


def _collect(pieces: Iterator[str], max_chars: int | None) -> str:
    budget, parts, size = current(), [], 0
    for piece in pieces:
        budget.clock()
        size += len(piece)
        if max_chars is not None and size > max_chars:
            raise ContextLengthError(
                f"the chat has more than {max_chars:,} characters, which cannot fit the context; shorten the messages",
                param="messages",
            )
        if size > MAX_OUTPUT_CHARS:
            raise TemplateLimitError(f"its text is longer than {MAX_OUTPUT_CHARS:,} characters")
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
    filters.install(env)
    return env


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict()` as a plain function: the type itself has attributes."""
    filters.check_pairs(args)
    return dict(*args, **kwargs)


def _finalize(value: Any) -> Any:
    """What `{{ … }}` prints."""
    budget = current()
    if isinstance(value, str):
        budget.build(len(value))
    else:
        budget.build(weight(value))
    return value


def _raise_exception(message: Any = "") -> None:
    raise _TemplateRaisedError(str(message))


def _strftime_now(format: str) -> str:
    if len(str(format)) > filters.MAX_PADDING or filters.WIDE_FORMAT.search(str(format).replace("%", "")):
        raise TemplateLimitError("a time format is too long")
    return time.strftime(str(format))
