"""`mlxinfer lora eval`: what an adapter does to the loss on rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import options, output, training
from mlxinfer.lora.data.options import DataOptions
from mlxinfer.lora.options import options_of

if TYPE_CHECKING:
    from mlxinfer.lora.evaluate import Evaluation

FLAGS = {name: option for name, option in options_of(DataOptions).items() if name != "template_kwargs"}


@click.command(
    "eval",
    epilog=options.example("mlxinfer lora eval smollm2-135m --adapter ./adapter --data test.jsonl"),
)
@options.model_argument
@click.option("--data", required=True, multiple=True, help="Rows to evaluate on; may be repeated.")
@click.option("--adapter", type=click.Path(path_type=Path), help="The adapter's folder; without, the base alone.")
@click.option("--batch-size", type=click.IntRange(1), default=8, help="Rows computed at a time [8].")
@training.flags(FLAGS)
@options.json_option
def evaluate(
    model: str, data: tuple[str, ...], adapter: Path | None, batch_size: int, as_json: bool, **values: Any
) -> None:
    """Loss and perplexity of MODEL on rows, per supervised token."""
    from mlxinfer.lora import TrainConfig, adapter_off, load_adapter, objectives
    from mlxinfer.lora import evaluate as measure
    from mlxinfer.lora.data import read_examples
    from mlxinfer.lora.losses import SupervisedLoss

    base = training.base_of(options.settings_of())(model)
    rows = read_examples(list(data), base.tokenizer, DataOptions(**training.given(values)), split="test")
    training.say_rows([rows])
    config = TrainConfig(micro_batch_size=batch_size, max_tokens=DataOptions(**training.given(values)).max_tokens)
    objectives.check_rows(config, rows.items)
    net = base.load(keep_packed=False)
    packed = objectives.is_packed(config, net, base.config, rows.items)
    batches = objectives.batches_of(rows.items, config, packed=packed)
    found: dict[str, Evaluation | None] = {}
    if adapter is None:
        found["base"] = measure(net, batches, SupervisedLoss())
    else:
        method = load_adapter(net, adapter).method
        if method != "full":
            with adapter_off(net):
                found["base"] = measure(net, batches, SupervisedLoss())
        found["adapter"] = measure(net, batches, SupervisedLoss())
    said = {name: _told(one) for name, one in found.items() if one is not None}
    if as_json:
        output.emit_json(said)
        return
    rows_said = [(name, f"{one['loss']:.4f}", f"{one['perplexity']:.4g}", one["targets"]) for name, one in said.items()]
    click.echo(output.columns(("", "LOSS", "PERPLEXITY", "TOKENS"), [tuple(map(str, row)) for row in rows_said]))


def _told(found: Evaluation) -> dict[str, Any]:
    perplexity = found.perplexity if math.isfinite(found.perplexity) else None
    return {"loss": found.loss, "perplexity": perplexity, "targets": found.num_targets}
