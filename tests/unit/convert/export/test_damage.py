"""A damaged config or tokenizer exports, or ends in one of the expected errors, and nothing is half-written."""

from __future__ import annotations

import contextlib
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxinfer.convert.export.gguf import export_gguf
from mlxinfer.convert.export.huggingface import export_huggingface
from mlxinfer.errors import MlxinferError
from tests.unit.convert.export import models

if TYPE_CHECKING:
    from pathlib import Path

VALUES = [None, True, -1, 0, 3, 2**40, 1e308, -0.5, "", "x", [], [None], {}, {"a": 1}]
SOURCES = {
    "llama": {"quantization": {"bits": 4, "group_size": 32}},
    "gpt_oss": {"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("damage")
    return {family: models.write(root / family, family, **options) for family, options in SOURCES.items()}


def damage(data: st.DataObject, value: Any, depth: int = 4) -> Any:
    """`value` with something at one place in it replaced, removed or doubled."""
    if depth == 0 or not value or not isinstance(value, dict | list) or data.draw(st.integers(0, 5)) == 0:
        return data.draw(st.sampled_from(VALUES))
    keys = sorted(value) if isinstance(value, dict) else list(range(len(value)))
    key = data.draw(st.sampled_from(keys))
    changed = dict(value) if isinstance(value, dict) else list(value)
    if data.draw(st.integers(0, 9)) == 0:
        del changed[key]
    else:
        changed[key] = damage(data, value[key], depth - 1)
    return changed


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("family", SOURCES)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damage_is_an_expected_error(sources: dict[str, Path], family: str, name: str, data: st.DataObject) -> None:
    folder = sources[family]
    original = (folder / name).read_bytes()
    (folder / name).write_text(json.dumps(damage(data, json.loads(original))))
    before = {p.name for p in folder.parent.iterdir()}
    try:
        for export in (export_gguf, export_huggingface):
            with contextlib.suppress(MlxinferError):
                path = export(folder, folder.parent / "out").path
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        (folder / name).write_bytes(original)
    assert {p.name for p in folder.parent.iterdir()} == before
