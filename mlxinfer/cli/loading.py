"""From the name on the command line to a loaded model."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxinfer.cli import output, progress

if TYPE_CHECKING:
    from mlxinfer.config import Settings
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


def load_model(name: str, settings: Settings) -> LLM:
    """Load with progress on stderr. Raises what `mlxinfer.load` raises."""
    from mlxinfer import zoo

    with progress.reporting() as report:
        # Before the engine is imported: an unknown name is an answer at once, not after two seconds.
        zoo.resolve(name, settings, progress=report)
        from mlxinfer.llm import load

        return load(name, settings=settings, progress=report)


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
