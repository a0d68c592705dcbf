"""The filters of chat templates, and the checks that come before an expression builds something large."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2

from mlxinfer.tokenizer.budget import NODE_WEIGHT, TemplateLimitError, check_size, current, weight

MAX_PADDING = 1000
"""Widest field a formatting filter may pad to, and the longest text that takes part in a slow search."""
MAX_PAIRS = 4096
"""Pairs that one call may make a dict of: with keys that are made to collide its time grows with their square."""
MAX_ATTRIBUTES = 8
"""Attributes that a filter may follow or sort by, for each item."""
MAX_SLOW_CHARS = 1 << 20
"""Longest text of filters that look at each character in Python or collect its pieces."""

_UNSAFE_FILTERS = (
    "center", "filesizeformat", "pprint", "random", "striptags", "urlize", "wordcount", "wordwrap", "xmlattr",
)  # fmt: skip
_TAKES_ITEMS = frozenset(
    {
        "batch", "groupby", "join", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr",
        "slice", "sort", "sum", "unique",
    }
)  # fmt: skip
_SLOW_METHODS = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"})
"""str methods whose time is the text's length times the argument's, in one call that nothing can interrupt."""
WIDE_FORMAT = re.compile(r"\d{4,}|\*|\{[^}]*\{")


def install(env: jinja2.Environment) -> None:
    """Replace what can build too much, take out what no template needs, let all of them account for their results."""
    for name in _UNSAFE_FILTERS:
        env.filters.pop(name, None)
    env.filters["tojson"] = _tojson
    for name in ("indent", "truncate", "batch", "slice", "round", "trim"):
        env.filters[name] = _padding_checked(env.filters[name])
    for name in ("int", "float", "title", "urlencode"):
        env.filters[name] = _length_checked(env.filters[name])
    env.filters["string"] = _string_filter
    env.filters["format"] = _format_filter
    env.filters["replace"] = _replace_filter
    env.filters["join"] = _join_filter(env.filters["join"])
    env.filters["sum"] = _sum_filter(env.filters["sum"])
    env.filters["indent"] = _indent_filter(env.filters["indent"])
    for name, function in env.filters.items():
        env.filters[name] = _accounted(function, name in _TAKES_ITEMS, name not in ("join", "batch", "slice"))
    for name, function in env.tests.items():
        env.tests[name] = _accounted(function)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes <, >, & and ' for HTML, which models were not trained on."""
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        raise TemplateLimitError(f"tojson indent is {indent!r:.40}; at most 16")
    size, depth = current().weigh(value)
    around = (indent or 0) * depth + sum(len(str(part)) for part in separators or ())
    check_size(size + size // NODE_WEIGHT * around)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _padding_checked(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose integer arguments say how much to pad."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        for value in values[1:] if args else values:
            if is_number(value) and abs(value) > MAX_PADDING:
                raise TemplateLimitError(f"a filter pads by {value}; at most {MAX_PADDING}")
            if isinstance(value, str) and len(value) > MAX_PADDING:
                raise TemplateLimitError(f"a filter pads with {len(value)} characters; at most {MAX_PADDING}")
        return filter_(*args, **kwargs)

    for attribute in ("jinja_pass_arg", "__name__"):  # Jinja's mark of filters that want the environment first
        with contextlib.suppress(AttributeError):
            setattr(checked, attribute, getattr(filter_, attribute))
    return checked


def _length_checked(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes long for its text."""

    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        if weight(value) > MAX_SLOW_CHARS:
            raise TemplateLimitError(f"a filter is given more than {MAX_SLOW_CHARS:,} characters")
        return filter_(value, *args, **kwargs)

    return checked


def _check_attributes(text: str) -> None:
    """Of a filter's argument that may name attributes to follow (a.b.c) or to sort by (a,b)."""
    if len(text) > MAX_PADDING or text.count(".") + text.count(",") >= MAX_ATTRIBUTES:
        raise TemplateLimitError(f"a filter names too many attributes: {text!r:.40}")


def check_method(name: str, args: Iterable[Any]) -> None:
    """Before a method of a string is called."""
    longest = max((len(value) for value in args if isinstance(value, str)), default=0)
    if name in _SLOW_METHODS and longest > MAX_PADDING:
        raise TemplateLimitError(f"{name} is given {longest:,} characters; at most {MAX_PADDING:,}")


def check_pairs(args: Sequence[Any]) -> None:
    """Before a dict is made of a list of pairs."""
    if args and not isinstance(args[0], Mapping) and (not hasattr(args[0], "__len__") or len(args[0]) > MAX_PAIRS):
        raise TemplateLimitError(f"a dict is made of more than {MAX_PAIRS:,} pairs")


def _accounted(
    function: Callable[..., Any], takes_items: bool = False, follows_attributes: bool = False
) -> Callable[..., Any]:
    """A filter or test that looks at the clock and has what it makes weighed."""

    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    def accounted(*args: Any, **kwargs: Any) -> Any:
        budget = current()
        budget.clock()
        if takes_items:
            for value in args:
                if isinstance(value, str):  # each character becomes an item
                    check_size(len(value) * NODE_WEIGHT)
            if follows_attributes:
                for value in (*args[first + 1 :], *kwargs.values()):
                    if isinstance(value, str):
                        _check_attributes(value)
            if len(args) > first and isinstance(args[first], Iterable):
                args = (*args[:first], budget.clocked(args[first]), *args[first + 1 :])
        return budget.account(function(*args, **kwargs))

    with contextlib.suppress(AttributeError):  # Jinja's mark of filters that want the environment first
        accounted.jinja_pass_arg = function.jinja_pass_arg  # pyright: ignore[reportFunctionMemberAccess]
    return accounted


def _string_filter(value: Any) -> str:
    check_size(weight(value))
    return str(value)


def _format_filter(value: Any, *args: Any, **kwargs: Any) -> str:
    check_format(str(value), kwargs or args)
    return str(value) % (kwargs or args)


def _replace_filter(value: Any, old: str, new: str, count: int = -1) -> str:
    check_size(weight(value))
    check_replace(str(value), old, new)
    return str(value).replace(old, new, count)


def _join_filter(filter_: Callable[..., Any]) -> Callable[..., Any]:
    @jinja2.pass_eval_context
    def join(eval_ctx: Any, value: Any, d: str = "", attribute: str | int | None = None) -> Any:
        items = list(value)
        if attribute is not None:
            _check_attributes(str(attribute))
        check_join(items, d)
        return filter_(eval_ctx, items, d, attribute)

    return join


def _sum_filter(filter_: Callable[..., Any]) -> Callable[..., Any]:
    @jinja2.pass_environment
    def sum_(environment: Any, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
        if not is_number(start):
            raise TemplateLimitError("sum adds numbers only")
        return filter_(environment, iterable, attribute, start)

    return sum_


def _indent_filter(filter_: Callable[..., Any]) -> Callable[..., Any]:
    def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        check_size(weight(s))
        wide = len(width) if isinstance(width, str) else width
        check_size(len(s) + (len(str(s).splitlines()) + 1) * wide)
        return filter_(s, width, first, blank)

    return indent


def is_number(value: object) -> bool:
    return isinstance(value, int | float)


def sum_of_sizes(left: Any, right: Any) -> int:
    return sum(len(v) if isinstance(v, str) else weight(v) for v in (left, right))


def check_product(sequence: Any, times: Any) -> None:
    if isinstance(times, int):
        if isinstance(sequence, str | bytes):
            check_size(len(sequence) * times)
        elif isinstance(sequence, list | tuple):
            check_size(weight(sequence) * times)
        elif isinstance(sequence, int) and sequence.bit_length() + times.bit_length() > 4096:
            raise TemplateLimitError("a product is too large")


def check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        check_size(len(text) + text.count(old) * len(new))


def check_split(text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    separator = args[0] if args else kwargs.get("sep")
    pieces = text.count(separator) if isinstance(separator, str) and separator else len(text) // 2
    check_size(len(text) + pieces * NODE_WEIGHT)


def check_join(items: Any, separator: Any) -> None:
    if isinstance(items, Sequence):
        check_size(weight(items) + len(items) * len(str(separator)))


def check_format(text: str, values: Any) -> None:
    if WIDE_FORMAT.search(text):
        raise TemplateLimitError("a format string has a field that is too wide")
    # A field may be named again and again.
    fields = max(1, text.count("%"), text.count("{"))
    check_size(len(text) + fields * (weight(values) + MAX_PADDING))
