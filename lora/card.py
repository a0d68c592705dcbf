"""README.md of an adapter and of a fused model: what it was made from and how, what it kept, and its licence."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mlxinfer import __version__, upstream
from mlxinfer.convert.card import CARD, MAX_CARD_CHARS, card_fields
from mlxinfer.formats.files import read_json_object, read_regular

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mlxinfer.lora.changes import Fused
    from mlxinfer.lora.methods import MethodOptions

__all__ = ["CARD", "adapter_card", "fused_card"]

METHODS = {"lora": "LoRA", "qlora": "QLoRA", "rslora": "rsLoRA", "dora": "DoRA", "full": "full fine-tuning"}
NO_LICENCE = "No licence was found in the base's card; its own terms hold here too."


def adapter_card(
    options: MethodOptions,
    *,
    name: str,
    base: str,
    base_folder: Path | None = None,
    library: str = "mlx",
    facts: Mapping[str, object] | None = None,
) -> str:
    """Markdown with metadata. `base` is the name that the base is published under, or empty; `library` mlx or peft.

    `facts` become rows of the table: rows trained, held-out loss, whatever the caller knows.
    """
    kept = _base_fields(base_folder)
    method = METHODS[options.method]
    rows: dict[str, object] = {"method": method}
    if options.method != "full":
        rows |= {"rank": options.rank, "scale": f"{options.scale:.6g}", "layers": len(options.targets)}
        rows["adapted"] = ", ".join(sorted({path.rpartition(".")[2] for path in options.targets}))
    rows |= facts or {}
    return "\n".join(
        [
            *_metadata(kept, base, library, [library, "lora"] if library != "peft" else ["lora"]),
            "",
            f"# {_one_line(name)}",
            "",
            f"A {method} adapter{f' for {_one_line(base)}' if base else ''}, written by {_versions()}.",
            "",
            *_table(rows),
            "",
            *([] if "license" in kept else [NO_LICENCE, ""]),
            *(_usage(base) if library == "mlx" else []),
        ]
    )


def fused_card(fused: Fused, base: Path, adapter: Path) -> str:
    """Markdown for a model that an adapter was fused into."""
    kept = _base_fields(base)
    told = read_json_object(adapter / "adapter_config.json") or {}
    worst = min(fused.layers, key=lambda layer: layer.share, default=None)
    rows: dict[str, object] = {
        "base": base.name,
        "adapter": adapter.name,
        "method": METHODS.get(str(told.get("fine_tune_type", "lora")), "LoRA"),
        "parameters changed": len(fused.layers),
        "size": f"{fused.nbytes / 1e6:,.1f} MB",
    }
    if worst is not None:
        rows["least of the adapter's change that a layer kept"] = f"{worst.share:.1%} ({worst.name})"
    return "\n".join(
        [
            *_metadata(kept, "", "mlx", ["mlx"]),
            "",
            f"# {_one_line(fused.path.name)}",
            "",
            f"{_one_line(base.name)} with the adapter {_one_line(adapter.name)} in its weights, by {_versions()}.",
            "",
            *_table(rows),
            "",
            *([] if "license" in kept else [NO_LICENCE, ""]),
            "`fusion.json` has every layer: the size of its change, and how much of it the stored weights kept.",
            "",
        ]
    )


def _base_fields(folder: Path | None) -> dict[str, str]:
    """Licence and languages of the base's own card."""
    raw = read_regular(folder / CARD, 4 * MAX_CARD_CHARS) if folder is not None and folder.is_dir() else None
    return card_fields(raw.decode("utf-8", errors="replace")) if raw else {}


def _metadata(kept: Mapping[str, str], base: str, library: str, tags: list[str]) -> list[str]:
    fields = dict(kept)
    if base:
        fields["base_model"] = f"base_model: {_yaml(base)}"
    tagged = [f"- {tag}" for tag in tags]
    return [
        "---",
        *fields.values(),
        f"library_name: {library}",
        "pipeline_tag: text-generation",
        "tags:",
        *tagged,
        "---",
    ]


def _usage(base: str) -> list[str]:
    model = _one_line(base) or "BASE"
    return [
        "```sh",
        f"mlxinfer run {model} --adapter .",
        f"mlx_lm.generate --model {model} --adapter-path .",
        "```",
        "",
    ]


def _versions() -> str:
    found = ", ".join(f"{name} {version}" for name, version in upstream.versions().items())
    return f"mlxinfer {__version__} with {found}"


def _table(rows: Mapping[str, object]) -> list[str]:
    cells = [f"| {_one_line(key)} | {_one_line(_text(value))} |" for key, value in rows.items() if value is not None]
    return ["| | |", "|---|---|", *cells]


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _one_line(text: str) -> str:
    """Text of a file's or a user's, shown as text: no line breaks, nothing that opens markup."""
    return re.sub(r"[<>\[\]`|]", "", " ".join(text.split()))[:300]


def _yaml(text: str) -> str:
    """A name as a YAML string."""
    plain = _one_line(text).replace("\\", "").replace('"', "")
    return plain if re.fullmatch(r"[\w.-]+/[\w.-]+", plain, re.ASCII) else f'"{plain}"'
