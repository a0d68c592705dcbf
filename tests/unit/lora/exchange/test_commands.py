"""fuse, export and import as commands: what they print, write, refuse and end with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click
import click.testing
import mlx.core as mx
import pytest

from mlxinfer.cli.lora_export import export
from mlxinfer.cli.lora_fuse import fuse
from mlxinfer.cli.lora_import import import_adapter
from mlxinfer.engine import adapter_files
from mlxinfer.errors import ConversionError, InvalidRequestError, ModelFileError, ModelNotFoundError
from mlxinfer.lora import MethodOptions, save_adapter
from tests.unit.convert.export import models
from tests.unit.lora.exchange.made import adapt

if TYPE_CHECKING:
    from pathlib import Path

CARD = "---\nlicense: apache-2.0\nlanguage:\n- en\ntags:\n- other\n---\n# Base\n"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """`base`, packed in 4 bits, with a card, and `adapter` for it."""
    base = models.write(tmp_path / "base", "llama", quantization={"bits": 4, "group_size": 32, "mode": "affine"})
    (base / "README.md").write_text(CARD)
    options = MethodOptions("rslora", rank=4, alpha=6.0, targets=("q_proj", "up_proj"))
    save_adapter(tmp_path / "adapter", adapt(models.load(base), options, size=0.02), options, {})
    return tmp_path


def call(command: click.Command, *args: object) -> Any:
    """The JSON that it prints."""
    done = click.testing.CliRunner().invoke(command, [*map(str, args), "--json"], catch_exceptions=False)
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout) | {"exit_code": done.exit_code}


@pytest.mark.parametrize("name", ["peft", "there.gguf"])
def test_an_adapter_goes_out_and_in_again(work: Path, name: str) -> None:
    out = call(export, work / "base", work / "adapter", work / name)
    assert out["format"] == ("gguf" if name.endswith(".gguf") else "peft")
    assert (out["layers"], out["rank"], out["method"]) == (4, 4, "rslora")
    call(import_adapter, work / "base", work / name, work / "back")
    assert adapter_files.read_adapter("back", work / "back").rank == 4, "the engine takes it"
    before, after = (mx.load(str(work / folder / "adapters.safetensors")) for folder in ("adapter", "back"))
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert before.keys() == after.keys()
    assert all(mx.array_equal(after[key], value).item() for key, value in before.items())


def test_the_base_name_and_the_licence_are_in_what_is_published(work: Path) -> None:
    call(export, work / "base", work / "adapter", work / "peft", "--base-name", "org/base")
    config = json.loads((work / "peft" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/base"
    card = (work / "peft" / "README.md").read_text()
    for line in ("license: apache-2.0", "base_model: org/base", "library_name: peft", "| method | rsLoRA |"):
        assert line in card.splitlines()
    assert "- other" not in card


def test_fusing_is_refused_before_anything_is_written_and_a_dry_run_says_what_each_layer_keeps(work: Path) -> None:
    with pytest.raises(ConversionError, match="4 of 4 layers would keep less than 90%"):
        call(fuse, work / "base", work / "adapter", work / "out")
    told = call(fuse, work / "base", work / "adapter", work / "out", "--dry-run")
    assert (told["exit_code"], told["refused"], told["written"], len(told["layers"])) == (1, True, False, 4)
    assert all(0 < layer["kept"] < 0.9 for layer in told["layers"])
    assert not (work / "out").exists()
    told = call(fuse, work / "base", work / "adapter", work / "out", "--dequantize", "adapted")
    assert (told["exit_code"], told["refused"]) == (0, False)
    assert told["min_kept"] > 0.999
    card = (work / "out" / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "| adapter | adapter |" in card


def test_what_is_printed_is_a_table_of_the_layers_that_keep_least(work: Path) -> None:
    args = [
        str(work / "base"),
        str(work / "adapter"),
        str(work / "out"),
        "--bits",
        "8",
        "--group-size",
        "32",
        "--force",
    ]
    done = click.testing.CliRunner().invoke(fuse, args, catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0].split() == ["LAYER", "STORED", "CHANGE", "COSINE", "SIZE", "KEPT"]
    assert "8-bit affine, groups of 32" in done.stdout


def test_what_is_no_adapter_or_is_ours_already_is_said(work: Path) -> None:
    with pytest.raises(InvalidRequestError, match="mlx-lm's already"):
        call(import_adapter, work / "base", work / "adapter", work / "back")
    with pytest.raises(ModelFileError, match="is missing; is"):
        call(import_adapter, work / "base", work, work / "back")
    with pytest.raises(ModelFileError, match="is missing"):
        call(import_adapter, work / "base", work / "none.gguf", work / "back")
    with pytest.raises(ModelNotFoundError):
        call(export, work / "nowhere", work / "adapter", work / "back")
    with pytest.raises(ModelFileError, match="is missing"):
        call(export, work / "base", work / "base", work / "back")
    assert not (work / "back").exists()


def test_a_group_size_alone_does_nothing_and_is_refused(work: Path) -> None:
    args = [str(work / "base"), str(work / "adapter"), str(work / "out"), "--group-size", "32"]
    done = click.testing.CliRunner().invoke(fuse, args)
    assert done.exit_code == 2
    assert "--group-size goes with --bits" in done.output
