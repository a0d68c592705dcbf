"""Writes tests/fixtures/peft.npz: adapters as PEFT saves them, and the logits of its PeftModel. Run by hand.

`python -m tests.parity.make_peft_goldens FILE`, with torch, transformers and peft; nothing of this project is imported.
A tiny Llama in float32 with a head of its own; the adapters' values are random.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.parity.shapes import EXCHANGED

CONFIG = EXCHANGED
IDS = [[3, 17, 5, 31, 8, 22, 39, 1, 14]]
CASES: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "rslora": {"r": 6, "lora_alpha": 7, "use_rslora": True, "target_modules": ["k_proj", "o_proj", "lm_head"]},
    "dora": {"r": 3, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "k_proj", "up_proj"]},
    "embedding": {"r": 4, "lora_alpha": 4, "target_modules": ["embed_tokens", "gate_proj"]},
    "per_layer": {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": r"model\.layers\.[12]\.(self_attn\.(q|k)_proj|mlp\.up_proj)",
        "rank_pattern": {r"layers\.2\.self_attn\.q_proj": 8, "k_proj": 2},
        "alpha_pattern": {r"layers\.2\.self_attn\.q_proj": 8, "up_proj": 4},
    },
    "uneven_rslora": {
        "r": 4,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"v_proj": 3},
    },
}


def build() -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(10.0)
    return model


def main() -> None:
    ids = torch.tensor(IDS)
    base = build()
    arrays: dict[str, np.ndarray] = {
        f"base/{name}": value.detach().numpy() for name, value in base.state_dict().items()
    }
    with torch.no_grad():
        arrays["logits"] = base(ids).logits.numpy()
    for number, (case, options) in enumerate(CASES.items()):
        model = get_peft_model(build(), LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.05, **options)).eval()
        torch.manual_seed(number + 1)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_magnitude" in name:
                    weight.mul_(0.8 + 0.4 * torch.rand_like(weight))
                elif "lora_" in name:
                    weight.copy_(0.3 * torch.randn_like(weight))
            arrays[f"{case}/logits"] = model(ids).logits.numpy()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            arrays[f"{case}/config"] = np.frombuffer((Path(folder) / "adapter_config.json").read_bytes(), np.uint8)
            saved = load_file(f"{folder}/adapter_model.safetensors")
        arrays |= {f"{case}/tensors/{name}": value for name, value in saved.items()}
    np.savez_compressed(sys.argv[1], **arrays)


if __name__ == "__main__":
    main()
