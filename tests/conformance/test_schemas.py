"""What comes out under a JSON schema is valid by it, whatever keywords it uses; what can't be held to is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import jsonschema
import pytest

import mlxinfer
from mlxinfer import InvalidRequestError
from mlxinfer.types import Grammar, SamplingParams
from tests import tiny
from tests.conformance.schemas import FIXED, schemas

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlxinfer import LLM

VALIDATOR = jsonschema.Draft202012Validator


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny.write_folder(tmp_path_factory.mktemp("models") / "tiny")
    with mlxinfer.load(str(folder), max_num_seqs=8, max_queue=1000) as model:
        yield model


def test_every_completed_reply_is_valid_and_every_refusal_is_a_clear_error(llm: LLM) -> None:
    corpus = schemas()
    assert len(corpus) >= 360
    refused: list[str] = []
    invalid: list[str] = []
    broken: list[str] = []
    running = []
    for seed, schema in enumerate(corpus):
        text = json.dumps(schema)
        params = SamplingParams(max_tokens=350, temperature=1, seed=seed, grammar=Grammar("json_schema", text))
        try:
            llm.compile(params.grammar)  # pyright: ignore[reportArgumentType]
        except InvalidRequestError as error:
            refused.append(f"{text}: {error}")
            continue
        running.append((schema, llm.submit(llm.prompt_ids("hello"), params)))
    completed = 0
    for schema, generation in running:
        try:
            reply = generation.result()
        except InvalidRequestError as error:
            broken.append(f"{json.dumps(schema)}: {error}")
            continue
        if reply.finish_reason != "stop":
            continue
        completed += 1
        try:
            VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER).validate(json.loads(reply))
        except (ValueError, jsonschema.ValidationError) as error:
            invalid.append(f"{json.dumps(schema)} gave {str(reply)!r}: {str(error)[:200]}")
    assert not invalid, "\n".join(invalid)
    assert not broken, "\n".join(broken)
    assert completed > 0.85 * len(running)
    unexpected = [r for r in refused if not any(r.startswith(json.dumps(f) + ":") for f in FIXED)]
    assert not unexpected, "\n".join(unexpected)
    assert 5 < len(refused) < 20
