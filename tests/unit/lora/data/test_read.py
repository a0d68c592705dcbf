"""Rows of files become a Dataset, and every row that does not is named with its file and line."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers

from mlxinfer.errors import InvalidRequestError, OfflineError
from mlxinfer.lora.data import DataOptions, read_examples
from mlxinfer.lora.data import files as data_files
from mlxinfer.lora.data.hub import choose_files, is_dataset_id
from mlxinfer.lora.types import Example, Judged, Pair
from mlxinfer.tokenizer import Tokenizer
from tests.tiny import CHATML, build_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
LONG = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "xyz " * 60}]}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return _tokenizer(CHATML)


def _tokenizer(template: str | None) -> Tokenizer:
    return Tokenizer.from_parts(
        tokenizer_json=json.loads(build_tokenizer().to_str()),
        chat_template=template,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        add_bos_token=template is None,
    )


def _write(folder: Path, *rows: Any, name: str = "train.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def _learnt(tokenizer: Tokenizer, example: Any) -> str:
    assert isinstance(example, Example)
    kept = [t for t, own in zip(example.token_ids, example.supervised, strict=True) if own]
    return tokenizer.decode(kept, skip_special_tokens=False)


def test_formats_that_mean_the_same_loss_may_be_mixed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    tools = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "x", "tool_calls": [call]}]}
    older = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    path = _write(tmp_path, CHAT, {"prompt": "a", "completion": "b"}, {"text": "fox"}, tools, older)
    dataset = read_examples(path, tokenizer)
    assert dict(dataset.formats) == {"chat": 2, "completions": 1, "text": 1, "tools": 1}
    assert [_learnt(tokenizer, item) for item in dataset.items[:3]] == [
        "hello<|im_end|>",
        "b<|im_end|>",
        "ox<|im_end|>",
    ]
    assert [item.where for item in dataset.items if isinstance(item, Example)] == [f"{path}:{n}" for n in range(1, 6)]
    assert dataset.summary().startswith("5 rows (2 chat, 1 completions, 1 text, 1 tools): 5 trained, 0 truncated, 0")


def test_formats_of_different_losses_are_an_error_that_names_both_lines(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = _write(tmp_path, CHAT, CHAT, {"prompt": "a", "chosen": "b", "rejected": "c"})
    with pytest.raises(InvalidRequestError, match=rf"{path}:3: .*preference.*{path}:1 is a sft") as caught:
        read_examples(path, tokenizer)
    assert caught.value.param == "data"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"messages": [', "not JSON: .* at column"),
        (b"\xff\xfe", "not UTF-8: byte 0 is 0xff"),
        (b"[1]", "holds a list, not a JSON object"),
        (b"[" * 100_000, "not usable JSON|not JSON"),
        ({"mesages": []}, r"the keys \['mesages'\] are no known format"),
        ({"prompt": "a"}, "no known format"),
        ({"prompt": "a", "chosen": "b"}, "'rejected' is missing"),
        ({"completion": "a"}, "'prompt' is missing"),
        ({"prompt": 3, "completion": "a"}, "'prompt' is 3; it must be a string"),
        ({"prompt": "a", "completion": ""}, "'completion' is empty"),
        ({"text": ""}, "'text' is empty"),
        ({"text": ["a"]}, "'text' is .* must be a string"),
        ({"text": "a\ud800"}, "lone surrogate"),
        ({"messages": "hi"}, "'messages' is 'hi'; it must be a list"),
        ({"messages": []}, "at least one message"),
        ({"messages": ["hi"]}, r"messages\[0\] is 'hi'; a message is an object"),
        ({"messages": [{"role": "boss", "content": "x"}]}, r"messages\[0\].role is 'boss'; it is one of assistant"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content is 3"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant turn"),
        ({"messages": [*CHAT["messages"], {"role": "assistant", "content": ""}]}, "neither content nor tool calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, r"tool_calls\[0\] is"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "is not JSON: '{'"),
        ({**CHAT, "tools": "all"}, "'tools' is 'all'"),
    ],
)
def test_a_bad_row_is_an_error_with_its_line(row: Any, message: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = _write(tmp_path, CHAT, row, CHAT)
    with pytest.raises(InvalidRequestError, match=rf"1 of 3 rows(.|\n)*{path}:2: .*({message})"):
        read_examples(path, tokenizer)
    dataset = read_examples(path, tokenizer, DataOptions(bad_rows="drop"))
    assert (dataset.rows, dataset.trained, len(dataset.dropped)) == (3, 2, 1)
    assert dataset.dropped[0].where == f"{path}:2"


def test_all_bad_rows_are_named_at_once_up_to_a_limit(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = _write(tmp_path, *[{"a": 1}] * 30)
    with pytest.raises(InvalidRequestError) as caught:
        read_examples(path, tokenizer)
    assert "30 of 30 rows" in str(caught.value)
    assert f"{path}:20: " in str(caught.value)
    assert f"{path}:21: " not in str(caught.value)
    assert str(caught.value).endswith("and 10 more")


def test_blank_lines_are_dropped_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = _write(tmp_path, CHAT, b"", b"  ", CHAT)
    dataset = read_examples(path, tokenizer)
    assert [(d.where, d.reason) for d in dataset.dropped] == [
        (f"{path}:{n}", "the line is blank") for n in (2, 3)
    ]  # fmt: skip
    assert dataset.rows == 4 == dataset.trained + dataset.truncated + len(dataset.dropped)


def test_an_empty_file_and_one_of_blank_lines_are_errors(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=r"empty\.jsonl: the file is empty"):
        read_examples(_write(tmp_path, name="empty.jsonl"), tokenizer)
    with pytest.raises(InvalidRequestError, match=r"no row is left to train on .*blank.jsonl:1: the line is blank"):
        read_examples(_write(tmp_path, b"", name="blank.jsonl"), tokenizer)


def test_a_huge_line_is_refused_and_the_next_is_read(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "MAX_ROW_BYTES", 1 << 20)
    path = _write(tmp_path, {"text": "a" * (3 << 20)}, CHAT)
    dataset = read_examples(path, tokenizer, DataOptions(bad_rows="drop"))
    assert [(d.where, d.reason) for d in dataset.dropped] == [(f"{path}:1", "the line is longer than 1 MiB")]
    assert dataset.trained == 1


def test_a_byte_order_mark_is_skipped_and_a_json_list_is_explained(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert len(read_examples(_write(tmp_path, b"\xef\xbb\xbf" + json.dumps(CHAT).encode()), tokenizer)) == 1
    with pytest.raises(InvalidRequestError, match=r"list\.json:1: this is a JSON list"):
        read_examples(_write(tmp_path, [CHAT], name="list.json"), tokenizer)


@pytest.mark.parametrize(("overlong", "truncated", "dropped"), [("cut", 1, 0), ("drop", 0, 1)])
def test_rows_in_are_rows_trained_truncated_and_dropped(
    overlong: Any, truncated: int, dropped: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = _write(tmp_path, CHAT, LONG, CHAT)
    dataset = read_examples(path, tokenizer, DataOptions(max_tokens=40, overlong=overlong))
    assert (dataset.rows, dataset.trained, dataset.truncated, len(dataset.dropped)) == (3, 2, truncated, dropped)
    for item in dataset.items:
        assert isinstance(item, Example)
        assert item.truncated == (len(item.token_ids) == 40)
    assert all(d.where == f"{path}:2" and "at most 40" in d.reason for d in dataset.dropped)


def test_an_overlong_row_can_be_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = _write(tmp_path, CHAT, LONG)
    with pytest.raises(InvalidRequestError, match=rf"{path}:2: the row has \d+ tokens; at most 40"):
        read_examples(path, tokenizer, DataOptions(max_tokens=40, overlong="error"))


def test_a_row_whose_learnt_tokens_are_all_cut_away_is_dropped(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {"messages": [{"role": "user", "content": "xyz " * 60}, {"role": "assistant", "content": "hello"}]}
    path = _write(tmp_path, CHAT, row)
    dataset = read_examples(path, tokenizer, DataOptions(max_tokens=40))
    assert (dataset.trained, dataset.truncated) == (1, 0)
    assert dataset.dropped[0].where == f"{path}:2"
    assert "stands after the first 40" in dataset.dropped[0].reason


def test_a_preference_shares_its_prompt_and_only_answers_are_learnt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    user, answer = CHAT["messages"][:1], [{"role": "assistant", "content": "bye"}]
    rows = [
        {"prompt": "hi", "chosen": "hello", "rejected": "bye"},
        {"prompt": user, "chosen": CHAT["messages"][1:], "rejected": answer},
        {"chosen": CHAT["messages"], "rejected": [*user, *answer]},
        {"prompt": user, "chosen": CHAT["messages"], "rejected": [*user, *answer]},
    ]
    dataset = read_examples(_write(tmp_path, *rows), tokenizer)
    assert dataset.kind == "preference"
    for item in dataset.items:
        assert isinstance(item, Pair)
        assert _learnt(tokenizer, item.chosen) == "hello<|im_end|>"
        assert _learnt(tokenizer, item.rejected) == "bye<|im_end|>"
        begin = item.chosen.supervised.index(True)
        assert item.chosen.token_ids[:begin] == item.rejected.token_ids[:begin]


def test_a_pair_is_truncated_when_one_of_its_answers_is(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = _write(
        tmp_path,
        {"prompt": "a", "chosen": "xyz " * 60, "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "xyz " * 60},
    )
    dataset = read_examples(path, tokenizer, DataOptions(max_tokens=40))
    assert (dataset.rows, dataset.trained, dataset.truncated) == (3, 1, 2)
    assert isinstance(dataset.items[0], Pair)
    assert (dataset.items[0].chosen.truncated, dataset.items[0].rejected.truncated) == (True, False)


def test_answers_to_different_prompts_and_equal_answers_are_no_preference(tmp_path: Path, tokenizer: Tokenizer) -> None:
    other = [{"role": "user", "content": "no"}, {"role": "assistant", "content": "bye"}]
    with pytest.raises(InvalidRequestError, match="do not answer the same prompt"):
        read_examples(_write(tmp_path, {"chosen": CHAT["messages"], "rejected": other}), tokenizer)
    with pytest.raises(InvalidRequestError, match="are the same"):
        read_examples(_write(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "b"}), tokenizer)


def test_judged_rows_carry_their_label(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False, 1, "false")]
    dataset = read_examples(_write(tmp_path, *rows), tokenizer)
    assert [item.wanted for item in dataset.items if isinstance(item, Judged)] == [True, False, True, False]
    with pytest.raises(InvalidRequestError, match="'label' is 'maybe'"):
        read_examples(_write(tmp_path, {"prompt": "a", "completion": "b", "label": "maybe"}), tokenizer)


def test_csv_cells_are_values_and_lists_of_messages_are_json(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "train.csv"
    path.write_text('prompt,completion\n"a\nb",c\nx,"y, z"\n', encoding="utf-8")
    dataset = read_examples(path, tokenizer)
    assert [_learnt(tokenizer, item) for item in dataset.items] == ["c<|im_end|>", "y, z<|im_end|>"]
    assert [item.where for item in dataset.items if isinstance(item, Example)] == [f"{path}:2", f"{path}:4"]
    quoted = json.dumps(CHAT["messages"]).replace('"', '""')
    path.write_text(f'messages\n"{quoted}"\n', encoding="utf-8")
    assert _learnt(tokenizer, read_examples(path, tokenizer).items[0]) == "hello<|im_end|>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt,completion\na,b\na\n", ":3: the line has 1 cells, the header 2"),
        (b"prompt,completion\na,\xff\n", ":2: the line is not UTF-8"),
        (b'prompt,completion\na,"b"c\n', ":2: the line is not CSV"),
        (b"prompt,prompt\na,b\n", ":1: the first line must name each column once"),
        (b"", "the file is empty"),
        (b"prompt,completion\n", "the file is empty"),
    ],
)
def test_a_bad_csv_line_is_named(content: bytes, message: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "train.csv"
    path.write_bytes(content)
    with pytest.raises(InvalidRequestError, match=message):
        read_examples(path, tokenizer)


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = _write(tmp_path, b"PAR1", name="train.parquet")
    with pytest.raises(InvalidRequestError, match="pip install pyarrow"):
        read_examples(path, tokenizer)


def test_parquet_rows_are_read_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist([CHAT, CHAT]), path)
    dataset = read_examples(path, tokenizer)
    assert [item.where for item in dataset.items if isinstance(item, Example)] == [f"{path}:1", f"{path}:2"]
    path.write_bytes(b"PAR1 no")
    with pytest.raises(InvalidRequestError, match="not a readable Parquet file"):
        read_examples(path, tokenizer)


def test_a_folder_gives_the_files_of_the_split(tmp_path: Path, tokenizer: Tokenizer) -> None:
    _write(tmp_path, CHAT, name="train-00000-of-00002.jsonl")
    _write(tmp_path, CHAT, name="train-00001-of-00002.jsonl")
    _write(tmp_path, LONG, name="validation.jsonl")
    _write(tmp_path, LONG, name="training_notes.jsonl")
    assert len(read_examples(tmp_path, tokenizer)) == 2
    assert len(read_examples(tmp_path, tokenizer, split="valid")) == 1
    with pytest.raises(InvalidRequestError, match=r"has no file of the split 'test', such as test.jsonl; its files: "):
        read_examples(tmp_path, tokenizer, split="test")


@pytest.mark.parametrize("name", ["gone.jsonl", "rows.txt"])
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        read_examples(tmp_path / name, tokenizer)


def test_a_data_set_of_the_hub_is_told_from_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "rows").mkdir()
    assert is_dataset_id("owner/name")
    assert is_dataset_id("owner/name:config")
    assert not any(map(is_dataset_id, ("own/rows", "owner/name.jsonl", "name", "/a/b", "a/b/c")))


def test_the_files_of_a_split_are_chosen_by_the_hubs_naming() -> None:
    files = ["README.md", "main/train-00001.parquet", "main/train-00000.parquet", "main/test.jsonl", "b/train.parquet"]
    assert choose_files(files, "main", "train") == ["main/train-00000.parquet", "main/train-00001.parquet"]
    assert choose_files(files, None, "test") == ["main/test.jsonl"]
    assert choose_files(files, None, "valid") == []
    assert choose_files(["data/validation/0.jsonl"], None, "valid") == ["data/validation/0.jsonl"]


def test_a_data_set_of_the_hub_offline_is_a_clear_error(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi, errors

    def offline(*args: object, **kwargs: object) -> None:
        raise errors.OfflineModeIsEnabled("offline")

    monkeypatch.setattr(HfApi, "list_repo_files", offline)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OfflineError, match="the data set owner/name cannot be fetched"):
        read_examples("owner/name", tokenizer)


def test_text_begins_with_one_bos_and_ends_with_the_closing_token(tmp_path: Path) -> None:
    plain = _tokenizer(None)
    path = _write(tmp_path, {"text": "fox"}, {"text": "<|endoftext|>fox"}, {"prompt": "the ", "completion": "fox"})
    items = read_examples(path, plain).items
    bos, eos = plain.bos_token_id, plain.eos_token_id
    for item in items:
        assert isinstance(item, Example)
        assert item.token_ids[0] == bos != item.token_ids[1]
        assert item.token_ids[-1] == eos
        assert item.supervised[-1]
        assert not item.supervised[0]
    # The blank at the prompt's end belongs to the token that is learnt.
    assert [_learnt(plain, item) for item in items] == ["fox<|im_end|>", "fox<|im_end|>", " fox<|im_end|>"]


def test_everything_but_the_first_token_can_be_learnt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    item = read_examples(_write(tmp_path, CHAT), tokenizer, DataOptions(supervise="all")).items[0]
    assert isinstance(item, Example)
    assert item.supervised == (False, *[True] * (len(item.token_ids) - 1))


def test_completions_go_through_the_chat_template_or_not_as_asked(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = _write(tmp_path, {"prompt": "the ", "completion": "fox"})
    chat, text = (
        read_examples(path, tokenizer, DataOptions(completion_style=style)).items[0] for style in ("chat", "text")
    )
    assert isinstance(chat, Example)
    assert isinstance(text, Example)
    assert "<|im_start|>user\nthe " in tokenizer.decode(chat.token_ids, skip_special_tokens=False)
    assert tokenizer.decode(text.token_ids, skip_special_tokens=False) == "the fox<|im_end|>"


@pytest.mark.parametrize(
    "template",
    [
        # The answer's letters are changed, the history is dropped, or an earlier answer is written differently.
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | reverse }}<|im_end|>\n{% endfor %}",
        "{% for m in messages[-1:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ ' (new)' if loop.last else ' (old)' }}\n{% endfor %}",
    ],
)
def test_a_template_whose_turns_cannot_be_placed_is_an_error(template: str, tmp_path: Path) -> None:
    path = _write(tmp_path, {"messages": CHAT["messages"] * 2})
    with pytest.raises(InvalidRequestError, match=rf"{path}:1: messages\[\d\]"):
        read_examples(path, _tokenizer(template))


def test_a_template_that_looks_at_the_length_of_content_cannot_be_marked(tmp_path: Path) -> None:
    tokenizer = _tokenizer(CHATML.replace("{{ m['content'] }}", "{{ m['content'] | length }}:{{ m['content'] }}"))
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]: nothing of it can be found"):
        read_examples(_write(tmp_path, CHAT), tokenizer)


def test_a_template_that_looks_at_the_middle_of_content_is_marked_elsewhere(tmp_path: Path) -> None:
    tokenizer = _tokenizer(CHATML.replace("{{ m['content'] }}", "{{ '!' if 'll' in m['content'] }}{{ m['content'] }}"))
    row = {"messages": [*CHAT["messages"][:1], {"role": "assistant", "content": "ll"}]}
    longer = {"messages": [*CHAT["messages"][:1], {"role": "assistant", "content": "I say ll now"}]}
    items = read_examples(_write(tmp_path, row, longer), tokenizer).items
    assert [_learnt(tokenizer, item) for item in items] == ["!ll<|im_end|>", "!I say ll now<|im_end|>"]


def test_a_turn_that_holds_another_message_is_refused(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ ' (' ~ messages[0].content ~ ')' if m.role == 'assistant' }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    row = {"messages": [{"role": "system", "content": "Be kind."}, *CHAT["messages"]]}
    with pytest.raises(InvalidRequestError, match="cannot be told from its neighbours'"):
        read_examples(_write(tmp_path, row), _tokenizer(template))


def test_reasoning_that_the_template_leaves_out_is_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    answer = {"role": "assistant", "content": "4", "reasoning_content": "Two and two."}
    dataset = read_examples(_write(tmp_path, {"messages": [*CHAT["messages"][:1], answer]}), tokenizer)
    assert dataset.lost_reasoning == 1
    assert "leaves out the reasoning of 1 turns" in dataset.summary()


def test_variables_reach_the_chat_template(tmp_path: Path) -> None:
    template = CHATML.replace("assistant\n{%", "assistant\n{{ opener }}{%").replace(
        "\n{{ m['content'] }}", "\n{{ opener if m['role'] == 'assistant' }}{{ m['content'] }}"
    )
    tokenizer = _tokenizer(template)
    options = DataOptions(template_kwargs={"opener": "<think></think>"})
    item = read_examples(_write(tmp_path, CHAT), tokenizer, options).items[0]
    assert _learnt(tokenizer, item) == "hello<|im_end|>"


@pytest.mark.parametrize("bad", [{"max_tokens": 1}, {"supervise": "none"}, {"overlong": "left"}, {"bad_rows": ""}])
def test_an_option_that_is_none_of_the_choices_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        DataOptions(**bad)
    assert caught.value.param == next(iter(bad))


def test_of_several_turns_the_last_is_learnt_where_that_is_asked_and_in_preferences(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    turns = [*CHAT["messages"], {"role": "user", "content": "and"}]
    last = [*turns, {"role": "assistant", "content": "bye"}]
    path = _write(tmp_path, {"messages": last})
    every = read_examples(path, tokenizer).items[0]
    assert _learnt(tokenizer, every) == "hello<|im_end|>bye<|im_end|>"
    one = read_examples(path, tokenizer, DataOptions(supervise="last")).items[0]
    assert _learnt(tokenizer, one) == "bye<|im_end|>"
    other = [*turns, {"role": "assistant", "content": "no"}]
    pair = read_examples(_write(tmp_path, {"chosen": last, "rejected": other}), tokenizer).items[0]
    assert isinstance(pair, Pair)
    assert [_learnt(tokenizer, side) for side in (pair.chosen, pair.rejected)] == ["bye<|im_end|>", "no<|im_end|>"]
    judged = read_examples(_write(tmp_path, {"completion": last, "label": True}), tokenizer).items[0]
    assert isinstance(judged, Judged)
    assert _learnt(tokenizer, judged.example) == "bye<|im_end|>"


def test_a_closing_token_that_the_tokenizer_adds_is_learnt_once(tmp_path: Path) -> None:
    backend = build_tokenizer()
    closing = ("<|im_end|>", backend.token_to_id("<|im_end|>"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {closing[0]}", special_tokens=[closing]
    )
    own = Tokenizer.from_parts(tokenizer_json=json.loads(backend.to_str()), eos_token=closing[0])
    item = read_examples(_write(tmp_path, {"text": "the fox"}), own).items[0]
    assert isinstance(item, Example)
    assert item.token_ids[-1] == closing[1] != item.token_ids[-2]
    assert item.supervised == (False, *[True] * (len(item.token_ids) - 1))
