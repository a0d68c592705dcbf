"""Every mlx-lm architecture through the engine, against mlx-lm's own loop, in float32.

Solo, in chunks and in a changing batch, logits and greedy tokens must be mlx-lm's. That would prove nothing about a
model whose output hardly depends on its context, so this is checked first, and planted faults must be noticed.
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.conformance import report
from tests.conformance.configs import (
    CONFIGS,
    NEEDS_METAL,
    NO_POSITIONS,
    NOT_CHUNK_INVARIANT,
    REFERENCE_CHUNK,
    UNBUILDABLE,
    WEIGHTS,
)
from tests.conformance.examine import TOLERANCE, Result, examine, module_of, tiny_model
from tests.conformance.installed import architectures
from tests.conformance.reference import reference
from tests.conformance.selection import cases

every_case = pytest.mark.parametrize("case", cases())


def result(case: str) -> Result:
    if module_of(case) in NEEDS_METAL and not mx.metal.is_available():
        pytest.skip(NEEDS_METAL[module_of(case)])
    return examine(case)


@every_case
def test_the_output_varies_and_depends_on_an_early_token(case: str) -> None:
    r = result(case)
    assert r.distinct_tokens >= 8
    assert r.changed >= 50 * TOLERANCE
    assert r.dropped >= 50 * TOLERANCE
    assert r.tokens_moved >= 1


@every_case
def test_a_prompt_in_chunks_gives_the_logits_of_mlx_lm(case: str) -> None:
    assert result(case).solo <= TOLERANCE


@every_case
def test_rows_that_join_and_leave_a_batch_get_the_logits_they_get_alone(case: str) -> None:
    assert result(case).batched <= TOLERANCE


@every_case
def test_greedy_tokens_are_those_of_mlx_lm_alone_and_in_a_batch(case: str) -> None:
    assert result(case).same_tokens


@every_case
def test_every_planted_fault_turns_the_comparison_red(case: str) -> None:
    faults = dict(result(case).faults)
    assert faults.pop("none") <= TOLERANCE, "the control without a fault"
    if case in NO_POSITIONS:
        assert faults.pop("shifted position") <= TOLERANCE, f"{case} has positions after all"
    assert {kind for name in faults for kind in ("lost", "swapped") if name.startswith(kind)} == {"lost", "swapped"}
    assert case in NO_POSITIONS or "shifted position" in faults
    assert ("stale state" in faults) == (result(case).tier == "batched-state")
    assert ("short mask" in faults) == result(case).reason.startswith("padded view")
    assert {name: off for name, off in faults.items() if off <= TOLERANCE} == {}, "faults that went unnoticed"


@every_case
def test_mlx_lm_itself_is_chunk_invariant_or_listed(case: str) -> None:
    assert (result(case).upstream_chunked > TOLERANCE) == (module_of(case) in NOT_CHUNK_INVARIANT)


@every_case
def test_the_table_in_the_docs_is_current(case: str) -> None:
    r = result(case)
    row = report.read_table()[module_of(case)]
    assert r.tier in row["tier"].split(", "), "run `python -m tests.conformance.report`"


def test_every_architecture_of_mlx_lm_has_a_config_or_a_reason() -> None:
    assert {module_of(case) for case in CONFIGS} | set(UNBUILDABLE) == set(architectures())


def test_the_table_in_the_docs_lists_exactly_the_architectures_of_mlx_lm() -> None:
    assert list(report.read_table()) == sorted(architectures(), key=str.lower)


def test_the_lists_of_exceptions_name_cases_that_exist() -> None:
    assert set(WEIGHTS) | set(REFERENCE_CHUNK) | set(NO_POSITIONS) <= set(CONFIGS)
    assert set(NOT_CHUNK_INVARIANT) == set(REFERENCE_CHUNK)
    assert set(NEEDS_METAL) <= {module_of(case) for case in CONFIGS}


@pytest.mark.skipif(mx.metal.is_available(), reason="they run here")
@pytest.mark.parametrize("module", sorted(NEEDS_METAL))
def test_what_is_said_to_need_metal_does(module: str) -> None:
    with pytest.raises(RuntimeError, match="No Metal back-end"):
        reference(tiny_model(module), [5, 6, 7], 1)


def test_olmo_cannot_be_imported_without_its_package() -> None:
    with pytest.raises(SystemExit):
        __import__("mlx_lm.models.olmo")
