"""Adapters of PEFT against PEFT's own logits (make_peft_goldens.py), in and out again.

The last test asks PEFT itself about what is written here, where PEFT_PYTHON names a Python that has it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer import upstream
from mlxinfer.convert.export.huggingface import export_huggingface
from mlxinfer.lora import MethodOptions, load_adapter, save_adapter
from mlxinfer.lora.adapter import read_adapter, write_adapter
from mlxinfer.lora.peft import read_peft
from mlxinfer.lora.peft_config import read_config
from mlxinfer.lora.peft_write import write_peft
from tests.parity.shapes import EXCHANGED
from tests.unit.convert.export import models
from tests.unit.lora.exchange.made import adapt

if TYPE_CHECKING:
    from collections.abc import Mapping

GOLDENS = Path(__file__).parent.parent / "fixtures" / "peft.npz"
CONFIG: dict[str, Any] = EXCHANGED | {"model_type": "llama"}
IDS = mx.array([[3, 17, 5, 31, 8, 22, 39, 1, 14]])
CASES = ("lora", "rslora", "dora", "embedding", "per_layer", "uneven_rslora")
TOLERANCE = 1e-5
"""Relative to the largest logit."""
PEFT_PYTHON = os.environ.get("PEFT_PYTHON")
ASK = """
import sys, numpy as np, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
model = PeftModel.from_pretrained(base, sys.argv[2]).eval()
with torch.no_grad():
    np.save(sys.argv[3], model(torch.tensor([[int(i) for i in sys.argv[4].split(",")]])).logits.numpy())
"""


@pytest.fixture(scope="module")
def goldens() -> dict[str, np.ndarray]:
    with np.load(GOLDENS) as file:
        return dict(file)


def base(goldens: Mapping[str, np.ndarray]) -> Any:
    weights = {name.removeprefix("base/"): mx.array(a) for name, a in goldens.items() if name.startswith("base/")}
    return upstream.build_model(CONFIG, weights)


def peft_folder(folder: Path, goldens: Mapping[str, np.ndarray], case: str) -> Path:
    folder.mkdir()
    prefix = f"{case}/tensors/"
    tensors = {name.removeprefix(prefix): mx.array(a) for name, a in goldens.items() if name.startswith(prefix)}
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    (folder / "adapter_config.json").write_bytes(goldens[f"{case}/config"].tobytes())
    return folder


def off_by(logits: mx.array, wanted: np.ndarray) -> float:
    return float(np.abs(np.array(logits) - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("case", CASES)
def test_an_imported_adapter_computes_what_peft_computes(
    tmp_path: Path, goldens: dict[str, np.ndarray], case: str
) -> None:
    model = base(goldens)
    assert off_by(model(IDS), goldens["logits"]) < TOLERANCE
    write_adapter(tmp_path / "ours", read_peft(peft_folder(tmp_path / "peft", goldens, case), model), model)
    load_adapter(model, tmp_path / "ours")
    model.eval()
    wanted = goldens[f"{case}/logits"]
    assert off_by(mx.array(goldens["logits"]), wanted) > 0.05
    assert off_by(model(IDS), wanted) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_what_was_imported_is_exported_to_the_same_bits(
    tmp_path: Path, goldens: dict[str, np.ndarray], case: str
) -> None:
    model = base(goldens)
    write_adapter(tmp_path / "ours", read_peft(peft_folder(tmp_path / "peft", goldens, case), model), model)
    write_peft(tmp_path / "again", read_adapter(tmp_path / "ours", model), model)
    before: Any = mx.load(str(tmp_path / "peft" / "adapter_model.safetensors"))
    after: Any = mx.load(str(tmp_path / "again" / "adapter_model.safetensors"))
    assert after.keys() == {name for name in before if ".base_layer." not in name}
    for name, value in after.items():
        # Scales that differ by other factors than 2 go through a multiplication there and one back.
        close = 1e-6 if case == "uneven_rslora" and name.endswith("lora_B.weight") else 0
        np.testing.assert_allclose(np.array(value), np.array(before[name]), rtol=close, atol=0, err_msg=name)
    asked, told = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("peft", "again"))
    uneven = ("r", "lora_alpha") if case in ("per_layer", "uneven_rslora") else ()
    for field in {"r", "lora_alpha", "use_rslora", "use_dora", "lora_dropout", "bias"} - set(uneven):
        assert (field, told[field]) == (field, asked[field])
    first, second = (read_config(tmp_path / name) for name in ("peft", "again"))
    for name, value in after.items():
        if name.endswith("lora_A.weight"):
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            scales = [config.scale_of(path, value.shape[0]) for config in (first, second)]
            assert scales[0] == pytest.approx(scales[1], rel=1e-15)


@pytest.mark.parametrize("method", ["lora", "rslora", "dora"])
def test_an_exported_adapter_comes_back_to_the_bit(tmp_path: Path, goldens: dict[str, np.ndarray], method: Any) -> None:
    model = base(goldens)
    options = MethodOptions(method, rank=5, alpha=12.0, targets=("layers.0.*.q_proj", "mlp.*"))
    adapt(model, options)
    wanted = model(IDS)
    save_adapter(tmp_path / "ours", model, options, {})
    plain = base(goldens)
    write_peft(tmp_path / "peft", read_adapter(tmp_path / "ours", plain), plain)
    write_adapter(tmp_path / "back", read_peft(tmp_path / "peft", plain), plain)
    before: Any = mx.load(str(tmp_path / "ours" / "adapters.safetensors"))
    after: Any = mx.load(str(tmp_path / "back" / "adapters.safetensors"))
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]).item() for name in before)
    load_adapter(plain, tmp_path / "back")
    plain.eval()
    np.testing.assert_array_equal(np.array(plain(IDS)), np.array(wanted))


@pytest.mark.slow
@pytest.mark.skipif(not PEFT_PYTHON, reason="PEFT_PYTHON names no Python with torch, transformers and peft")
@pytest.mark.parametrize("method", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "phi3", "mixtral", "qwen3_moe"])
def test_peft_computes_the_same_with_what_is_exported(tmp_path: Path, model_type: str, method: Any) -> None:
    moe = model_type in ("mixtral", "qwen3_moe")
    if moe and method == "dora":
        pytest.skip("mlx-lm has no DoRA for experts")
    folder = models.write(tmp_path / "mlx", model_type)
    export_huggingface(folder, tmp_path / "hf", dtype="float32")
    model: Any = upstream.load_folder(folder, [folder / "model.safetensors"])[0]
    targets = ("self_attn.*", "switch_mlp.*") if moe else ("self_attn.*", "mlp.*")
    options = MethodOptions(method, rank=4, alpha=6.0, targets=targets)
    adapt(model, options, size=0.05)
    save_adapter(tmp_path / "ours", model, options, {})
    plain: Any = upstream.load_folder(folder, [folder / "model.safetensors"])[0]
    before = np.array(plain(IDS))
    write_peft(tmp_path / "peft", read_adapter(tmp_path / "ours", plain), plain)
    ids = ",".join(str(i) for i in np.array(IDS)[0])
    command = [
        str(PEFT_PYTHON),
        "-c",
        ASK,
        str(tmp_path / "hf"),
        str(tmp_path / "peft"),
        str(tmp_path / "out.npy"),
        ids,
    ]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    wanted = np.load(tmp_path / "out.npy")
    assert off_by(mx.array(before), wanted) > 0.01
    assert off_by(model(IDS), wanted) < TOLERANCE
