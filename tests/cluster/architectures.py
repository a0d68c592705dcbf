"""Every mlx-lm architecture that can be split, over ranks: writes docs/cluster-architectures.md.

`python -m tests.cluster.architectures [case …]`; with cases it prints and writes nothing.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import random
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxinfer import upstream
from mlxinfer.distributed.rank_runner import whole_runner
from mlxinfer.distributed.ways import pipelined
from mlxinfer.engine.blank import num_layers
from mlxinfer.engine.worker import mlx_thread
from mlxinfer.errors import MlxinferError
from tests import tiny
from tests.clusters import Lent, engine_here, parts_of, replies
from tests.conformance.configs import CONFIGS, NEEDS_METAL, UNBUILDABLE, WEIGHTS
from tests.conformance.weights import build

if TYPE_CHECKING:
    from collections.abc import Iterator

TABLE = Path(__file__).parents[2] / "docs" / "cluster-architectures.md"
VOCAB = 320
TOKENS = 10
SAME = "same"


@dataclass(frozen=True, slots=True)
class Way:
    """A column of the table. Layers of `split` are by stage, the last layers first."""

    name: str
    kind: str
    size: int
    split: tuple[int, ...] = ()


WAYS = (
    Way("TP2", "tensor", 2),
    Way("TP4", "tensor", 4),
    Way("PP2", "pipeline", 2, (3, 1)),
    Way("PP3", "pipeline", 3, (1, 2, 1)),
    Way("TP2 x PP2", "both", 4, (3, 1)),
)

# What the configs of tests/conformance lack to be shared by four: heads of every kind, and four layers.
FOUR_HEADS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "index_n_heads": 4,
    "o_groups": 4,
    "linear_num_key_heads": 4,
    "num_attention_groups": 4,
}
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_hidden_layers": 6},
    "step3p5": {"attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 4}},
}

# Where mlx-lm's code takes some shares of layers only: one of each kind in every stage, or as even as can be.
SPLITS: dict[str, dict[str, tuple[int, ...]]] = {
    "bailing_hybrid": {"PP2": (4, 2), "PP3": (2, 2, 2)},
    "kimi_k3": {"PP2": (2, 2), "PP3": (1, 1, 2)},
}


def adapted(case: str) -> dict[str, Any]:
    """The config of a case with heads for four ranks and layers for three stages."""
    return _adapted(json.loads(json.dumps(CONFIGS[case]))) | OWN.get(case, {}) | {"model_type": case.split("/")[0]}


def _adapted(config: dict[str, Any]) -> dict[str, Any]:
    if isinstance(text := config.get("text_config"), dict):
        return {**config, "vocab_size": VOCAB, "text_config": _adapted(text)}
    held = {name: value for name, value in FOUR_HEADS.items() if name in config}
    if isinstance(linear := config.get("linear_attn_config"), dict):
        held["linear_attn_config"] = {**linear, "num_heads": 4}
    layers = num_layers(config)
    if layers == 3:
        # The last kind of layer once more.
        longer = {k: [*v, v[-1]] for k, v in config.items() if isinstance(v, list) and len(v) == 3}
        held |= longer | {"num_hidden_layers": 4}
    return config | held | {"vocab_size": max(VOCAB, int(config.get("vocab_size", 0)))}


@functools.cache
def cases() -> tuple[str, ...]:
    """Of those that mlx-lm can split in some way, by its name."""
    found: list[str] = []
    for case in CONFIGS:
        if case in UNBUILDABLE:
            continue
        model: Any = upstream.empty_model(adapted(case))
        if hasattr(model, "shard") or pipelined(model) is not None:
            found.append(case)
    mx.eval(mx.random.state)
    return tuple(sorted(found, key=str.lower))


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (23, 1, 41, 9, 30)]


class Suite:
    """Cases over rank sets, each of which is started once and loads one model after the other."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._ranks: dict[str, Lent] = {}

    def outcomes(self, case: str, ways: tuple[Way, ...] = WAYS) -> dict[str, str]:
        """By way: "same", or why not."""
        if case in NEEDS_METAL and not mx.metal.is_available():
            return {way.name: "needs Metal" for way in ways}
        source = self._folder(case)
        with engine_here(source) as engine:
            wanted = [*replies(engine, prompts()[:1], TOKENS), *replies(engine, prompts()[1:], TOKENS)]
        if len({token for one in wanted for token in one}) < 4:
            raise AssertionError(f"{case}: the replies are all alike, so that nothing would show")
        return {way.name: self._outcome(case, source, way, wanted) for way in ways}

    def _outcome(self, case: str, source: Path, way: Way, wanted: list[list[int]]) -> str:
        try:
            parts = mlx_thread().call(lambda: self._cut(case, source, way))
        except MlxinferError as error:
            return f"refused: {error}"
        ranks = self._ranks.setdefault(f"{way.kind}{way.size}", Lent(way.size))
        try:
            with ranks.engine(parts) as engine:
                got = [*replies(engine, prompts()[:1], TOKENS), *replies(engine, prompts()[1:], TOKENS)]
        except (MlxinferError, AssertionError, queue.Empty) as error:
            ranks.close()
            return f"FAILS: {type(error).__name__}: {error}"
        off = sum(a != b for a, b in zip(got, wanted, strict=True))
        return f"DIFFERS: {off} of {len(wanted)} replies" if off else SAME

    def _cut(self, case: str, source: Path, way: Way) -> list[Path]:
        split = SPLITS.get(case, {}).get(way.name[-3:], way.split)
        parts = parts_of(source, self._work / case.replace("/", "-") / "parts", way.kind, way.size, split)
        if way.kind != "tensor":
            # As every rank does when it loads; one that refuses ends.
            whole_runner(adapted(case), VOCAB, paired=way.kind == "both")
        return parts

    def _folder(self, case: str) -> Path:
        folder = self._work / case.replace("/", "-") / "m"
        if not folder.exists():
            mlx_thread().call(lambda: write(case, folder))
        return folder

    def close(self) -> None:
        for ranks in self._ranks.values():
            ranks.close()


def write(case: str, folder: Path) -> None:
    """A model of the case with seeded weights in float32, and the tests' tokenizer."""
    tiny.write_folder(folder)
    config = adapted(case)
    model = build(config["model_type"], config, **WEIGHTS.get(case, {}))
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))


INTRO = """\
# Architectures over ranks

Generated by `python -m tests.cluster.architectures` with mlx-lm {version}; don't edit.

Every architecture whose code in mlx-lm has `shard()` (by heads, TP) or `pipeline()` (by layers, PP): a tiny model with
random weights in float32, cut and run by real ranks on one machine. "same": the greedy tokens of one prompt alone and
of four together are those of one process. Layers of PP2 are shared out 1 + 3 and of PP3 1 + 2 + 1, those of
bailing_hybrid 2 + 4 and 2 + 2 + 2 (every stage needs a layer of full attention), those of kimi_k3 2 + 2 and 2 + 1 + 1
(mlx-lm shares them out itself). TP2 x PP2 is the stages of PP2, each of them two ranks that share its heads. What is
refused is refused before it is loaded, with these words. All other architectures are served by one machine only.

"""


def cell(outcome: str) -> str:
    """Of the table: an outcome without the reason, which is in the last column."""
    return outcome if outcome == SAME else outcome.split(":")[0]


def render(found: dict[str, dict[str, str]]) -> str:
    lines = [INTRO.format(version=metadata.version("mlx-lm"))]
    lines.append("| model_type | " + " | ".join(way.name for way in WAYS) + " | why not |")
    lines.append("|" + " --- |" * (len(WAYS) + 2))
    for case, outcomes in found.items():
        why = dict.fromkeys(outcome.partition(": ")[2] for outcome in outcomes.values() if ": " in outcome)
        cells = [cell(outcome) for outcome in outcomes.values()]
        lines.append("| " + " | ".join([f"`{case}`", *cells, "; ".join(why).replace("|", "\\|")]) + " |")
    return "\n".join(lines) + "\n"


def read_table() -> dict[str, dict[str, str]]:
    """The cells of the table by case and way."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    names = [way.name for way in WAYS]
    return {row[0].strip("`"): dict(zip(names, row[1:], strict=False)) for row in rows}


def told(chosen: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    with tempfile.TemporaryDirectory() as work:
        suite = Suite(Path(work))
        try:
            for case in chosen:
                outcomes = suite.outcomes(case)
                print(f"{case}: {outcomes}", file=sys.stderr, flush=True)
                yield case, outcomes
        finally:
            suite.close()


def main() -> int:
    found = dict(told(sys.argv[1:] or list(cases())))
    if not sys.argv[1:]:
        draft = TABLE.with_suffix(".tmp")
        draft.write_text(render(found))
        os.replace(draft, TABLE)
    return int(
        any(outcome.startswith(("DIFFERS", "FAILS")) for outcomes in found.values() for outcome in outcomes.values())
    )


if __name__ == "__main__":
    sys.exit(main())
