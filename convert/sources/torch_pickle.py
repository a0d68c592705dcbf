"""What torch.save pickles, read without pickle: tensors by name, and nothing is ever called.

An interpreter of the few opcodes that `torch.save` writes for a dict of tensors (pickle protocol 2). Globals are names
here, not objects: two functions and the storage classes are known, every other name ends the reading. Reading is
bounded by the length of the data and by MAX_OPCODES; there is no recursion.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_PICKLE_BYTES = 16 << 20
MAX_OPCODES = 1_000_000
MAX_DIMENSIONS = 16
STORAGES = {
    "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "DoubleStorage": "F64",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
"""torch's classes and the types as safetensors spells them."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of numbers in the archive, under data/KEY."""

    dtype: str
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor: where in its storage its numbers are, counted in numbers."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Name:
    """A global, by name only."""

    module: str
    name: str


class _Mark:
    """Where a list of arguments begins on the stack."""


_MARK = _Mark()
_DICT = _Name("collections", "OrderedDict")
_TENSOR = _Name("torch._utils", "_rebuild_tensor_v2")


def read_tensors(data: bytes, where: str) -> dict[str, TensorView]:
    """The tensors of a pickled state dict, by name. Raises ModelFileError for anything else; `where` names the file."""
    if len(data) > MAX_PICKLE_BYTES:
        raise ModelFileError(f"{where}: a pickle of {len(data)} bytes; at most {MAX_PICKLE_BYTES} are read")
    value = _Machine(data, where).run()
    if isinstance(value, dict) and isinstance(value.get("state_dict"), dict):
        value = value["state_dict"]
    if not isinstance(value, dict):
        raise ModelFileError(f"{where} holds a {type(value).__name__}; a dict of tensors by name is expected")
    tensors = {name: view for name, view in value.items() if isinstance(name, str) and isinstance(view, TensorView)}
    if not tensors:
        raise ModelFileError(f"{where} holds no tensors by name")
    return tensors


class _Machine:
    """The stack, the memo and a place in the data."""

    def __init__(self, data: bytes, where: str) -> None:
        self._data = data
        self._where = where
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(MAX_OPCODES):
            code = self._take(1)
            if code == b".":
                return self._pop()
            action = _ACTIONS.get(code)
            if action is None:
                raise self._fail(f"has the opcode {code!r}, which no saved dict of tensors needs")
            action(self)
        raise self._fail(f"has more than {MAX_OPCODES} opcodes")

    def _fail(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._where}: byte {self._at} of its pickle {problem}")

    def _take(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        if len(piece) < count:
            raise self._fail("is past its end: the file is truncated")
        self._at += count
        return piece

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + 256)
        if end < 0:
            raise self._fail("begins a name without an end")
        line = self._data[self._at : end]
        self._at = end + 1
        return line.decode("ascii", "replace")

    def _number(self, form: str) -> int:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _text(self, length: int) -> None:
        try:
            self._stack.append(self._take(length).decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            raise self._fail("ends a text that is no UTF-8") from None

    def _long(self) -> None:
        length = self._take(1)[0]
        if length > 8:
            raise self._fail(f"begins a number of {length} bytes; at most 8 are read")
        self._stack.append(int.from_bytes(self._take(length), "little", signed=True))

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise self._fail("takes from an empty stack")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while self._stack:
            item = self._stack.pop()
            if item is _MARK:
                return items[::-1]
            items.append(item)
        raise self._fail("ends a list that never began")

    def _top(self, kind: type) -> Any:
        if not self._stack or not isinstance(self._stack[-1], kind):
            raise self._fail(f"adds to something that is no {kind.__name__}")
        return self._stack[-1]

    def _tuple(self, count: int) -> None:
        self._stack.append(tuple(self._pop() for _ in range(count))[::-1])

    def _tuple_to_mark(self) -> None:
        self._stack.append(tuple(self._pop_to_mark()))

    def _put(self, index: int) -> None:
        self._memo[index] = self._top(object)

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise self._fail(f"asks for entry {index} of the memo, which is empty")
        self._stack.append(self._memo[index])

    def _set(self, items: list[Any]) -> None:
        table = self._top(dict)
        if len(items) % 2:
            raise self._fail("sets a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # A tuple may hold so many others that hashing it overflows the C stack.
            if not isinstance(key, str | int):
                raise self._fail(f"has a {type(key).__name__} for a key; text is expected")
            table[key] = value

    def _set_one(self) -> None:
        value = self._pop()
        self._set([self._pop(), value])

    def _append_one(self) -> None:
        value = self._pop()
        self._top(list).append(value)

    def _append_all(self) -> None:
        items = self._pop_to_mark()
        self._top(list).extend(items)

    def _global(self) -> None:
        name = _Name(self._line(), self._line())
        if name not in (_DICT, _TENSOR) and not (name.module == "torch" and name.name in STORAGES):
            raise self._fail(
                f"names {name.module}.{name.name}: only plain tensors are loaded, and no code is run for others"
            )
        self._stack.append(name)

    def _persistent(self) -> None:
        match self._pop():
            case ("storage", _Name("torch", kind), str() as key, str(), int() as count) if 0 <= count < 2**48:
                if len(key) > 64:
                    raise self._fail("names a storage by more than 64 characters")
                self._stack.append(Storage(STORAGES[kind], key, count))
            case _:
                raise self._fail("refers to something that is no storage")

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        if function == _DICT and arguments == ():
            self._stack.append({})
        elif function == _TENSOR and isinstance(arguments, tuple):
            self._stack.append(self._view(arguments))
        else:
            raise self._fail("calls something that makes no tensor")

    def _view(self, arguments: tuple[Any, ...]) -> TensorView:
        match arguments[:4]:
            case (Storage() as storage, int() as offset, tuple() as shape, tuple() as strides):
                pass
            case _:
                raise self._fail("makes a tensor from something else than a storage, an offset, a shape and strides")
        if len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
            raise self._fail(f"makes a tensor of {len(shape)} dimensions and {len(strides)} strides")
        if not all(type(n) is int and 0 <= n < 2**48 for n in (offset, *shape, *strides)):
            raise self._fail("makes a tensor with a size, stride or offset that is no count")
        count, last = 1, offset
        for size, stride in zip(shape, strides, strict=True):
            count *= size
            last += (size - 1) * stride
        # More numbers than the storage has: one number repeated, as `expand` does.
        if count and (last >= storage.count or count > storage.count):
            raise self._fail(f"makes a tensor of shape {shape} that leaves its storage of {storage.count} numbers")
        return TensorView(storage, offset, shape, strides)

    def _build(self) -> None:
        # A state dict carries `_metadata` as an attribute, which nobody needs.
        self._pop()
        self._top(dict)

    def _push(self, value: Any) -> None:
        self._stack.append(value)


_ACTIONS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": lambda m: _protocol(m),
    b"(": lambda m: m._push(_MARK),
    b"}": lambda m: m._push({}),
    b"]": lambda m: m._push([]),
    b")": lambda m: m._push(()),
    b"N": lambda m: m._push(None),
    b"\x88": lambda m: m._push(True),
    b"\x89": lambda m: m._push(False),
    b"K": lambda m: m._push(m._number("<B")),
    b"M": lambda m: m._push(m._number("<H")),
    b"J": lambda m: m._push(m._number("<i")),
    b"G": lambda m: m._push(m._number(">d")),
    b"\x8a": lambda m: m._long(),
    b"X": lambda m: m._text(m._number("<I")),
    b"\x85": lambda m: m._tuple(1),
    b"\x86": lambda m: m._tuple(2),
    b"\x87": lambda m: m._tuple(3),
    b"t": lambda m: m._tuple_to_mark(),
    b"q": lambda m: m._put(m._number("<B")),
    b"r": lambda m: m._put(m._number("<I")),
    b"h": lambda m: m._get(m._number("<B")),
    b"j": lambda m: m._get(m._number("<I")),
    b"s": lambda m: m._set_one(),
    b"u": lambda m: m._set(m._pop_to_mark()),
    b"a": lambda m: m._append_one(),
    b"e": lambda m: m._append_all(),
    b"c": lambda m: m._global(),
    b"Q": lambda m: m._persistent(),
    b"R": lambda m: m._reduce(),
    b"b": lambda m: m._build(),
}
"""The opcodes of pickle protocol 2 that torch.save uses for tensors."""


def _protocol(machine: _Machine) -> None:
    number = machine._number("<B")
    if number != 2:
        raise machine._fail(f"says protocol {number}; torch.save writes 2")
