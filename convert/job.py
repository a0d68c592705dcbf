"""A conversion from a source that is open to a folder that mlx-lm and this package load."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import mlx.core as mx

from mlxinfer.convert.making import Maker
from mlxinfer.convert.options import ConvertOptions
from mlxinfer.convert.outcome import Outcome, outcome_of
from mlxinfer.convert.places import check_place
from mlxinfer.convert.planning import Plan, make_plan
from mlxinfer.convert.writing import INDEX, STATE, Work, working
from mlxinfer.errors import ConversionError, ModelFileError
from mlxinfer.formats.files import MAX_JSON_BYTES, json_bytes, read_regular
from mlxinfer.types import ProgressEvent

if TYPE_CHECKING:
    import threading

    from mlxinfer.convert.sources.base import Source
    from mlxinfer.convert.tracing import Tracer
    from mlxinfer.types import Progress

__all__ = ["CancelledError", "ConvertOptions", "Outcome", "convert", "plan"]

CACHE_BYTES = 64 << 20
"""Freed memory that mlx may keep for reuse while a conversion runs."""
MAX_EXTRA_BYTES = 4 * MAX_JSON_BYTES


class CancelledError(ConversionError):
    """The caller set the cancel event; what is done is kept for a resume."""

    exit_code = 130
    code = "cancelled"


def plan(source: Source, options: ConvertOptions) -> Plan:
    """What `convert` would write, found out from headers alone.

    Raises ModelFileError or UnsupportedModelError for what is wrong with the source, InvalidRequestError for options
    that it doesn't allow.
    """
    return make_plan(source, options)[0]


def convert(
    source: Source,
    destination: Path,
    options: ConvertOptions,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> Outcome:
    """Write the model folder `destination`, whole or not at all, one tensor at a time.

    A run that was cut off is taken up where it was, if source and options are still the same. On the thread that calls
    it, which mlx must be allowed to compute on. Raises as `plan` does, ConversionError when the disk, the lock or a
    value stands in the way, and CancelledError.
    """
    destination = Path(os.path.abspath(destination))
    fingerprint = source.fingerprint()
    check_place(source.path, destination, overwrite=options.overwrite)
    made, tracer = make_plan(source, options)
    extras = _extras(source)
    before = mx.set_cache_limit(CACHE_BYTES)
    try:
        with working(made, destination) as work:
            _write_items(source, tracer, made, work, options, progress, cancel)
            if source.fingerprint() != fingerprint:
                raise ConversionError(f"{source.path} changed while it was converted; run the same command again")
            outcome = outcome_of(made, work.rounded, destination, source)
            config = json_bytes(made.config, indent=2)
            files = {**extras, **options.documents(outcome), "config.json": config}
            work.finish(files, destination, overwrite=options.overwrite)
    finally:
        mx.set_cache_limit(before)
        mx.clear_cache()
    return outcome


def _write_items(
    source: Source,
    tracer: Tracer,
    made: Plan,
    work: Work,
    options: ConvertOptions,
    progress: Progress | None,
    cancel: threading.Event | None,
) -> None:
    maker = Maker(source, tracer, made, options.quantizer)
    done, total = work.done_bytes, made.total_bytes

    def tell(label: str) -> None:
        if progress is not None:
            progress(ProgressEvent("write", done, total, label))

    tell(source.path.name)
    for item in made.items[work.done :]:
        for count in work.write(item, maker.make(item)):
            done += count
            tell(source.path.name)
            if cancel is not None and cancel.is_set():
                raise CancelledError(
                    f"the conversion was cancelled; what is done is kept in {work.folder} for the same command"
                )


def _extras(source: Source) -> dict[str, bytes]:
    """The other files of the model. They are read before the weights: what is wrong with one is known at once."""
    files: dict[str, bytes] = {}
    for name, value in source.extras.items():
        path = PurePosixPath(name)
        own = name in ("config.json", INDEX, STATE, "conversion.json") or name.endswith(".safetensors")
        if len(path.parts) != 1 or path.name in ("", ".", "..") or "\0" in name or own:
            raise ModelFileError(f"{source.path}: {name!r:.120} is no name for a file beside the weights")
        data = read_regular(value, MAX_EXTRA_BYTES) if isinstance(value, Path) else value
        if data is None:
            raise ModelFileError(f"{value} is missing")
        files[name] = data
    return files
