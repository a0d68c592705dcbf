"""Text on its way out: nothing steers the terminal, nothing is cut, colour only where it is wanted."""

from __future__ import annotations

import io

import pytest

from mlxinfer.cli import output
from mlxinfer.cli.progress import PlainProgress, line
from mlxinfer.types import ProgressEvent
from mlxinfer.zoo.files import human_seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("bad", ["\x1b[2J", "\x9b31m", "\x07", "\r", "\x7f", "\x00", "\x1b]0;title\x07"])
def test_control_characters_are_replaced(bad: str) -> None:
    assert not set(output.printable(f"a{bad}b")) & set(map(chr, (*range(9), *range(11, 32), *range(127, 160))))


def test_text_tabs_newlines_and_any_script_stay() -> None:
    text = "tab\tnewline\n日本語 🙂 é \N{NO-BREAK SPACE}"
    assert output.printable(text) == text


def test_carriage_returns_of_crlf_vanish() -> None:
    assert output.printable("a\r\nb") == "a\nb"


def test_colour_is_for_a_terminal_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert output.style("x", to=Terminal(), fg="red") != "x"
    assert output.style("x", to=io.StringIO(), fg="red") == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.style("x", to=Terminal(), fg="red") == "x"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert output.style("x", to=Terminal(), fg="red") == "x"


def test_columns_line_up_and_cut_nothing() -> None:
    long = "n" * 300
    assert output.columns(("A", "B"), [("x", "1"), (long, "2")]).splitlines() == [
        "A".ljust(300) + "  B",
        "x".ljust(300) + "  1",
        long + "  2",
    ]


def test_pairs_leave_out_what_is_not_known() -> None:
    assert output.pairs([("name", "m"), ("b", None), ("c", 0)]) == "name  m\nc     0"


def test_json_after_two_dashes_is_not_the_option() -> None:
    assert output.wants_json(["run", "--json"])
    assert not output.wants_json(["run", "--", "--json"])


def test_a_progress_line_says_what_how_much_and_the_share() -> None:
    assert line(ProgressEvent("download", 12_000_000, 96_000_000, "m.gguf")) == (
        "Downloading m.gguf: 12.0 MB of 96.0 MB (12 %)"
    )
    assert line(ProgressEvent("resolve", label="m")) == "Looking up m"
    assert line(ProgressEvent("load", 0, 98_500_000, "m")) == "Loading m (98.5 MB)"


def test_plain_progress_speaks_at_the_start_then_every_five_seconds_per_file() -> None:
    said: list[str] = []
    now = [0.0]
    report = PlainProgress(said.append, lambda: now[0])
    for second in range(12):
        now[0] = float(second)
        report(ProgressEvent("download", second, 12, "a"))
        report(ProgressEvent("download", second, 12, "b"))
    assert len([s for s in said if " a" in s]) == 3
    assert len([s for s in said if " b" in s]) == 3


def test_plain_progress_says_the_time_left_at_the_speed_of_what_this_run_did() -> None:
    said: list[str] = []
    now = [100.0]
    report = PlainProgress(said.append, lambda: now[0])
    # 60 MB were there before: a conversion that is gone on with. Then 1 MB a second.
    for second, done in ((0, 60), (10, 70), (20, 80), (140, 200)):
        now[0] = 100.0 + second
        report(ProgressEvent("write", done * 1_000_000, 200_000_000, "m"))
    assert [text.partition(" %)")[2] for text in said] == ["", ", 3 min left", ", 2 min left", ""]
    report(ProgressEvent("load", 0, 98_000_000, "m"))
    now[0] += 10
    report(ProgressEvent("load", 49_000_000, 98_000_000, "m"))
    assert said[-1] == "Loading m (98.0 MB)", "what isn't counted has no time left"


def test_a_duration_is_short_and_never_too_small() -> None:
    said = [human_seconds(seconds) for seconds in (0.2, 59.0, 60.0, 61.0, 4799.0)]
    assert said == ["1 s", "59 s", "1 min", "2 min", "1 h 20 min"]


def test_a_label_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    PlainProgress()(ProgressEvent("download", 0, None, "evil\x1b[2J"))
    assert "\x1b" not in capsys.readouterr().err


def test_bars_count_bytes_and_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxinfer.cli.progress import BarProgress

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    bars = BarProgress()
    bars(ProgressEvent("resolve", label="[bold]m"))
    bars(ProgressEvent("download", 0, 100_000_000, "m[1].gguf"))
    bars(ProgressEvent("download", 50_000_000, 100_000_000, "m[1].gguf"))
    assert bars._bars is not None
    bars._bars.refresh()
    bars.close()
    text = terminal.getvalue()
    assert "m[1].gguf" in text
    assert "50.0/100.0 MB" in text


def test_a_build_counts_files_and_speaks_once_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxinfer.cli.progress import BarProgress

    events = [ProgressEvent("build", done, 12, "CPU kernels (once)") for done in (0, 5, 12)]
    assert [line(e) for e in events] == [f"Building CPU kernels (once) …{count}" for count in ("", " 5/12", " 12/12")]
    said: list[str] = []
    now = [0.0]
    report = PlainProgress(said.append, lambda: now[0])
    for second, event in zip((0.0, 30.0, 60.0), events, strict=True):
        now[0] = second
        report(event)
    assert said == ["Building CPU kernels (once) …"]
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    bars = BarProgress()
    for event in events[:2]:
        bars(event)
    assert bars._bars is not None
    bars._bars.refresh()
    bars.close()
    assert "Building CPU kernels (once)" in terminal.getvalue()
    assert "5/12" in terminal.getvalue()
    assert "bytes" not in terminal.getvalue()


def test_an_unchanged_line_is_not_said_again() -> None:
    said: list[str] = []
    now = [0.0]
    report = PlainProgress(said.append, lambda: now[0])
    for second in (0.0, 6.0, 60.0):
        now[0] = second
        report(ProgressEvent("load", int(second), 98_000_000, "m"))
    assert said == ["Loading m (98.0 MB)"]


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_bars_are_for_a_terminal_that_wants_them(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    from mlxinfer.cli.progress import BarProgress, reporting

    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with reporting() as report:
        assert isinstance(report, BarProgress)
    monkeypatch.setenv(variable, value)
    with reporting() as report:
        assert isinstance(report, PlainProgress)
