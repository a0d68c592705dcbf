"""Values, files and rows that nobody should write: each an error that names them, none of them without an end."""

from __future__ import annotations

import datetime
import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.config import load_settings
from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora import TrainConfig, train
from mlxinfer.lora.evaluate import sample
from mlxinfer.lora.job import open_run, plan_of
from mlxinfer.lora.objectives import batches_of
from mlxinfer.lora.options import read_file
from mlxinfer.lora.types import Example, Judged
from mlxinfer.tokenizer import Tokenizer
from tests.unit.lora.rows import model, rows

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": 1 << 64}, "seed is 18446744073709551616; it is below 2^64"),
        ({"learning_rate": 10**400}, "learning_rate is 1000"),
        ({"alpha": 10**400}, "it is a number"),
        ({"loss": "dpo", "label_smoothing": 0.5}, "label_smoothing is 0.5; it is at least 0 and below 0.5"),
        ({"template_kwargs": {1: 2}}, "template_kwargs has 1; names are text"),
        ({"template_kwargs": {"tools": []}}, "template_kwargs has 'tools'; names are text, and none of self, messages"),
        ({"template_kwargs": {"messages": []}}, "template_kwargs has 'messages'"),
        ({"template_kwargs": {"add_generation_prompt": True}}, "template_kwargs has 'add_generation_prompt'"),
        ({"template_kwargs": {"day": datetime.date(2020, 1, 1)}}, "template_kwargs holds what JSON doesn't"),
    ],
)
def test_a_value_that_would_fail_later_is_named_at_once(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan_of({"model": "m", "data": "d.jsonl", **values})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.toml", f"a = {'[' * 5000}{']' * 5000}"),
        ("deep.yaml", f"a: {'[' * 5000}{']' * 5000}"),
        ("long.toml", f"updates = {'9' * 5000}"),
        ("month.yaml", "updates: 2021-13-45"),
        ("binary.toml", "updates = '\udcff'"),
        ("aliases.yaml", "a: &a [1, 1]\nb: &b [*a, *a]\nmodel: [*b, *b]"),
        ("key.yaml", "? {a: 1}\n: 2"),
        ("object.yaml", "updates: !!python/object/apply:os.getcwd []"),
        ("huge.toml", "#" * (1 << 20) + "\n"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidRequestError, match=name):
        read_file(tmp_path / name)


@pytest.mark.parametrize("kind", ["fifo", "folder", "missing", "long"])
def test_a_config_that_is_no_file_is_named_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("n" * 5000 + ".toml" if kind == "long" else f"{kind}.toml")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(InvalidRequestError, match="nnnn" if kind == "long" else kind):
        read_file(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": ["user"], "content": "a"}]}, "role is \\['user'\\]"),
        ({"messages": [{"role": {"a": 1}, "content": "a"}]}, "role is {'a': 1}"),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, "role is None"),
    ],
)
def test_a_role_of_another_kind_is_named_with_its_line(row: Any, message: str, base: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InvalidRequestError, match=f"rows.jsonl:1: .*{message}"):
        open_run(plan_of({"model": str(base), "data": str(tmp_path / "rows.jsonl")}), load_settings())


def test_a_row_of_more_messages_than_can_be_placed_is_refused_at_once(base: Path, tmp_path: Path) -> None:
    row = {"messages": [{"role": role, "content": "a"} for role in ("user", "assistant")] * 100_000}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InvalidRequestError, match=r"rows\.jsonl:1: 'messages' has 200,000 messages; at most 1,000"):
        open_run(plan_of({"model": str(base), "data": str(tmp_path / "rows.jsonl")}), load_settings())


@pytest.mark.parametrize("packing", ["on", "off"])
def test_a_limit_far_above_the_rows_makes_them_no_wider(packing: Any) -> None:
    config = TrainConfig(max_tokens=10**7, packing=packing)
    batches = batches_of(rows(6).items, config, packed=packing == "on")
    widths = [batches.batch(micro).inputs.shape[1] for update in batches.plan(0, 0, 1) for micro in update]
    assert max(widths) <= 32


def test_a_prompt_with_anothers_answer_is_cut_as_rows_are() -> None:
    made = [
        Judged(Example((1,) * length, (False,) * prompt + (True,) * (length - prompt), f"r:{prompt}"), wanted=True)
        for length, prompt in ((30, 28), (32, 2))
    ]
    batches = batches_of(made, TrainConfig(loss="kto", max_tokens=32, micro_batch_size=2), packed=False)
    held = batches.batch(((0,), (1,))).mismatched
    assert held is not None
    assert held.inputs.shape == (2, 32)
    assert held.num_tokens == 32 + 4
    assert (held.weights.sum(axis=1) > 0).all().item()


@pytest.mark.parametrize("supervise", ["last", "all"])
@pytest.mark.parametrize(
    ("loss", "row"),
    [("dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}), ("kto", {"prompt": "a", "completion": "b", "label": 1})],
)
def test_supervise_does_nothing_for_preferences_and_is_refused(
    supervise: str, loss: str, row: Any, base: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    values = {"model": str(base), "data": str(tmp_path / "rows.jsonl"), "loss": loss, "supervise": supervise}
    with pytest.raises(InvalidRequestError, match=f"rows.jsonl:1: supervise is '{supervise}'"):
        open_run(plan_of(values), load_settings())


def test_a_name_too_long_for_a_file_is_an_error_that_says_so(base: Path) -> None:
    with pytest.raises(InvalidRequestError, match="nnn: cannot be read: File name too long"):
        open_run(plan_of({"model": str(base), "data": "n" * 5000 + ".jsonl"}), load_settings())


@pytest.mark.parametrize(("prompt", "message"), [("", "has no token to continue"), ("\udc80", "lone surrogate")])
def test_a_prompt_that_cannot_be_continued_is_named_before_the_first_update(
    prompt: str, message: str, base: Path
) -> None:
    config = TrainConfig(updates=1, sample_prompts=(prompt,))
    with pytest.raises(InvalidRequestError, match=message):
        train(model(), Tokenizer.from_folder(base), rows(2), rows(2), config)


def test_a_sample_ends_with_the_token_that_ends_a_text(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, asked = Tokenizer.from_folder(base), []

    def heard(net: Any, held: Any, prompt: str, max_tokens: int, stop: Any = ()) -> str:
        asked.append(list(stop))
        return sample(net, held, prompt, max_tokens, stop)

    monkeypatch.setattr("mlxinfer.lora.loop.sample", heard)
    train(model(), tokenizer, rows(2), rows(2), TrainConfig(updates=1, sample_prompts=("a",), sample_tokens=2))
    assert asked == [list(tokenizer.eos_token_ids)]
    assert asked[0]


def test_dora_on_a_row_of_zeros_is_refused_and_lora_is_not() -> None:
    def emptied() -> Any:
        net = model()
        net.layers[1].mlp.up_proj.weight[3] = 0.0
        return net

    with pytest.raises(InvalidRequestError, match=r"layers\.1\.mlp\.up_proj has rows that are all zeros \(1 such"):
        train(emptied(), None, rows(2), None, TrainConfig(method="dora", updates=1))
    train(emptied(), None, rows(2), None, TrainConfig(updates=1))
    train(emptied(), None, rows(2), None, TrainConfig(method="dora", updates=1, targets=("q_proj",)))


@pytest.mark.parametrize("name", ["../rows", "./rows", "-x/rows", "a/b.", "a/-b", "a--b/c--d", "é/rows"])
def test_a_path_that_is_missing_is_an_error_and_no_data_set(
    name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InvalidRequestError, match=re.escape(name.removeprefix("./"))):
        open_run(plan_of({"model": str(base), "data": name}), load_settings())
