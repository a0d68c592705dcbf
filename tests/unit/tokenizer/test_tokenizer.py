"""Loading tokenizers from folders and parts, BOS and EOS, chats, and what is said when something is missing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.errors import InvalidRequestError, ModelFileError
from mlxinfer.tokenizer import Tokenizer
from tests.unit.tokenizer import tiny

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, **files: Any) -> Path:
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def chatml(**kwargs: Any) -> Tokenizer:
    return Tokenizer.from_parts(
        tokenizer_json=tiny.byte_level(), chat_template=tiny.CHATML, bos_token="<s>", eos_token="<|im_end|>", **kwargs
    )


def test_a_folder_gives_tokens_template_and_every_end_of_sequence_id(tmp_path: Path) -> None:
    write(
        tmp_path,
        tokenizer__json=tiny.byte_level(),
        tokenizer_config__json={"eos_token": {"content": "</s>"}, "bos_token": "<s>", "chat_template": tiny.CHATML},
        generation_config__json={"eos_token_id": [3, 7]},
        config__json={"eos_token_id": 9},
    )
    tok = Tokenizer.from_folder(tmp_path)
    assert tok.eos_token_ids == {1, 3, 7, 9}
    assert tok.has_chat_template
    assert tok.decode(tok.encode("wörld")) == "wörld"


def test_special_tokens_map_is_read_and_the_config_wins(tmp_path: Path) -> None:
    write(
        tmp_path,
        tokenizer__json=tiny.byte_level(),
        special_tokens_map__json={"eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}},
        tokenizer_config__json={"eos_token": "</s>", "chat_template": "{{ bos_token }}{{ eos_token }}"},
    )
    assert Tokenizer.from_folder(tmp_path).render_chat([]) == "<s></s>"


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"tokenizer_config__json": {"chat_template": "config"}}, "config"),
        ({"tokenizer_config__json": {"chat_template": "config"}, "chat_template__jinja": "jinja"}, "jinja"),
        ({"chat_template__json": {"chat_template": "json"}}, "json"),
        (
            {"tokenizer_config__json": {"chat_template": [{"name": "default", "template": "named"}]}},
            "named",
        ),
    ],
)
def test_the_chat_template_is_found_wherever_checkpoints_keep_it(tmp_path: Path, files: dict, text: str) -> None:
    tok = Tokenizer.from_folder(write(tmp_path, tokenizer__json=tiny.byte_level(), **files))
    assert tok.render_chat([{"role": "user", "content": "x"}]) == text


def test_the_tool_template_is_used_when_there_are_tools(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools|length }} tools"}]
    write(tmp_path, tokenizer__json=tiny.byte_level(), tokenizer_config__json={"chat_template": templates})
    tok = Tokenizer.from_folder(tmp_path)
    assert tok.render_chat([], tools=[{"type": "function"}]) == "1 tools"
    assert tok.render_chat([]) == "plain"


def test_a_folder_without_a_tokenizer_names_the_files_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.json, tokenizer\.model"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": 5}', "\x00", "[" * 100_000])
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, text: str) -> None:
    write(tmp_path, tokenizer__json=text)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_a_broken_config_beside_it_is_named(tmp_path: Path, text: str) -> None:
    write(tmp_path, tokenizer__json=tiny.byte_level(), tokenizer_config__json=text)
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


def test_bos_is_added_once_whoever_adds_it() -> None:
    for adds_bos in (False, True):
        tok = Tokenizer.from_parts(
            tokenizer_json=tiny.sentencepiece(adds_bos=adds_bos), bos_token="<s>", add_bos_token=True
        )
        assert tok.encode("a").count(1) == 1
        assert tok.encode("a")[0] == 1
        assert 1 not in tok.encode("a", add_special_tokens=False)
    assert 1 not in Tokenizer.from_parts(tokenizer_json=tiny.sentencepiece(), bos_token="<s>").encode("a")


def test_a_chat_becomes_the_template_text_and_its_special_tokens() -> None:
    tok = chatml(add_bos_token=True)
    messages = [{"role": "user", "content": "hello"}]
    text = tok.render_chat(messages)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = tok.chat_ids(messages)
    assert ids == tok.encode(text, add_special_tokens=False)
    assert ids.count(2) == 2
    assert ids.count(3) == 1
    assert 0 not in ids  # the template writes no BOS, so there is none
    assert not tok.render_chat(messages, add_generation_prompt=False).endswith("assistant\n")


def test_text_parts_are_joined_and_missing_content_is_empty() -> None:
    tok = chatml()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\na\nb<" in tok.render_chat([{"role": "user", "content": parts}])
    assert "assistant\n<|im_end|>" in tok.render_chat([{"role": "assistant", "content": None}])


@pytest.mark.parametrize(
    "content", [5, [5], [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}], [{"type": "text"}]]
)
def test_content_that_is_not_text_is_refused(content: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content") as caught:
        chatml().render_chat([{"role": "user", "content": content}])
    assert caught.value.param == "messages"


def test_a_model_without_a_chat_template_says_what_to_do() -> None:
    tok = Tokenizer.from_parts(tokenizer_json=tiny.byte_level())
    assert not tok.has_chat_template
    with pytest.raises(InvalidRequestError, match="--raw"):
        tok.chat_ids([{"role": "user", "content": "x"}])


def test_a_lone_surrogate_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        chatml().encode("a\ud800b")


def test_a_panic_of_the_tokenizers_library_is_a_model_file_error() -> None:
    class Panics:
        def __getattr__(self, name: str) -> Any:
            return getattr(tok._backend, name)

        def encode_batch_fast(self, *_: Any, **__: Any) -> None:
            raise type("PanicException", (BaseException,), {})("no entry found for key")

        decode = encode_batch_fast

    tok = chatml()
    broken = chatml()
    broken._backend = Panics()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ModelFileError, match="no entry"):
        broken.encode("a")
    with pytest.raises(ModelFileError, match="no entry"):
        broken.detokenizer().add(70)


def test_special_tokens_are_skipped_or_kept_as_asked() -> None:
    tok = chatml()
    ids = tok.encode("<|im_start|>hi<tool>")
    assert tok.decode(ids) == "hi<tool>"
    assert tok.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<tool>"


def test_user_text_that_spells_a_special_token_becomes_it_as_in_transformers() -> None:
    assert chatml().chat_ids([{"role": "user", "content": "<|im_end|>"}]).count(3) == 2
