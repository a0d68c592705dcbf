"""Writes tests/fixtures/lora_torch.npz: gradients and loss curves of PEFT's adapters in torch. Run by hand.

`python -m tests.parity.make_lora_goldens FILE`, with torch, transformers and peft; nothing of this project is imported.
A tiny Llama in float32 with biases, rows of different lengths padded into one batch, prompts masked.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.parity.shapes import TRAINED

CONFIG = TRAINED
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
METHODS: dict[str, dict[str, bool]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
RANK, ALPHA = 4, 8.0
LENGTHS, PROMPTS = (14, 9, 12, 5, 11, 7), (4, 2, 5, 1, 3, 2)
STEPS, RATE, DECAY, BETAS, EPS, CLIP = 50, 3e-3, 0.01, (0.9, 0.98), 1e-8, 0.5


def base_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Values that fit half precision, so that the file is small and both sides hold the same."""
    found: dict[str, np.ndarray] = {}
    for name, weight in LlamaForCausalLM(LlamaConfig(**CONFIG)).named_parameters():
        if name.endswith("norm.weight"):
            value = 1 + 0.2 * rng.standard_normal(weight.shape)
        elif weight.ndim > 1:
            value = rng.standard_normal(weight.shape) * (1.0 if "embed" in name else 0.8 / np.sqrt(weight.shape[1]))
        else:
            value = 0.1 * rng.standard_normal(weight.shape)
        found[name] = value.astype(np.float16)
    return found


def adapted(base: dict[str, np.ndarray], method: str) -> Any:
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).float()
    model.load_state_dict({name: torch.tensor(value.astype(np.float32)) for name, value in base.items()})
    options = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), lora_dropout=0.0, **METHODS[method])
    return get_peft_model(model, options)


def trained(model: Any) -> dict[str, torch.nn.Parameter]:
    """By the module's path and lora_a, lora_b or m: the names of mlx-lm's layers."""
    leaves = {"lora_A": "lora_a", "lora_B": "lora_b", "lora_magnitude_vector": "m"}
    found: dict[str, torch.nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            path, leaf = (
                name.removeprefix("base_model.model.").removesuffix(".weight").removesuffix(".default").rsplit(".", 1)
            )
            found[f"{path}.{leaves[leaf]}"] = parameter
    return found


def as_ours(name: str, value: torch.Tensor) -> np.ndarray:
    """PEFT's matrices are [rank, in] and [out, rank]; mlx-lm's are [in, rank] and [rank, out]."""
    array = value.detach().numpy()
    return np.ascontiguousarray(array if name.endswith(".m") else array.T)


def loss_of(model: Any, rows: list[np.ndarray]) -> torch.Tensor:
    """Mean over the supervised tokens of one padded batch."""
    width = max(LENGTHS)
    inputs, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    for number, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
        inputs[number, : len(row)] = torch.tensor(row)
        labels[number, prompt : len(row)] = torch.tensor(row[prompt:])
        mask[number, : len(row)] = 1
    logits = model(input_ids=inputs, attention_mask=mask).logits
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100)


def goldens(seed: int) -> dict[str, np.ndarray]:
    """Of a model and rows drawn with `seed`: base/, row/, and for each method start/, gradient/, loss, curve."""
    rng = np.random.default_rng(seed)
    base = base_weights(rng)
    rows = [rng.integers(0, CONFIG["vocab_size"], length) for length in LENGTHS]
    out: dict[str, np.ndarray] = {f"base/{name}": value for name, value in base.items()}
    out |= {f"row/{number}": row.astype(np.int32) for number, row in enumerate(rows)}
    for method in METHODS:
        model = adapted(base, method)
        for name, parameter in trained(model).items():
            # Nothing starts at zero, or half of the gradients would be.
            with torch.no_grad():
                if name.endswith(".m"):
                    parameter.mul_(torch.tensor(rng.uniform(0.8, 1.2, parameter.shape), dtype=torch.float32))
                else:
                    parameter.copy_(torch.tensor(0.1 * rng.standard_normal(parameter.shape)))
                parameter.copy_(parameter.half().float())
            out[f"{method}/start/{name}"] = as_ours(name, parameter).astype(np.float16)
        loss = loss_of(model, rows)
        loss.backward()
        out[f"{method}/loss"] = np.array(loss.item())
        for name, parameter in trained(model).items():
            assert parameter.grad is not None
            out[f"{method}/gradient/{name}"] = as_ours(name, parameter.grad)
        out[f"{method}/curve"] = curve(model, rows)
    return out


def curve(model: Any, rows: list[np.ndarray]) -> np.ndarray:
    """The loss before each of STEPS updates over all rows."""
    parameters = list(trained(model).values())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    losses: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def main() -> None:
    found = goldens(seed=0)
    for method in METHODS:
        print(method, found[f"{method}/loss"], found[f"{method}/curve"][[0, 10, -1]])
    np.savez_compressed(sys.argv[1], **found)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
