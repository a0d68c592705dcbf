"""`mlxinfer convert`: what it says, writes and refuses."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest

import mlxinfer
from mlxinfer.convert import choosing, job, whole
from mlxinfer.convert.calibration import documents
from mlxinfer.convert.choosing import Wanted
from mlxinfer.convert.measure import Comparison
from mlxinfer.convert.places import work_folder
from mlxinfer.convert.quantizing import min_max
from mlxinfer.convert.search import recommended, search
from tests.tiny import write_folder
from tests.unit.cli.conftest import Invoke, error_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_writes_the_folder_and_prints_its_path(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    result = invoke("convert", str(model), "out", "--bits", "4")
    assert result.exit_code == 0, result.output
    assert result.stdout == "out\n"
    assert "bits per weight" in result.stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["bits"] == 4
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_without_a_destination_the_name_says_what_it_is(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    assert invoke("convert", str(model), "--bits", "8", "--dtype", "bfloat16").stdout == "tiny-mlx-8bit\n"
    assert invoke("convert", str(model), "--dtype", "bfloat16").stdout == "tiny-mlx-bf16\n"
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("tiny")} == {
        "tiny-mlx-8bit",
        "tiny-mlx-bf16",
    }


def test_a_dry_run_says_everything_and_writes_nothing(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    result = invoke("convert", str(model), "out", "--bits", "4", "--dry-run")
    assert result.exit_code == 0, result.output
    row = next(line for line in result.stdout.splitlines() if line.startswith("model.layers.*.mlp.down_proj.weight"))
    assert row.split()[1:3] == ["3", "64x128"]
    assert "4-bit affine, groups of 64" in row
    assert "bits per weight" in result.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_a_dry_run_in_json_has_the_plan_and_what_fits(invoke: Invoke, model: Path) -> None:
    result = invoke("convert", str(model), "--mode", "mxfp4", "--dry-run", "--json")
    said = json.loads(result.stdout)
    assert said["path"] == "tiny-mlx-mxfp4"
    assert said["refused"] is None
    assert said["fits"]["in_memory"] is True
    head = next(t for t in said["tensors"] if t["name"] == "lm_head.weight")
    assert head["packing"] == {"bits": 4, "group_size": 32, "mode": "mxfp4"}


def test_a_dry_run_says_what_would_be_refused_and_ends_with_1(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    result = invoke("convert", str(model), "out", "--dry-run")
    assert result.exit_code == 1
    assert "It would be refused: out exists" in result.stderr.replace(f"{tmp_path}{os.sep}", "")
    assert invoke("convert", str(model), "out", "--dry-run", "--json").exit_code == 1


def test_the_json_of_a_run_is_the_report(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    said = json.loads(invoke("convert", str(model), "out", "--bits", "4", "--json").stdout)
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert report.items() >= {key: value for key, value in said.items() if key != "path"}.items()
    assert said["path"] == "out"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--bits", "7"], "invalid_value", "bits is 7"),
        (["--bits", "8", "--mode", "mxfp4"], "invalid_value", "mxfp4 has 4 bits"),
        (["--group-size", "48"], "invalid_value", "the group size is 48"),
        (["--recipe", "nosuch"], "invalid_value", "no recipe 'nosuch'"),
        (["--recipe", "mixed_4_6", "--bits", "4"], "invalid_value", "bits and a recipe don't go together"),
        (["--dtype", "float8"], "usage", "float8"),
    ],
)
def test_a_wrong_option_is_a_usage_error(
    arguments: list[str], code: str, message: str, invoke: Invoke, model: Path, tmp_path: Path
) -> None:
    result = invoke("convert", str(model), "out", *arguments, "--json")
    assert result.exit_code == 2
    assert error_of(result)["code"] == code
    assert message in error_of(result)["message"]
    assert not (tmp_path / "out").exists()


def test_an_interrupt_says_where_the_rest_is(
    invoke: Invoke, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "_write_items", interrupted)
    result = invoke("convert", str(model), "out", "--bits", "4")
    assert result.exit_code == 130
    assert f"What is done is kept in {work_folder(tmp_path / 'out')}" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_recipe_and_overwriting_reach_the_conversion(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    assert invoke("convert", str(model), "out").exit_code == 0
    result = invoke("convert", str(model), "out", "--recipe", "mixed_4_6", "--overwrite")
    assert result.exit_code == 0, result.output
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert quantization["bits"] == 4
    assert quantization["lm_head"]["bits"] == 6


@pytest.mark.parametrize("target", ["nan", "inf", "0", "-1"])
def test_a_target_that_is_no_number_of_bits_is_refused(target: str, invoke: Invoke, model: Path) -> None:
    done = invoke("convert", str(model), "out", "--target-bpw", target)
    assert done.exit_code == 2
    assert "bits per weight" in done.stderr


def test_plans_by_sensitivity_are_searched_in_few_bits_too() -> None:
    asked = [Wanted(scales="search"), Wanted(scales="search", target_bpw=4.0), Wanted(target_bpw=4.0)]
    assert [choosing._quantizer(wanted) for wanted in asked] == [recommended, search, min_max]


@pytest.mark.parametrize("bits", [3, 4])
def test_a_search_for_scales_gives_other_bytes_from_4_bits_on(
    bits: int, invoke: Invoke, model: Path, tmp_path: Path
) -> None:
    for scales in ("min-max", "search"):
        assert invoke("convert", str(model), scales, "--bits", str(bits), "--scales", scales).exit_code == 0
    one, other = (tmp_path / name / "model.safetensors" for name in ("min-max", "search"))
    assert one.stat().st_size == other.stat().st_size
    assert (one.read_bytes() != other.read_bytes()) == (bits > 3), "2 and 3 bits come out worse by the search"


@pytest.mark.parametrize("method", ["dwq", "awq", "gptq"])
def test_a_method_that_learns_runs_from_the_command_and_is_reported_as_such(
    method: str, invoke: Invoke, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = documents("calibration")[:6]
    monkeypatch.setattr("mlxinfer.convert.learned.documents", lambda purpose: few)
    result = invoke("convert", str(model), "out", "--recipe", method, "--bits", "4", "--group-size", "32")
    assert result.exit_code == 0, result.output
    assert result.stdout == "out\n"
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    packed = [tensor for tensor in report["tensors"] if tensor["packing"]]
    assert len(packed) > 7
    assert {tensor["handling"] for tensor in packed} == {"requantized"}
    assert {tensor["note"] for tensor in packed} == {f"by {method}"}
    assert report["notes"] == [f"{method} of mlx-lm on the calibration text of the package"]
    with mlxinfer.load(tmp_path / "out") as llm:
        assert llm.generate("hello", max_tokens=4, ignore_eos=True).usage.completion_tokens == 4


def test_a_target_is_kept_and_the_report_tells_what_it_was_compared_with(
    invoke: Invoke, model: Path, tmp_path: Path
) -> None:
    result = invoke("convert", str(model), "out", "--target-bpw", "5.5", "--dtype", "float16", "--scales", "search")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert report["bits_per_weight"] <= 5.505
    assert "by sensitivity" in report["recipe"]
    assert "throughout" in report["recipe"]
    assert f"recipe: {report['recipe']}" in result.stderr
    assert "Measuring which matrices lose most" in result.stderr, "it may take minutes"


def test_a_name_that_is_no_model_is_an_error(invoke: Invoke) -> None:
    result = invoke("convert", "no-such-model", "--json")
    assert result.exit_code == 3
    assert error_of(result)["code"] == "model_not_found"


@pytest.mark.parametrize(("limit", "code"), [("0.5", 0), ("0.1", 1)])
def test_a_divergence_above_the_limit_ends_with_1_and_keeps_folder_and_figures(
    limit: str, code: int, invoke: Invoke, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Comparison(100, 0.25, 0.2, 0.4, 0.5, 0.01, 10.0, 11.0, (("prose", 0.25),))
    monkeypatch.setattr(whole, "measured", lambda source, outcome: found)
    result = invoke("convert", str(model), "out", "--bits", "4", "--max-kl", limit)
    assert result.exit_code == code
    assert ("above the limit of 0.1" in result.stderr) == bool(code)
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert report["measured"]["kl_mean"] == 0.25
    assert "0.25" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    "arguments", [["--bits", "4"], ["--mode", "mxfp4"], ["--group-size", "64"], ["--recipe", "mixed_4_6"]]
)
def test_a_target_goes_with_nothing_else_that_says_the_bits(
    arguments: list[str], invoke: Invoke, model: Path, tmp_path: Path
) -> None:
    result = invoke("convert", str(model), "out", "--target-bpw", "5", *arguments)
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a_destination_that_exists_is_refused_before_anything_is_learned(
    invoke: Invoke, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learned(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(whole, "learned_source", learned)
    (tmp_path / "out").mkdir()
    result = invoke("convert", str(model), "out", "--recipe", "dwq")
    assert result.exit_code == 2
    assert "exists" in result.stderr


def test_a_model_without_a_tokenizer_is_not_converted_if_it_is_to_be_measured(
    invoke: Invoke, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    result = invoke("convert", "./mute", "out", "--bits", "4", "--max-kl", "0.1")
    assert result.exit_code != 0
    assert "has no tokenizer" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--bits", "--group-size"])
def test_nought_is_no_number_of_bits(option: str, invoke: Invoke, model: Path, tmp_path: Path) -> None:
    assert invoke("convert", str(model), "out", option, "0").exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a_dry_run_of_a_method_that_learns_does_not_run_it(invoke: Invoke, model: Path) -> None:
    result = invoke("convert", str(model), "--recipe", "dwq", "--bits", "3", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "3-bit affine, groups of 64" in result.stdout
