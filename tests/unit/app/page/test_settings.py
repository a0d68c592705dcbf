"""What the panel's fields become, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.app.page.presets import Presets
from mlxinfer.app.page.settings import FIELDS, fields, read, shown
from mlxinfer.app.page.texts import Texts
from mlxinfer.app.page.viewers import MAX_SESSIONS, Viewers
from mlxinfer.app.store import Conversation
from mlxinfer.errors import InvalidRequestError, ModelFileError

if TYPE_CHECKING:
    from pathlib import Path


def held(**values: Any) -> list[Any]:
    return [values.get(name, "") for name in FIELDS]


def test_an_empty_field_is_the_models_own() -> None:
    assert read(held()) == ("", {})


def test_fields_are_settings_and_settings_are_fields() -> None:
    values = held(
        system="Be brief.", temperature="0", top_k="40", max_tokens="7", seed="12345678901234567890", stop="a\nb",
        schema='{"type": "object"}', thinking="off",
    )  # fmt: skip
    system, settings = read(values)
    assert system == "Be brief."
    assert settings == {
        "temperature": 0.0, "top_k": 40, "max_tokens": 7, "seed": 12345678901234567890, "stop": ["a", "b"],
        "schema": '{"type": "object"}', "thinking": False,
    }  # fmt: skip
    chat = Conversation("c", "", "m", 0.0, 0.0, system=system, settings=settings)
    assert read(list(shown(chat).values())) == (system, settings)


def test_what_the_panel_does_not_show_is_kept() -> None:
    assert read(held(top_p="0,5"), {"presence_penalty": 1.0, "top_k": 3})[1] == {"presence_penalty": 1.0, "top_p": 0.5}


@pytest.mark.parametrize(
    ("field", "text"),
    [("temperature", "hot"), ("temperature", "-1"), ("top_k", "1.5"), ("max_tokens", "0"), ("schema", "{"),
     ("seed", "x"), ("temperature", "nan"), ("top_p", "inf")],
)  # fmt: skip
def test_what_can_not_be_is_refused_by_name(field: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=field if field != "schema" else "JSON schema"):
        read(held(**{field: text}))


def test_the_controls_are_those_of_the_fields() -> None:
    pytest.importorskip("gradio")
    assert set(fields(Texts("en"))) == set(FIELDS) - {"system"}


def test_presets_are_saved_replaced_and_deleted(tmp_path: Path) -> None:
    presets = Presets(tmp_path / "new")
    presets.save(" my  pirate ", "Arr.")
    presets.save("b", "two")
    presets.save("b", "three")
    assert Presets(tmp_path / "new").all() == {"b": "three", "my pirate": "Arr."}
    presets.delete("b")
    presets.delete("b")
    assert presets.all() == {"my pirate": "Arr."}
    with pytest.raises(InvalidRequestError, match="1 to 80"):
        presets.save(" ", "x")


def test_a_damaged_file_of_presets_is_said_and_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "presets.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"presets\.json"):
        Presets(tmp_path).save("a", "b")
    assert (tmp_path / "presets.json").read_text() == "{"


def test_the_last_ticket_of_a_session_holds() -> None:
    viewers = Viewers()
    first, other = viewers.take("a"), viewers.take("b")
    second = viewers.take("a")
    assert not viewers.holds("a", first)
    assert viewers.holds("a", second)
    assert viewers.holds("b", other)
    for number in range(MAX_SESSIONS):
        viewers.take(str(number))
    assert not viewers.holds("a", second)


def test_a_session_shows_what_it_opened_last() -> None:
    viewers = Viewers()
    assert not viewers.shows("a", "")
    viewers.take("a", "first")
    viewers.take("a", "second")
    assert viewers.shows("a", "second")
    assert not viewers.shows("a", "first")
