"""From the name on the command line to a loaded model."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxinfer import runtime
from mlxinfer.cli import checks, converted, output, process, progress
from mlxinfer.config import source_of
from mlxinfer.errors import GatedModelError, ModelNotFoundError, OfflineError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlxinfer.config import Settings
    from mlxinfer.encoders import Encoder
    from mlxinfer.llm import LLM

_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*(?:/[\w.+-]+)?(?:[@:][\w./+-]+)*", re.ASCII)
"""An alias, or org/name, with a revision or tag."""


def could_be_model(word: str) -> bool:
    """Whether the first argument of `run` is a model's name and not the prompt; decided by its form alone.

    No white space and the form of an alias or of org/name, or something that begins like a path or is one.
    """
    if word in (".", "..") or word.startswith(("./", "../", "/", "~/")) or word.endswith(".gguf"):
        return "\n" not in word
    if _NAME.fullmatch(word):
        return True
    return "/" in word and "\n" not in word and "\0" not in word and len(word) < 1000 and Path(word).exists()


def check_name(name: str, settings: Settings) -> None:
    """Raise what says that `name` can be no model here, without a download: ModelNotFoundError, ModelFileError, …"""
    from mlxinfer import zoo

    with contextlib.suppress(OfflineError):  # it has to be fetched, which is the business of load_model
        zoo.resolve(name, settings, fetch=False)


def load_model(name: str, settings: Settings, adapter: Path | None = None) -> LLM:
    """Load with progress on stderr. Raises what `mlxinfer.load` raises; what can be known is, before a download."""
    from mlxinfer import zoo

    checks.check_generates(name)
    checks.check_fits(name, settings)
    with progress.reporting() as report:
        # Before the engine is imported: an unknown name is an answer at once, not after two seconds.
        files = zoo.resolve(name, settings, progress=report)
        with process.cut_off_by_signals():
            files = converted.loadable(files, settings, report)
            from mlxinfer.llm import load

            llm = load(name, settings=settings, progress=report, files=files, adapter=adapter)
    asked, own = settings.context_length, llm.info.context_length
    if asked is not None and asked > own:
        output.say(f"The context limit of {asked} is beyond what {name} has; its own {own} tokens hold.", dim=True)
    if slow := slow_blas():
        output.say(f"Prompts are read many times slower than this CPU could: {slow}", dim=True)
    if missing := missing_kernels():
        output.say(f"Tokens come many times slower than this CPU could: {missing}", dim=True)
    return llm


def load_served(name: str, settings: Settings) -> LLM | Encoder:
    """As `load_model`, for models that make embeddings or rerank as well."""
    from mlxinfer import zoo
    from mlxinfer.encoders import encoder_kind

    checks.check_fits(name, settings)
    with progress.reporting() as report:
        files = zoo.resolve(name, settings, progress=report)
        if encoder_kind(files.path, name, files.name):
            with process.cut_off_by_signals():
                from mlxinfer.encoders import load_encoder

                return load_encoder(name, settings=settings, progress=report)
    return load_model(name, settings)


@contextlib.contextmanager
def naming_the_setting(name: str, *, given: bool) -> Iterator[None]:
    """Errors about a model that the command line did not name say which file or variable did."""
    try:
        yield
    except (ModelNotFoundError, OfflineError, GatedModelError, UnsupportedModelError) as error:
        source = None if given else source_of("model")
        if source is None:
            raise
        raise type(error)(f"{error}\n`model` is set to {name!r:.160} by {source}") from error


def slow_blas() -> str | None:
    """What is wrong with this machine's BLAS and what to do, or None. Only Linux CPUs need one beside mlx's own."""
    library, why = runtime.blas()
    if library is not None or not sys.platform.startswith("linux") or not runtime.on_cpu():
        return None
    return f"no fast BLAS ({why}); `mlxinfer doctor` says how to mend it."


def missing_kernels() -> str | None:
    """Why there are no CPU kernels, or None where they are in use or not wanted."""
    from mlxinfer import kernels

    found = kernels.status()
    return f"{found.reason}; `mlxinfer doctor` says how to mend it." if found.wrong else None


def default_model(settings: Settings, *, yes: bool) -> str:
    """The configured model, else the largest that fits well (after asking, or with --yes), else the demo."""
    from mlxinfer import zoo
    from mlxinfer.zoo.files import human_bytes

    if settings.model:
        return settings.model
    asks = sys.stdin.isatty() and sys.stderr.isatty()
    if not asks and not yes:
        output.say(f"No model named; using the demo model {zoo.DEMO}.", dim=True)
        return zoo.DEMO
    entry = zoo.choose_default(settings)
    if entry.alias == zoo.DEMO:
        output.say(f"No model named; using the demo model {zoo.DEMO}.", dim=True)
        return zoo.DEMO
    about = f"{entry.alias} ({human_bytes(entry.size_bytes)})"
    question = f"No model named. {about} is the largest that fits this machine well. Use it?"
    if yes or click.confirm(question, default=True, err=True):
        output.say(f"Using {about}.", dim=True)
        return entry.alias
    output.say(f"Using the demo model {zoo.DEMO}. `mlxinfer ls --all` lists the others.", dim=True)
    return zoo.DEMO
