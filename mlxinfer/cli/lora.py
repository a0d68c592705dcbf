"""`mlxinfer lora`: train adapters, see what they do, and take them elsewhere."""

from __future__ import annotations

from mlxinfer.cli import options
from mlxinfer.cli.subverbs import Subverbs

lora = Subverbs(
    "lora",
    {
        "train": ("mlxinfer.cli.lora_train:train", "Train an adapter on rows of data."),
        "plan": ("mlxinfer.cli.lora_plan:plan", "Predict a run's memory and time before its model loads."),
        "eval": ("mlxinfer.cli.lora_eval:evaluate", "Loss and perplexity on rows, with an adapter and without."),
        "fuse": ("mlxinfer.cli.lora_fuse:fuse", "Put an adapter into its base: a model of its own."),
        "export": ("mlxinfer.cli.lora_export:export", "Write an adapter for PEFT or llama.cpp."),
        "import": ("mlxinfer.cli.lora_import:import_adapter", "Read an adapter of PEFT or llama.cpp."),
    },
    help="Fine-tune a model with low-rank adapters, and use them.",
    epilog=options.example(
        "mlxinfer lora train smollm2-135m --data rows.jsonl", "mlxinfer lora train --config run.toml --resume"
    ),
)
