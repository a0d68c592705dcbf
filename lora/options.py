"""Options declared once, as fields of dataclasses: what is read from flags and files is checked against them."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import reprlib
import tomllib
import types
import typing
from typing import TYPE_CHECKING, Any, Literal

from mlxinfer.errors import InvalidRequestError, ModelFileError
from mlxinfer.formats.files import read_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MAX_CONFIG_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One field `name: Annotated[kind, help] = default`."""

    name: str
    kind: Any
    """bool, int, float, str, a Literal, tuple[str, ...], a Mapping, or one of these or None."""
    default: Any
    help: str

    @property
    def plain(self) -> Any:
        """The kind without "or None"."""
        if typing.get_origin(self.kind) is types.UnionType:
            return next(one for one in typing.get_args(self.kind) if one is not types.NoneType)
        return self.kind

    def check(self, value: object) -> None:
        """Raises InvalidRequestError for a value of another kind."""
        kind = self.plain
        if value is None and kind is not self.kind:
            return
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is Literal:
            good, wanted = value in arguments, f"one of {', '.join(arguments)}"
        elif origin is tuple:
            good, wanted = isinstance(value, tuple) and all(isinstance(one, str) for one in value), "a list of text"
        elif kind is float:
            good, wanted = _is_float(value), "a number"
        elif kind is int:
            good, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
        elif kind is bool:
            good, wanted = isinstance(value, bool), "true or false"
        elif kind is str:
            good, wanted = isinstance(value, str), "text"
        else:
            good, wanted = isinstance(value, origin or kind), "a table of names and values"
        if not good:
            raise InvalidRequestError(f"{self.name} is {shortened(value)}; it is {wanted}", param=self.name)

    def read(self, value: Any) -> Any:
        """A value as files hold it: lists for tuples, a text for a list, 1e-4 as YAML 1.1 reads it, 1 for 1.0."""
        if typing.get_origin(self.plain) is tuple:
            return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value
        if self.plain is float and isinstance(value, str | int) and not isinstance(value, bool):
            try:
                return float(value)
            except (ValueError, OverflowError):
                return value
        return value


def _is_float(value: object) -> bool:
    """Whether a float holds the number: one of 400 digits is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def shortened(value: object) -> str:
    """A value for a message, whatever its size."""
    return _short.repr(value)[:160]


_short = reprlib.Repr()
_short.maxother = _short.maxstring = 160


@functools.cache
def options_of(kind: type) -> dict[str, Option]:
    """The options that a dataclass declares, by name."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found: dict[str, Option] = {}
    for one in dataclasses.fields(kind):
        annotated = hints[one.name]
        plain, text = typing.get_args(annotated)
        default: Any = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        default = None if default is dataclasses.MISSING else default
        found[one.name] = Option(one.name, plain, default, text)
    return found


class Options:
    """Those of several dataclasses together; of a name that two have, one value serves both."""

    def __init__(self, *kinds: type) -> None:
        self.by_name: dict[str, Option] = {}
        for kind in kinds:
            self.by_name |= options_of(kind)

    def checked(self, values: Mapping[str, Any], source: str = "") -> dict[str, Any]:
        """The same values as the dataclasses take them. Raises InvalidRequestError for an unknown one."""
        checked: dict[str, Any] = {}
        with naming(source):
            for name, value in values.items():
                option = self.by_name.get(name)
                if option is None:
                    near = difflib.get_close_matches(str(name), self.by_name, 1)
                    hint = f"; did you mean {near[0]!r}?" if near else ""
                    raise InvalidRequestError(f"unknown option {str(name)!r:.160}{hint}", param=str(name))
                checked[name] = option.read(value)
                option.check(checked[name])
        return checked

    def build(self, kind: type, checked: Mapping[str, Any], source: str = "") -> Any:
        """One of the dataclasses. Raises what it raises, with the source in front."""
        with naming(source):
            return kind(**{name: checked[name] for name in options_of(kind) if name in checked})


@contextlib.contextmanager
def naming(source: str) -> Iterator[None]:
    """Puts a source in front of the message of an InvalidRequestError."""
    try:
        yield
    except InvalidRequestError as error:
        if not source:
            raise
        raise InvalidRequestError(f"{source}: {error}", param=error.param) from error


def read_file(path: Path) -> dict[str, Any]:
    """The values of a .toml, .yaml or .yml file. Raises InvalidRequestError."""
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise InvalidRequestError(f"{path}: a config ends in .toml, .yaml or .yml", param="config")
    try:
        data = read_regular(path, MAX_CONFIG_BYTES)
        if data is None:
            raise InvalidRequestError(f"{path}: no such file", param="config")
        values: Any = tomllib.loads(data.decode()) if path.suffix == ".toml" else _yaml(data.decode(), path)
    except ModelFileError as error:
        raise InvalidRequestError(str(error), param="config") from error
    except InvalidRequestError:
        raise
    # Not only the parsers' own errors: a month of 13, a number of 5,000 digits, lists in lists in lists.
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path}: {error}", param="config") from error
    if not isinstance(values, dict):
        raise InvalidRequestError(f"{path}: options and their values are expected", param="config")
    return values


def _yaml(text: str, path: Path) -> object:
    try:
        import yaml
    except ImportError as error:
        message = f"{path}: YAML needs PyYAML: pip install 'mlxinfer[train]', or write the config as .toml"
        raise InvalidRequestError(message, param="config") from error

    class Loader(yaml.SafeLoader):
        """Without aliases: a few of them, one inside another, stand for more than memory holds."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError(f"line {self.peek_event().start_mark.line + 1}: aliases aren't read")
            return super().compose_node(parent, index)

    try:
        return {} if (read := yaml.load(text, Loader)) is None else read
    except yaml.YAMLError as error:
        raise InvalidRequestError(f"{path}: {error}", param="config") from error
