"""A run by name: what is wrong with its rows is said before a weight is read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.config import load_settings
from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora.base import Base
from mlxinfer.lora.job import fine_tune, held_out, open_run, plan_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rows.jsonl"),
        ("\n\n", "rows.jsonl:1"),
        ('{"text": "a b"}\n{"text": \n', "rows.jsonl:2"),
        ('{"text": "a b"}\n{"txt": "a"}\n', "rows.jsonl:2"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"text": "a b"}\n', "rows.jsonl:2"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}\n', "can be trained on with dpo or orpo or simpo"),
    ],
)
def test_rows_that_cannot_be_used_are_named_before_weights_load(
    text: str, message: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    monkeypatch.setattr(Base, "load", lambda self, keep_packed: pytest.fail("the weights were loaded"))
    with pytest.raises(InvalidRequestError, match=message):
        fine_tune(model=str(base), data=str(tmp_path / "rows.jsonl"), output=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_folder_brings_its_own_rows_to_evaluate_on(base: Path, tmp_path: Path) -> None:
    for split, count in (("train", 5), ("valid", 2)):
        (tmp_path / f"{split}.jsonl").write_text((json.dumps({"text": f"the {split}"}) + "\n") * count)

    def counts(**options: Any) -> tuple[int, int | None]:
        opened = open_run(plan_of({"model": str(base), "data": str(tmp_path), **options}), load_settings())
        return len(opened.rows.items), None if opened.valid is None else len(opened.valid.items)

    assert counts() == (5, 2)
    assert counts(valid=[str(tmp_path / "train.jsonl")]) == (5, 5)
    assert counts(valid_fraction=0.2) == (4, 1)
    assert counts(data=str(tmp_path / "train.jsonl")) == (5, None)


def test_held_out_rows_are_others_than_those_trained_on_and_the_same_each_time() -> None:
    items = tuple(range(50))
    rows, valid = held_out(items, 0.1, seed=3)
    assert len(valid.items) == 5
    assert sorted(rows.items + valid.items) == list(items)
    assert held_out(items, 0.1, seed=3) == (rows, valid) != held_out(items, 0.1, seed=4)
    with pytest.raises(InvalidRequestError, match=r"valid_fraction 0\.1 of 3 rows is 0"):
        held_out((1, 2, 3), 0.1, seed=0)
