"""Writes tests/fixtures/losses.npz: losses and gradients by their published formulas, in torch. Run by hand.

`python -m tests.parity.make_loss_goldens FILE`, with torch and transformers; nothing of this project is imported. A
tiny Llama in float32, another for the reference and the teacher, three pairs of answers of different lengths.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 24,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LENGTHS = ((9, 12), (7, 6), (11, 8))
PROMPTS = (3, 2, 4)
BETA, SMOOTHING, WEIGHT, MARGIN, TEMPERATURE = 0.3, 0.1, 0.25, 0.5, 2.0


def build(seed: int) -> Any:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(15.0)
    return model


def log_probs(model: Any, ids: list[int], start: int) -> torch.Tensor:
    """Of the answer's tokens, ids[start:]."""
    logits = model(torch.tensor([ids])).logits[0, start - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[start:])[:, None])[:, 0]


def main() -> None:
    policy, reference = build(0), build(6)
    rng = np.random.default_rng(0)
    pairs: list[tuple[list[int], list[int], int]] = []
    for (chosen, rejected), prompt in zip(LENGTHS, PROMPTS, strict=True):
        head = rng.integers(0, CONFIG["vocab_size"], prompt).tolist()
        tails = [rng.integers(0, CONFIG["vocab_size"], n - prompt).tolist() for n in (chosen, rejected)]
        pairs.append((head + tails[0], head + tails[1], prompt))

    def sums(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.stack([log_probs(model, p[i], p[2]).sum() for p in pairs]) for i in (0, 1))  # type: ignore[return-value]

    def means(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.stack([log_probs(model, p[i], p[2]).mean() for p in pairs]) for i in (0, 1))  # type: ignore[return-value]

    def sft() -> torch.Tensor:
        return -torch.stack(sums(policy)).sum()

    def dpo(smoothing: float) -> torch.Tensor:
        chosen, rejected = sums(policy)
        with torch.no_grad():
            chosen_ref, rejected_ref = sums(reference)
        z = BETA * ((chosen - chosen_ref) - (rejected - rejected_ref))
        return (-(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)).sum()

    def orpo() -> torch.Tensor:
        chosen, rejected = means(policy)
        odds = [torch.exp(p) / (1 - torch.exp(p)) for p in (chosen, rejected)]
        return (-chosen - WEIGHT * F.logsigmoid(torch.log(odds[0] / odds[1]))).sum()

    def simpo() -> torch.Tensor:
        chosen, rejected = means(policy)
        return -F.logsigmoid(BETA * (chosen - rejected) - MARGIN).sum()

    def kto() -> torch.Tensor:
        # Chosen answers are wanted, rejected ones aren't; a prompt's mismatched answer is the next example's.
        examples = [(p[i], p[2], i == 0) for p in pairs for i in (0, 1)]
        with torch.no_grad():
            gaps = []
            for k, (ids, start, _) in enumerate(examples):
                other, other_start, _ = examples[(k + 1) % len(examples)]
                mixed = ids[:start] + other[other_start:]
                gaps.append(log_probs(policy, mixed, start).sum() - log_probs(reference, mixed, start).sum())
            z = torch.stack(gaps).mean().clamp(min=0)
        print("kto's baseline", z.item())
        total = torch.zeros(())
        for ids, start, wanted in examples:
            with torch.no_grad():
                before = log_probs(reference, ids, start).sum()
            r = log_probs(policy, ids, start).sum() - before
            value = torch.sigmoid(BETA * (r - z)) if wanted else torch.sigmoid(BETA * (z - r))
            total = total + (1.5 if wanted else 0.75) * (1 - value)
        return total

    def distill(hard: float) -> torch.Tensor:
        total = torch.zeros(())
        for i in (0, 1):
            for pair in pairs:
                ids, start = torch.tensor([pair[i]]), pair[2]
                student = policy(ids).logits[0, start - 1 : -1]
                with torch.no_grad():
                    teacher = reference(ids).logits[0, start - 1 : -1]
                kl = F.kl_div(
                    (student / TEMPERATURE).log_softmax(-1), (teacher / TEMPERATURE).softmax(-1), reduction="sum"
                )
                ce = F.cross_entropy(student, ids[0, start:], reduction="sum")
                total = total + (1 - hard) * TEMPERATURE**2 * kl + hard * ce
        return total

    out: dict[str, np.ndarray] = {}
    for name, model in (("policy", policy), ("reference", reference)):
        out.update({f"{name}/{path}": w.detach().numpy() for path, w in model.named_parameters()})
    for k, (chosen, rejected, prompt) in enumerate(pairs):
        out |= {f"pair/{k}/chosen": np.array(chosen), f"pair/{k}/rejected": np.array(rejected)}
        out[f"pair/{k}/prompt"] = np.array(prompt)
    losses = {
        "sft": sft,
        "dpo": lambda: dpo(0.0),
        "dpo_smooth": lambda: dpo(SMOOTHING),
        "orpo": orpo,
        "simpo": simpo,
        "kto": kto,
        "distill": lambda: distill(0.0),
        "distill_hard": lambda: distill(0.4),
    }
    for name, function in losses.items():
        policy.zero_grad()
        loss = function()
        loss.backward()
        out[f"{name}/loss"] = np.array(loss.item(), np.float64)
        out.update({f"{name}/gradient/{path}": w.grad.numpy().copy() for path, w in policy.named_parameters()})
        print(name, loss.item())
    np.savez_compressed(sys.argv[1], **out)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
