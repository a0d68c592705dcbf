"""export: the table, the JSON, and what is refused before anything is read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.unit.cli.conftest import Invoke, error_of
from tests.unit.convert.export import models

if TYPE_CHECKING:
    from pathlib import Path

QUANTIZATION = {"bits": 4, "group_size": 32}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return models.write(tmp_path / "mlx", "llama", quantization=QUANTIZATION)


def test_the_table_counts_what_was_exact_and_near(invoke: Invoke, source: Path, tmp_path: Path) -> None:
    result = invoke("export", str(source), str(tmp_path / "m.gguf"))
    assert result.exit_code == 0
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["type", "values", "tensors", "size", "how"]
    cells = [row.split(maxsplit=5) for row in rows]
    assert ["F32", "exact", "5"] in [row[:3] for row in cells]
    assert ["Q4_1", "near", "16"] in [row[:3] for row in cells]
    assert "codes kept; scales rounded to float16" in result.stdout
    assert "m.gguf is " in result.stderr
    assert (tmp_path / "m.gguf").is_file()


def test_json_lists_every_tensor(invoke: Invoke, source: Path, tmp_path: Path) -> None:
    report = json.loads(invoke("export", str(source), str(tmp_path / "hf"), "--json").stdout)
    assert (report["format"], report["architecture"], report["written"]) == ("hf", "LlamaForCausalLM", True)
    assert report["handling"] == {"exact": 21}
    first = next(t for t in report["tensors"] if t["name"] == "lm_head.weight")
    assert (first["type"], first["shape"], first["note"]) == ("F32", [320, 64], "dequantized")
    assert report["size_bytes"] == sum(t["bytes"] for t in report["tensors"])


def test_a_dry_run_writes_nothing(invoke: Invoke, source: Path, tmp_path: Path) -> None:
    result = invoke("export", str(source), str(tmp_path / "m.gguf"), "--dry-run")
    assert result.exit_code == 0
    assert "would be" in result.stderr
    assert not (tmp_path / "m.gguf").exists()


def test_the_form_that_is_asked_for_beats_the_name(invoke: Invoke, source: Path, tmp_path: Path) -> None:
    assert invoke("export", str(source), str(tmp_path / "plain"), "--to", "gguf").exit_code == 0
    assert (tmp_path / "plain").read_bytes()[:4] == b"GGUF"


def test_a_type_of_gguf_is_refused_for_transformers(invoke: Invoke, source: Path, tmp_path: Path) -> None:
    result = invoke("export", str(source), str(tmp_path / "hf"), "--dtype", "q8_0")
    assert result.exit_code == 2
    assert "q8_0 is a type of GGUF" in result.stderr


def test_a_destination_that_exists_is_an_error_with_exit_code_2(invoke: Invoke, source: Path) -> None:
    result = invoke("export", str(source), str(source), "--json")
    assert result.exit_code == 2
    assert error_of(result)["code"] == "invalid_value"


def test_a_gguf_file_is_no_source(invoke: Invoke, source: Path, tmp_path: Path) -> None:
    invoke("export", str(source), str(tmp_path / "m.gguf"))
    result = invoke("export", str(tmp_path / "m.gguf"), str(tmp_path / "hf"), "--json")
    assert result.exit_code == 1
    assert error_of(result)["code"] == "unsupported_model"
