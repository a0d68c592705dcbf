"""Logits against transformers in float32 and token ids against llama.cpp, from goldens of make_goldens.py."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
import tokenizers

from mlxinfer import upstream
from mlxinfer.convert.sources.gguf import GGUFSource
from mlxinfer.formats.gguf import load_gguf, read_gguf
from mlxinfer.formats.gguf.arrays import read_parameter
from mlxinfer.formats.gguf.pretokenizers import PRE_TOKENIZERS
from mlxinfer.formats.gguf.vocab import read_vocabulary
from tests.parity.make_goldens import FIXTURES, POSITIONS, PRE, STRIDE, TEXTS, TINY, TINY_IDS
from tests.unit.formats.gguf_files import tiny_model

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    import mlx.nn as nn

    from mlxinfer.formats.gguf.parameters import Parameter

TOLERANCE = 1e-3
"""Of logits between 5 and 30 in size; what is seen is below 1e-4."""


def golden_arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / name, allow_pickle=False) as file:
        return dict(file)


def golden_tokens(name: str) -> Any:
    return json.loads((FIXTURES / name).read_text(encoding="utf-8"))


def logits_of(model: nn.Module, ids: list[int]) -> np.ndarray:
    """float32 (tokens, vocabulary)."""
    return np.array(model(mx.array([ids]))[0].astype(mx.float32))


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@pytest.mark.parametrize("arch", TINY)
def test_a_random_model_of_each_architecture_has_the_logits_of_transformers(tmp_path: Path, arch: str) -> None:
    golden = golden_arrays("tiny_logits.npz")
    path = tiny_model(arch).write(tmp_path / "m.gguf")
    assert digest(path) == golden[f"{arch}_sha256"].tobytes().hex(), "the file is not the one the golden is of"
    gguf = load_gguf(path, dtype=mx.float32)
    logits = logits_of(upstream.build_model(gguf.config, gguf.weights), TINY_IDS)
    assert np.abs(golden[arch]).max() > 5
    assert len(set(golden[arch].argmax(axis=-1))) >= 8, "the output must depend on the context"
    np.testing.assert_allclose(logits[:, ::4], golden[arch], atol=TOLERANCE, rtol=0)


def one_off(parameter: Parameter, dtype: mx.Dtype) -> Generator[None, None, mx.array]:
    """Norms with one added once more."""
    yield
    value = read_parameter(parameter, dtype)
    return value + 1 if parameter.tensors[0].name.endswith("_norm.weight") else value  # type: ignore[operator,return-value]


FAULTS = {
    "rows of q and k left interleaved": ("llama", "mapping.halves_apart", lambda heads, rotated: np.arange),
    "the wrong attention scale": ("gemma3", "config._query_scalar", lambda config, layers: 256),
    "another turn of sliding layers": ("gemma3", "config._sliding_pattern", lambda fields, layers: 3),
    "norms one off": ("gemma2", "model.read_in_slices", one_off),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen_in_the_logits(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, where, replacement = FAULTS[fault]
    monkeypatch.setattr(f"mlxinfer.formats.gguf.{where}", replacement)
    gguf = load_gguf(tiny_model(arch).write(tmp_path / "m.gguf"), dtype=mx.float32)
    logits = logits_of(upstream.build_model(gguf.config, gguf.weights), TINY_IDS)
    assert np.abs(logits[:, ::4] - golden_arrays("tiny_logits.npz")[arch]).max() > 100 * TOLERANCE


def check_logits(path: Path, name: str) -> None:
    golden = golden_arrays(f"{name}_logits.npz")
    assert digest(path) == golden["sha256"].tobytes().hex(), "the file is not the one the golden is of"
    gguf = load_gguf(path, dtype=mx.float32)
    model = upstream.build_model(gguf.config, gguf.weights)
    for index in range(3):
        if index == 1:
            # The short prompt goes through the packed weights; they are slow on a CPU, so the others don't.
            upstream.dequantize(model)
        logits = logits_of(model, golden[f"ids{index}"].tolist())
        np.testing.assert_allclose(logits[-POSITIONS:, ::STRIDE], golden[f"strided{index}"], atol=TOLERANCE, rtol=0)
        best = golden[f"top_ids{index}"]
        np.testing.assert_allclose(logits[-1, best], golden[f"top{index}"], atol=TOLERANCE, rtol=0)
        assert logits[-1].argmax() == best[0]


def check_tokens(path: Path, name: str) -> None:
    golden = golden_tokens(f"{name}_tokens.json")
    gguf = read_gguf(path)
    vocabulary = read_vocabulary(gguf, gguf.tensors["token_embd.weight"].shape[0])
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(vocabulary.tokenizer_json))
    assert len(golden["texts"]) >= 60
    wrong = {
        row["text"]: (ids, row["ids"])
        for row in golden["texts"]
        if (ids := tokenizer.encode(row["text"], add_special_tokens=False).ids) != row["ids"]
    }
    assert not wrong


@pytest.mark.model
def test_the_demo_model_has_the_logits_of_transformers(demo_gguf: Path) -> None:
    check_logits(demo_gguf, "smollm2")


@pytest.mark.model
def test_the_demo_model_has_the_token_ids_of_llama_cpp(demo_gguf: Path) -> None:
    check_tokens(demo_gguf, "smollm2")


@pytest.mark.model
@pytest.mark.parametrize("pre", PRE)
def test_each_pre_tokenizer_splits_as_llama_cpp_does(demo_gguf: Path, pre: str) -> None:
    file = read_gguf(demo_gguf)
    file.metadata["tokenizer.ggml.pre"] = pre
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(read_vocabulary(file, 49152).tokenizer_json))
    golden = golden_tokens("pre_tokens.json")[pre]
    wrong = {
        text: (ours, ids)
        for text, ids in zip(TEXTS, golden, strict=True)
        # Qwen's own tokenizer composes accents first; llama.cpp leaves that out.
        if not (PRE_TOKENIZERS[pre].nfc and unicodedata.normalize("NFC", text) != text)
        and (ours := tokenizer.encode(text, add_special_tokens=False).ids) != ids
    }
    assert not wrong


def check_source(path: Path, name: str) -> None:
    """The shortest prompt, with every weight as `convert` reads it: exact codes packed, the rest floats."""
    golden = golden_arrays(f"{name}_logits.npz")
    source = GGUFSource(path)
    weights: dict[str, mx.array] = {}
    for key, logical in source.tensors.items():
        if logical.packing is None or logical.handling != "exact":
            weights[key] = mx.array(source.read(key))
            continue
        packed, form = source.read_packed(key), logical.packing
        assert packed.biases is not None
        parts = [mx.array(a) for a in (packed.weight, packed.scales, packed.biases)]
        weights[key] = mx.dequantize(*parts, group_size=form.group_size, bits=form.bits)
    model = upstream.build_model(source.config, weights)
    logits = logits_of(model, golden["ids0"].tolist())
    expected = golden["strided0"]
    assert np.linalg.norm(logits[-POSITIONS:, ::STRIDE] - expected) <= 1e-3 * np.linalg.norm(expected)
    np.testing.assert_allclose(logits[-POSITIONS:, ::STRIDE], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.model
def test_the_demo_model_as_a_source_has_the_logits_of_transformers(demo_gguf: Path) -> None:
    check_source(demo_gguf, "smollm2")


@pytest.mark.slow
@pytest.mark.model
def test_gemma_as_a_source_has_the_logits_of_transformers(gemma_gguf: Path) -> None:
    check_source(gemma_gguf, "gemma3")


@pytest.mark.slow
@pytest.mark.model
def test_gemma_has_the_logits_of_transformers(gemma_gguf: Path) -> None:
    check_logits(gemma_gguf, "gemma3")


@pytest.mark.slow
@pytest.mark.model
def test_gemma_has_the_token_ids_of_llama_cpp(gemma_gguf: Path) -> None:
    check_tokens(gemma_gguf, "gemma3")
