"""What needs a whole model in memory: measuring a conversion, sensitive layers, and methods that learn.

The rest of this room works a tensor at a time; these load the source in floats, so that it has to fit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlxinfer import upstream
from mlxinfer.convert.calibration import documents, packed_rows
from mlxinfer.convert.contest import best_plan
from mlxinfer.convert.learned import LearnedSource, Method, learn
from mlxinfer.convert.measure import Comparison, compare
from mlxinfer.convert.planning import DTYPE_BYTES, FLOATS
from mlxinfer.convert.sensitivity import measure_sensitivity
from mlxinfer.engine.dtypes import apply_dtype_policy
from mlxinfer.engine.loading import check_memory, load_model
from mlxinfer.errors import ModelFileError
from mlxinfer.formats.files import MAX_JSON_BYTES, read_regular
from mlxinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlxinfer.convert.outcome import Outcome
    from mlxinfer.convert.quantizing import Quantizer
    from mlxinfer.convert.recipes import Plan
    from mlxinfer.convert.sources.base import Packing, Source

SENSITIVITY_TOKENS = 256
"""Of a row of the calibration text."""
SENSITIVITY_ROWS = 16
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def float_model(source: Source) -> nn.Module:
    """The source's model in floats, in the dtype that this machine computes in.

    Raises WontFitError, ModelFileError or UnsupportedModelError.
    """
    weights = sum(int(np.prod(t.shape)) * DTYPE_BYTES[t.dtype] for t in source.tensors.values())
    check_memory(source.path.name, weights)
    arrays: dict[str, mx.array] = {}
    for name, tensor in source.tensors.items():
        array = mx.array(source.read(name))
        bits = array.dtype == mx.uint16 and tensor.dtype in FLOATS
        arrays[name] = array.view(mx.bfloat16) if bits else array
    model = upstream.build_model(source.config, arrays)
    apply_dtype_policy(model, "auto")
    mx.eval(model.parameters())
    return model


def tokenizer_of(source: Source) -> Tokenizer:
    """Raises ModelFileError for a source without a tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        for name in TOKENIZER_FILES:
            value = source.extras.get(name)
            data = read_regular(value, MAX_JSON_BYTES) if isinstance(value, Path) else value
            if data is not None:
                (Path(folder) / name).write_bytes(data)
        if not (Path(folder) / TOKENIZER_FILES[0]).is_file():
            raise ModelFileError(f"{source.path} has no tokenizer; without one nothing can be measured on text")
        return Tokenizer.from_folder(Path(folder))


def measured(source: Source, outcome: Outcome) -> Comparison:
    """The converted model against its source on the evaluation text of the package."""
    converted = load_model("folder", outcome.folder)
    return compare(float_model(source), converted.model, converted.tokenizer)


def sensitive_recipe(source: Source, target_bpw: float, quantizer: Quantizer, dtype: str) -> Plan:
    """More bits for the matrices that lose most, at `target_bpw` bits per weight of the whole model.

    The same bits throughout, where a trial on half of the calibration texts finds them better. Raises
    InvalidRequestError for a target that can't be reached.
    """
    tokenizer = tokenizer_of(source)
    texts = documents("calibration")
    rows = packed_rows(texts, tokenizer, SENSITIVITY_TOKENS)[:SENSITIVITY_ROWS]
    scale_bits = 8 * DTYPE_BYTES[dtype]
    model = float_model(source)
    found = measure_sensitivity(model, rows, quantizer=quantizer, scale_bits=scale_bits)
    return best_plan(model, tokenizer, found, target_bpw, texts=texts[::2], quantizer=quantizer, scale_bits=scale_bits)


def learned_source(source: Source, method: Method, packing: Packing) -> LearnedSource:
    """The source as mlx-lm's method packs it. Closing it closes `source`."""
    model_type = str(source.config.get("model_type"))
    model = learn(method, float_model(source), model_type, tokenizer_of(source), packing)
    return LearnedSource(method, model, source)
