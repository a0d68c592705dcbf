"""The incremental JSON reader against Python's."""

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxinfer.tokenizer.replies.json_text import MAX_DEPTH, JsonScanner, json_object_text
from tests.unit.tokenizer.replies.reading import pieces

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ALPHABET = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    "\\",
    "u00e9",
    "n",
    "1",
    "-",
    ".",
    "0",
    "e",
    "true",
    "nul",
    "l",
    " ",
    "\n",
]
ALPHABET += ['"a"', '{"a":', "\x01", "\x7f", "🙂", '\\"', "\\u12", "NaN", "٣"]


def scan(text_pieces):
    """(valid text, its end among the pieces' text, the scanner)."""
    scanner, out, buffer = JsonScanner(), [], ""
    taken = 0
    for number, piece in enumerate(text_pieces):
        buffer += piece
        valid, at = scanner.advance(buffer, 0, final=number == len(text_pieces) - 1)
        out.append(valid)
        taken += at
        buffer = buffer[at:]
        if scanner.done or scanner.broken:
            break
    return "".join(out), taken, scanner


def is_json(text):
    try:
        json.loads(text, strict=False, parse_constant=lambda _: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(ALPHABET), max_size=12).map("".join), st.lists(st.integers(1, 40), max_size=6))
@example('"a"\n', [])
@example("[1,]", [2])
@example("01", [1])
@example("1.", [])
def test_what_is_read_as_one_value_is_what_python_reads(text, cuts):
    whole = is_json(text)
    valid, at, scanner = scan(pieces(text, cuts))
    assert whole == (scanner.done and not text[at:].strip(" \t\r\n"))
    if scanner.done:
        assert json.loads(valid) == json.loads(text[:at], strict=False)


@settings(max_examples=200, deadline=None)
@given(VALUES, st.lists(st.integers(1, 60), max_size=8), st.sampled_from([None, 1]))
def test_values_come_out_as_they_are_in_any_pieces(value, cuts, indent):
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    valid, at, scanner = scan(pieces(text, cuts))
    assert scanner.done
    assert (valid, at) == (text, len(text))


@settings(max_examples=200, deadline=None)
@given(VALUES, st.integers(0, 60))
def test_what_has_come_out_of_a_value_always_goes_on_to_be_valid(value, length):
    text = json.dumps({"a": value})
    scanner = JsonScanner()
    valid, at = scanner.advance(text[:length], 0, final=False)
    assert text.startswith(valid)
    assert not scanner.broken
    rest, at = scanner.advance(text[at:], 0, final=True)
    assert valid + rest == text


def test_nesting_and_numbers_have_limits():
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert scan([deep])[2].done
    assert scan([f"[{deep}]"])[2].broken
    assert scan(["9" * 1024])[2].done
    assert scan(["9" * 1025])[2].broken


def test_an_object_is_told_from_other_values():
    assert json_object_text(' {"a": "\n"} ') == '{"a": "\\n"}'
    for text in ("[]", "1", "", "{", "{} {}", '"{}"'):
        assert json_object_text(text) is None
