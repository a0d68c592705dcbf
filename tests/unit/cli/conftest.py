"""A model without weights and a zoo without files, in place of the real ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from mlxinfer.cli import loading
from mlxinfer.cli.group import cli
from mlxinfer.errors import ContextLengthError, MlxinferError
from mlxinfer.types import Message, ModelInfo, Reply, SamplingParams, Timings, Usage

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.config import Settings

INFO = ModelInfo(
    name="fake",
    model_type="llama",
    source="nowhere",
    context_length=64,
    vocab_size=100,
    num_parameters=1,
    weight_bytes=4,
    dtype="float32",
    quantization="none",
    tier="ragged",
    has_chat_template=True,
)


class FakeStream:
    """The pieces it was given; `interrupt` raises Ctrl-C after that many."""

    def __init__(self, pieces: Sequence[str], interrupt: int | None) -> None:
        self.pieces = pieces
        self.interrupt = interrupt
        self.closed = False
        self.reply = Reply()

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def __iter__(self) -> Iterator[str]:
        for index, piece in enumerate(self.pieces):
            if index == self.interrupt:
                raise KeyboardInterrupt
            yield piece
        self.reply = Reply(
            "".join(self.pieces),
            usage=Usage(prompt_tokens=3, completion_tokens=len(self.pieces)),
            timings=Timings(ttft_s=0.25, total_s=1.0, decode_tok_s=12.5),
            finish_reason="stop",
            model="fake",
        )


class FakeLLM:
    """Answers with `pieces`, remembers what it was asked."""

    def __init__(self) -> None:
        self.info = INFO
        self.defaults = SamplingParams(temperature=0.5)
        self.pieces: Sequence[str] = ("Par", "is", ".")
        self.interrupt: int | None = None
        self.error: MlxinferError | None = None
        self.asked: list[dict[str, Any]] = []
        self.streams: list[FakeStream] = []
        self.unloaded = threading.Event()
        self.loaded_with: list[tuple[str, Settings]] = []

    def stream(
        self, messages: str | Sequence[Message], *, raw: bool = False, system: str | None = None, params: SamplingParams
    ) -> FakeStream:
        self.asked.append({"messages": messages, "raw": raw, "system": system, "params": params})
        if self.error is not None:
            raise self.error
        self.streams.append(FakeStream(self.pieces, self.interrupt))
        return self.streams[-1]

    def stats(self) -> dict[str, int]:
        return {"running": 0, "waiting": 0}

    def unload(self) -> None:
        self.unloaded.set()


@pytest.fixture(autouse=True)
def _no_user_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MLXINFER_MODEL", "MLXINFER_PORT", "MLXINFER_HOST", "MLXINFER_DTYPE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("MLXINFER_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("MLXINFER_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """The model that every name loads."""
    fake = FakeLLM()

    def load(name: str, settings: Settings, adapter: object = None) -> FakeLLM:
        fake.loaded_with.append((name, settings))
        return fake

    monkeypatch.setattr(loading, "load_model", load)
    monkeypatch.setattr(loading, "load_served", load)
    monkeypatch.setattr(loading, "check_name", lambda name, settings: None)
    return fake


Invoke = Callable[..., Result]


@pytest.fixture
def invoke() -> Invoke:
    """Run a command line in this process; stdout and stderr stay apart."""

    def run(*args: str, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(cli, list(args), input=stdin)

    return run


def error_of(result: Result) -> dict[str, str]:
    """The error object of a --json run."""
    return json.loads(result.stdout)["error"]


def too_long() -> MlxinferError:
    return ContextLengthError("the prompt has 99 tokens; the context holds 64")
