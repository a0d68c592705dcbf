"""The README.md of a converted model: what it was made from and how, what that cost, and its licence."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING

from mlxinfer import __version__, upstream
from mlxinfer.convert.quantizing import describe

if TYPE_CHECKING:
    from mlxinfer.convert.measure import Comparison
    from mlxinfer.convert.outcome import Outcome

CARD = "README.md"
KEPT_FIELDS = ("license", "license_name", "license_link", "language", "base_model")
"""Of the source's card. Its other fields are about the source's files, not about these."""
MAX_CARD_CHARS = 1 << 20
MAX_FIELD_LINES = 64
_BREAKS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
"""What some readers of a card take for the end of a line, and other controls."""
HANDLED = {
    "exact": "every value kept",
    "near": "codes kept, scales or values rounded",
    "requantized": "quantized anew",
    "quantized": "quantized",
}


def make_card(
    outcome: Outcome, comparison: Comparison | None = None, *, source: str = "", source_card: str | None = None
) -> str:
    """Markdown with metadata. `source_card` is the text of the source's README.md, whose licence is carried over."""
    kept = card_fields(source_card or "")
    packed = any(decision.packing for decision in outcome.decisions)
    metadata = [
        *kept.values(),
        "library_name: mlx",
        "pipeline_tag: text-generation",
        "tags:",
        "- mlx",
        *(["- quantized"] if packed else []),
    ]
    title = _one_line(source) or outcome.source
    licence = (
        [] if "license" in kept else ["", "No licence was found in the source's card; its own terms hold here too."]
    )
    body = [*_body(outcome, title), *licence, "", *_cost(comparison)]
    return "\n".join(["---", *metadata, "---", "", f"# {title} for MLX", "", *body])


def card_fields(text: str) -> dict[str, str]:
    """KEPT_FIELDS of a card's metadata, each as the lines it is written in."""
    match = re.match(r"---\r?\n(.*?)\r?\n---", text[:MAX_CARD_CHARS], re.DOTALL)
    found: dict[str, list[str]] = {}
    current: list[str] = []
    # Not splitlines, which breaks at more characters: the piece behind one could close the metadata.
    for line in re.split(r"\r?\n", match.group(1)) if match else ():
        if key := re.match(r"([A-Za-z_]\w*):", line):
            current = []
            if key.group(1) in KEPT_FIELDS:
                found[key.group(1)] = current
        # Lines that belong to a field are indented or items of a list; others would open something of their own.
        if key or line.startswith((" ", "-")):
            current.append(line)
    kept = {key: "\n".join(lines) for key, lines in found.items() if len(lines) <= MAX_FIELD_LINES}
    return {key: text for key, text in kept.items() if not _BREAKS.search(text)}


def _body(outcome: Outcome, title: str) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in upstream.versions().items())
    handled: Counter[str] = Counter()
    forms: Counter[str] = Counter()
    for decision in outcome.decisions:
        size = math.prod(decision.shape)
        handled[HANDLED.get(decision.handling, decision.handling)] += size
        forms[describe(decision.packing) if decision.packing else decision.dtype] += size
    weights = max(1, outcome.num_weights)
    return [
        f"Converted from {title} ({outcome.source}) by mlxinfer {__version__} with {versions}.",
        "",
        "| | |",
        "|---|---|",
        f"| size | {outcome.total_bytes / 1e6:,.1f} MB |",
        f"| bits per weight, scales included | {outcome.bits_per_weight:.3f} |",
        f"| recipe | {_cell(outcome.recipe)} |",
        *(f"| {form} | {count / weights:.1%} of the weights |" for form, count in forms.most_common()),
        *(f"| {how} | {count / weights:.1%} of the weights |" for how, count in handled.most_common()),
        "",
        *(f"- {_one_line(note)}" for note in outcome.notes),
        "",
        "`conversion.json` lists every tensor.",
    ]


def _cost(comparison: Comparison | None) -> list[str]:
    if comparison is None:
        return []
    return [
        "## Against the source",
        "",
        f"Next-token distributions at {comparison.tokens:,} positions of the evaluation text of mlxinfer, in nats.",
        "",
        "| | source | converted |",
        "|---|---|---|",
        f"| perplexity | {comparison.perplexity_source:.3f} | {comparison.perplexity_converted:.3f} |",
        f"| KL divergence, mean | | {comparison.kl_mean:.5f} |",
        f"| KL divergence, median / 99 % | | {comparison.kl_p50:.5f} / {comparison.kl_p99:.5f} |",
        f"| another most likely token | | {comparison.flips:.2%} |",
        *(f"| KL divergence, {kind} | | {value:.5f} |" for kind, value in comparison.by_kind),
        "",
    ]


def _one_line(text: str) -> str:
    """Text of a file's, shown as text: no line breaks, nothing that opens markup."""
    return re.sub(r"[<>\[\]`|]", "", " ".join(text.split()))[:300]


def _cell(text: str) -> str:
    return _one_line(text) or "none"
