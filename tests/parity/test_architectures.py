"""Every GGUF architecture: what comes back out of a file is the model that went in, and llama.cpp agrees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer import upstream
from mlxinfer.convert.sources.gguf import GGUFSource
from mlxinfer.formats.gguf import load_gguf
from mlxinfer.formats.gguf.architectures import ARCHITECTURES
from tests.parity.make_architectures import FIXTURE, LENGTHS, PROMPT, STRIDE
from tests.unit.formats.gguf_writer import CASES, blueprint, build

if TYPE_CHECKING:
    from pathlib import Path

    import mlx.nn as nn

TOLERANCE = 0.08
"""Of logarithms of probabilities: llama.cpp's float16 tables and attention make up to 0.06, a wrong rope 0.5."""


def logits(model: nn.Module) -> np.ndarray:
    return np.array(model(mx.array([PROMPT]))[0].astype(mx.float32))


def test_every_architecture_has_a_case() -> None:
    assert {case.arch for case in CASES.values()} == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_file_gives_back_the_model_it_was_written_from(tmp_path: Path, name: str) -> None:
    model = build(CASES[name])
    path = blueprint(CASES[name], model).write(tmp_path / "m.gguf")
    expected = logits(model)
    assert len(set(expected.argmax(axis=-1))) >= 8, "the output must depend on the context"
    gguf = load_gguf(path, dtype=mx.float32)
    np.testing.assert_allclose(logits(upstream.build_model(gguf.config, gguf.weights)), expected, atol=1e-5, rtol=0)
    source = GGUFSource(path)
    arrays = {key: mx.array(source.read(key)) for key in source.tensors}
    np.testing.assert_allclose(logits(upstream.build_model(source.config, arrays)), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.llama_cpp])
def test_llama_cpp_answers_the_same_to_the_file(tmp_path: Path, name: str) -> None:
    path = blueprint(CASES[name], build(CASES[name])).write(tmp_path / "m.gguf")
    gguf = load_gguf(path, dtype=mx.float32)
    found = upstream.build_model(gguf.config, gguf.weights)(mx.array([PROMPT]))[0].astype(mx.float32)
    found = np.array(found - mx.logsumexp(found, axis=-1, keepdims=True))[[length - 1 for length in LENGTHS]]
    with np.load(FIXTURE, allow_pickle=False) as file:
        golden = file[name]
    np.testing.assert_allclose(found[:, ::STRIDE], golden, atol=TOLERANCE, rtol=0)
