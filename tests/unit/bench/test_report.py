"""The report and what is made of it: ratios, error counts, rows of the table, points of the plot, the file."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.bench import plot, table
from mlxinfer.bench.client import Endpoint, Record
from mlxinfer.bench.machine import ModelBytes, bandwidth, bandwidth_share, faster, machine, model_bytes, read_speed
from mlxinfer.bench.report import build, write
from mlxinfer.bench.runner import Measured, Plan, Round
from mlxinfer.bench.targets import Target
from mlxinfer.bench.words import Sizer
from mlxinfer.bench.workloads import WORKLOADS, Load
from mlxinfer.config import Settings
from mlxinfer.errors import InvalidRequestError
from tests.tiny import write_folder

if TYPE_CHECKING:
    from pathlib import Path

SIZE = ModelBytes("m", "llama", 1000, "none", "float32", 4000, 4000, 10.0, 1)


def answered(ttft: float, *, tokens: int = 5, client: int = 0, error: str | None = None) -> Record:
    """Sent at 0; a chunk each second after the first, five in all."""
    events = [(ttft + i, "x") for i in range(5)]
    made = Record("chat", "p", client, 0, 0.0, events[-1][0], events, 90, tokens, 45, "length")
    made.error = error
    return made


def once(*records: Record, peak: int | None = None, **figures: float) -> Round:
    return Round(records, records, figures, peak, 0.1)


def report(ours: list[Round], theirs: list[Round] | None = None, **options: Any) -> dict[str, Any]:
    targets = [Target("ours", Endpoint("http://a", "m"), ours=True)]
    rounds = {"ours": ours}
    if theirs is not None:
        targets.append(Target("other", Endpoint("http://b", "n"), ours=False))
        rounds["other"] = theirs
    measured = [Measured("chat", Load(2), rounds)]
    made = build(
        Plan(("chat",), seed=7),
        targets,
        measured,
        Sizer(),
        machine={"device": "d", "os": "o", "mlxinfer": "0"},
        bandwidth={"gb_s": 1e-6, "source": "s"},
        started="2026-01-01",
        flags={},
        **options,
    )
    json.dumps(made, allow_nan=False)  # it has to be JSON
    return made


def test_ratios_are_ours_over_theirs_of_each_round() -> None:
    made = report(
        [once(answered(1.0), hi_ttft=1.0), once(answered(2.0), hi_ttft=3.0)], [once(answered(4.0), hi_ttft=2.0)] * 2
    )
    ratios = made["results"][0]["ratios"]["other"]
    assert ratios["ttft_p50"] == {"median": 0.375, "low": 0.25, "high": 0.5, "rounds": 2, "bound95": None}
    assert ratios["total_tok_s"]["median"] == pytest.approx((8 / 5 + 8 / 6) / 2)
    assert ratios["wall"]["low"] == pytest.approx(5 / 8)
    assert ratios["longest_gap"]["median"] == 1.0
    assert ratios["hi_ttft"]["median"] == 1.0
    assert made["plan"]["seed"] == 7


def test_a_round_with_a_failed_request_is_in_no_ratio_and_its_errors_are_counted() -> None:
    broken = once(answered(1.0), answered(1.0, error="HTTP 500: no"), answered(1.0, error="HTTP 500: no"))
    made = report([once(answered(1.0)), once(answered(1.0))], [broken, once(answered(2.0))])["results"][0]
    assert made["targets"]["other"]["errors"] == [{"message": "HTTP 500: no", "count": 2}]
    assert made["targets"]["other"]["summary"]["errors"] == 2
    assert made["targets"]["other"]["summary"]["ttft"]["count"] == 2
    assert (made["ratios"]["other"]["ttft_p50"]["rounds"], made["ratios"]["other"]["ttft_p50"]["median"]) == (1, 0.5)


def test_where_every_request_fails_there_is_a_report_all_the_same() -> None:
    made = report([once(answered(1.0, error="no"))], [once(answered(1.0))])["results"][0]
    assert made["ratios"]["other"] == {}
    header, rows = table.rows(made)
    assert rows[0][1:3] == ["1, 1 failed", "1"]
    assert "ours: 1 x no" in table.notes(made)
    assert header == ["chat, 2 clients", "ours", "other", "ours / other"]


def test_decode_as_a_share_of_bandwidth_needs_one_stream_and_a_known_model() -> None:
    # One token a second, 92.5 tokens of context on average: 4000 + 925 bytes a second of 1000.
    one = report([once(answered(1.0))], size_at=lambda _: SIZE)["results"][0]["targets"]["ours"]
    assert one["bandwidth_share"] == pytest.approx(4925 / 1000)
    two = report([once(answered(1.0), answered(1.0, client=1))], size_at=lambda _: SIZE)
    assert two["results"][0]["targets"]["ours"]["bandwidth_share"] is None
    assert report([once(answered(1.0))])["results"][0]["targets"]["ours"]["bandwidth_share"] is None
    assert bandwidth_share(10.0, SIZE, 100, 1.0) == pytest.approx(10 * 5000 / 1e9)


def test_a_models_bytes_come_from_its_files(tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path / "m"))
    found = model_bytes(folder, Settings(dtype="float32"), 100)
    assert found is not None
    # The files have a header as well.
    assert found.weight_bytes == found.read_bytes == pytest.approx(found.parameters * 4, rel=0.01)
    # Three layers, keys and values of 2 heads of 16, 4 bytes each.
    assert found.cache_bytes_per_token == 3 * 2 * 2 * 16 * 4
    assert model_bytes(folder, Settings(), 10**6) is not None
    assert model_bytes(str(tmp_path / "none"), Settings(), 100) is None


def test_the_table_has_a_row_for_each_figure_that_somebody_has() -> None:
    made = report([once(answered(1.0), peak=5_000_000, long_ttft=0.25)], [once(answered(2.0))])["results"][0]
    rows = {row[0]: row[1:] for row in table.rows(made)[1]}
    assert rows["TTFT p50 / p95 / p99"] == ["1.00 s / 1.00 s / 1.00 s", "2.00 s / 2.00 s / 2.00 s", "0.50x"]
    assert rows["long TTFT"] == ["250.0 ms", "-", ""]
    assert rows["peak memory"] == ["5.0 MB", "-", ""]
    assert rows["cached prompt tokens"][:2] == ["50.0%", "50.0%"]
    assert "share of the bandwidth limit" not in rows


def test_the_published_table_has_medians_of_rounds_and_ratios_with_their_range() -> None:
    made = report([once(answered(1.0)), once(answered(3.0))], [once(answered(4.0))] * 2)
    lines = table.markdown(made).splitlines()
    assert lines[0] == "| workload | figure | ours | other | ours / other |"
    assert "| chat, 2 clients | TTFT p50 | 2.00 s | 4.00 s | 0.50x (0.25-0.75) |" in lines
    assert set(table.KEY_FIGURES) == set(WORKLOADS)


def test_notes_say_when_tokens_come_several_to_a_chunk_or_are_only_counted() -> None:
    many, guessed = answered(1.0, tokens=10), answered(1.0)
    guessed.completion_tokens = None
    notes = table.notes(report([once(many)], [once(guessed)])["results"][0])
    assert any("ours sends 2.0 tokens a chunk" in note for note in notes)
    assert any("other sends no usage" in note for note in notes)


def test_the_file_is_written_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write({"a": "ü"}, path)
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "ü"}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="none"):
        write({}, tmp_path / "none" / "r.json")


def test_the_bandwidth_is_the_chips_published_one_or_the_best_that_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlxinfer.zoo.fitting.measured_bandwidth", lambda: (10.0, "a product"))
    monkeypatch.setattr("mlxinfer.bench.machine.read_speed", lambda: 20.0)
    monkeypatch.setattr("mlxinfer.runtime.chip_name", lambda: None)
    assert bandwidth()["gb_s"] == 20.0
    monkeypatch.setattr("mlxinfer.bench.machine.read_speed", lambda: 5.0)
    assert bandwidth() == {"gb_s": 10.0, "source": "a product"}
    monkeypatch.setattr("mlxinfer.bench.machine.read_speed", lambda: 20.0)
    monkeypatch.setattr("mlxinfer.runtime.chip_name", lambda: "Apple M3")
    assert bandwidth()["gb_s"] == 10.0
    assert faster({"gb_s": 1.0}, {"gb_s": 2.0}) == {"gb_s": 2.0}


def test_memory_is_read_at_a_speed_that_can_be() -> None:
    assert 0.1 < read_speed() < 10_000


def test_machine_names_device_system_and_versions() -> None:
    found = machine()
    assert all(found[key] for key in ("device", "os", "cores", "memory_bytes", "python", "mlxinfer", "mlx", "mlx_lm"))


def test_the_plot_has_a_line_over_clients_and_bars_of_percentiles() -> None:
    made = report([once(answered(1.0))])
    made["results"].append(made["results"][0] | {"clients": 1, "label": "chat, 1 client"})
    made["results"].append(made["results"][0] | {"clients": None, "label": "chat, 2/s"})
    assert plot.throughput(made) == {"chat, ours": [("chat, 1 client", 1, 1.0), ("chat, 2 clients", 2, 1.0)]}
    assert plot.latencies(made, "ttft")["chat, 2 clients, ours"] == [1.0, 1.0, 1.0]


def test_without_matplotlib_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'mlxinfer\[bench\]'"):
        plot.check(tmp_path / "x.svg")
    with pytest.raises(InvalidRequestError, match=r"\.svg or \.png"):
        plot.check(tmp_path / "x.pdf")


@pytest.mark.parametrize("ending", plot.ENDINGS)
def test_a_picture_is_drawn(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(report([once(answered(1.0))]), tmp_path / f"x{ending}")
    assert (tmp_path / f"x{ending}").stat().st_size > 1000
