"""What a name's catalogue entry says against a run or a download, asked before anything is fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxinfer.errors import OfflineError, UnsupportedModelError, WontFitError

if TYPE_CHECKING:
    from mlxinfer.config import Settings
    from mlxinfer.zoo import CatalogEntry, FitReport


def entry_of(name: str) -> CatalogEntry | None:
    """The catalogue's entry of an alias, or of the hub id that an entry names."""
    from mlxinfer import zoo
    from mlxinfer.zoo.names import parse_name

    if entry := zoo.find_entry(name):
        return entry
    parsed = parse_name(name)
    # Of one repository a file or a quantization may be chosen; the entry's size is that of the whole.
    if parsed.kind != "hub" or parsed.file:
        return None
    return next((e for e in zoo.catalog() if (e.hub or "").lower() == parsed.repo.lower()), None)


def no_text(entry: CatalogEntry | None) -> str | None:
    """What it is for, if not for `run`; None for models that write text. Without the name."""
    if entry is None or not entry.can("embedding") or entry.can("chat") or entry.can("completion"):
        return None
    return "is an embedding model and writes no text; `mlxinfer serve` serves it, mlxinfer.load_encoder loads it"


def check_generates(name: str) -> None:
    """Raises UnsupportedModelError for a model that the catalogue knows to write no text."""
    if why := no_text(entry_of(name)):
        raise UnsupportedModelError(f"{name} {why}")


def too_large(name: str, settings: Settings) -> FitReport | None:
    """The prediction for a model that isn't on this machine and won't fit it; None for every other.

    Only the catalogue is asked: its sizes need no network. What is here is left to the loader, which knows better.
    """
    from mlxinfer import zoo

    entry = entry_of(name)
    if entry is None:
        return None
    try:
        zoo.resolve(name, settings, fetch=False)
    except OfflineError:
        # The verdict does not rest on speed; a figure in its place spares the measurement.
        report = zoo.fit(entry, settings, bandwidth=(1.0, "not measured"))
        return report if report.verdict == "no" else None
    return None


def wont_fit(name: str, report: FitReport) -> str:
    """One sentence with the need, the limit and what would fit."""
    from mlxinfer.zoo.files import human_bytes

    need, budget = human_bytes(report.total_bytes), human_bytes(report.budget_bytes)
    text = f"{name} needs {need} for {report.context} tokens of context; this machine gives {budget}"
    return f"{text}: {'; '.join(report.advice)}" if report.advice else text


def check_fits(name: str, settings: Settings) -> None:
    """Raises WontFitError before a download that would be for nothing."""
    if report := too_large(name, settings):
        raise WontFitError(wont_fit(name, report))
