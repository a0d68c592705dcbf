"""tokenizer.json as tokenizer.ggml.*: read back by our own reader, refused where llama.cpp would split otherwise."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers

from mlxinfer.convert.export.gguf import export_gguf
from mlxinfer.convert.export.gguf_tokenizer import Vocabulary, read_vocabulary
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.gguf import read_gguf
from mlxinfer.formats.gguf.merges import merges_from_scores
from mlxinfer.formats.gguf.pretokenizers import GPT2, PRE_TOKENIZERS, pre_tokenizer_json
from mlxinfer.formats.gguf.vocab import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from mlxinfer.formats.gguf.vocab import read_vocabulary as read_back
from tests import tiny
from tests.unit.convert.export import models

if TYPE_CHECKING:
    from pathlib import Path

PIECES = [
    "Hello",
    " world",
    "  ",
    "\n",
    "\t",
    "1234",
    "don't",
    "é",
    "你好",
    " 😀",
    "<|im_start|>",
    "the",
    " quick",
    "_",
]
TO_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def texts(count: int = 100) -> list[str]:
    rng = random.Random(3)
    return ["".join(rng.choice(PIECES) for _ in range(rng.randint(1, 9))) for _ in range(count)]


def byte_level(**changes: Any) -> dict[str, Any]:
    parsed = json.loads(tiny.build_tokenizer().to_str())
    parsed["model"] |= changes.pop("model", {})
    return parsed | changes


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """Bytes, letters, and what a few scores join; "▁the" comes about in two ways."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁thequickbrownfxjmpsvlazydg"]
    tokens = list(dict.fromkeys([*tokens, "th", "the", "▁th", "▁the", "qu", "▁qu", "ick", "ck", "▁quick"]))
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259)
    scores = [float(-i) for i in range(len(tokens))]
    ids = {text: i for i, text in enumerate(tokens)}
    model = {
        "type": "BPE",
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": True,
        "vocab": ids,
        "merges": [list(pair) for pair in merges_from_scores(ids, types, scores, "")],
    }
    added = [
        {"id": i, "content": tokens[i], "special": True, "normalized": False, "lstrip": False, "rstrip": False,
         "single_word": False}
        for i in range(3)
    ]  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": TO_MARK,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": model | changes.pop("model", {}),
    } | changes


def vocabulary(folder: Path, parsed: dict[str, Any], *, rows: int = 320, **files: dict[str, Any]) -> Vocabulary:
    (folder / "tokenizer.json").write_text(json.dumps(parsed))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_vocabulary(folder, rows, {"eos_token_id": 2})


def plain(found: Vocabulary, key: str) -> Any:
    return found.metadata[f"tokenizer.ggml.{key}"].value


def test_a_tokenizer_that_went_there_and_back_gives_the_same_ids(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    export_gguf(source, tmp_path / "m.gguf")
    back = tokenizers.Tokenizer.from_str(json.dumps(read_back(read_gguf(tmp_path / "m.gguf"), 320).tokenizer_json))
    own = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    for text in texts():
        assert back.encode(text).ids == own.encode(text).ids


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_each_known_way_of_splitting_gets_a_name_that_means_it(tmp_path: Path, name: str) -> None:
    kind = PRE_TOKENIZERS[name]
    parsed = byte_level(
        pre_tokenizer=pre_tokenizer_json(kind),
        normalizer={"type": "NFC"} if kind.nfc else None,
        model={"ignore_merges": kind.ignore_merges},
    )
    found = vocabulary(tmp_path, parsed)
    chosen = PRE_TOKENIZERS[plain(found, "pre")]
    assert (chosen.patterns, chosen.ignore_merges, chosen.nfc) == (kind.patterns, kind.ignore_merges, kind.nfc)
    assert any("NFC" in note for note in found.notes) == kind.nfc


def test_published_spellings_of_the_same_steps_are_known(tmp_path: Path) -> None:
    byte = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    assert plain(vocabulary(tmp_path, byte_level(pre_tokenizer=byte)), "pre") == "gpt-2"
    steps = {"type": "Sequence", "pretokenizers": [digits, byte]}
    assert plain(vocabulary(tmp_path, byte_level(pre_tokenizer=steps)), "pre") == "smollm"


SPLIT = {"type": "Split", "pattern": {"Regex": GPT2 + "|x"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT]}}, "pre_tokenizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "pre_tokenizer"),
        ({"pre_tokenizer": None}, "pre_tokenizer"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer"),
        ({"model": {"type": "WordPiece"}}, "model"),
        ({"model": {"end_of_word_suffix": "</w>"}}, r"model\.end_of_word_suffix"),
        ({"post_processor": {"type": "BertProcessing"}}, "post_processor"),
    ],
)
def test_a_step_that_llama_cpp_is_not_known_to_have_is_refused(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"tokenizer\.json: {field} is .*llama\.cpp has no tokenizer"):
        vocabulary(tmp_path, byte_level(**changes))


def test_taking_words_whole_is_let_pass_only_where_merges_make_every_token(tmp_path: Path) -> None:
    parsed = byte_level(pre_tokenizer=pre_tokenizer_json(PRE_TOKENIZERS["gpt-4o"]), model={"ignore_merges": True})
    assert plain(vocabulary(tmp_path, parsed), "pre") == "gpt-4o"
    parsed["model"]["vocab"]["zzqqy"] = 319
    with pytest.raises(UnsupportedModelError, match="pre_tokenizer is"):
        vocabulary(tmp_path, parsed)


@pytest.mark.parametrize("prefix", [False, True])
def test_a_sentencepiece_vocabulary_gets_scores_that_give_its_merges(tmp_path: Path, prefix: bool) -> None:
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, TO_MARK]}
    parsed = sentencepiece(**({"normalizer": normalizer} if prefix else {}))
    found = vocabulary(tmp_path, parsed)
    assert plain(found, "model") == "llama"
    assert plain(found, "add_space_prefix") is prefix
    assert plain(found, "unknown_token_id") == 0
    assert plain(found, "token_type")[:4] == [UNKNOWN, CONTROL, CONTROL, BYTE]
    ids = {text: i for i, text in enumerate(plain(found, "tokens"))}
    again = merges_from_scores(ids, plain(found, "token_type"), plain(found, "scores"), "")
    assert [list(pair) for pair in again] == parsed["model"]["merges"]


def test_metaspace_says_whether_a_space_is_put_in_front(tmp_path: Path) -> None:
    step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    assert plain(vocabulary(tmp_path, sentencepiece(normalizer=None, pre_tokenizer=step)), "add_space_prefix") is True
    step["prepend_scheme"] = "never"
    assert plain(vocabulary(tmp_path, sentencepiece(normalizer=None, pre_tokenizer=step)), "add_space_prefix") is False


@pytest.mark.parametrize("change", ["one is missing", "two results take turns"])
def test_merges_that_no_scores_give_are_refused(tmp_path: Path, change: str) -> None:
    merges = sentencepiece()["model"]["merges"]
    double = next(i for i in range(len(merges) - 1) if "".join(merges[i]) == "".join(merges[i + 1]))
    if change == "one is missing":
        merges = merges[:double] + merges[double + 1 :]
    else:
        merges = [*merges[:double], *merges[double + 1 :], merges[double]]
    with pytest.raises(UnsupportedModelError, match=r"model\.merges is"):
        vocabulary(tmp_path, sentencepiece(model={"merges": merges}))


def test_rows_without_a_token_are_filled_up(tmp_path: Path) -> None:
    found = vocabulary(tmp_path, byte_level(), rows=322)
    assert len(plain(found, "tokens")) == 322
    assert plain(found, "tokens")[-1] == "[PAD321]"
    assert plain(found, "token_type")[-1] == UNUSED
    assert plain(found, "token_type")[:3] == [CONTROL] * 3


def test_added_tokens_that_are_not_special_are_user_defined(tmp_path: Path) -> None:
    parsed = byte_level()
    parsed["added_tokens"].append({"id": 319, "content": "<tool>", "special": False})
    parsed["model"]["vocab"] = {t: i for t, i in parsed["model"]["vocab"].items() if i < 319}
    found = vocabulary(tmp_path, parsed)
    assert (plain(found, "tokens")[319], plain(found, "token_type")[319]) == ("<tool>", USER_DEFINED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"vocab": {"a": 320}}}, r"the token 'a' has the id 320; the embedding has 320 rows"),
        ({"model": {"vocab": {"a": -1}}}, r"has the id -1"),
        ({"model": {"vocab": {"a": "b"}}}, r"has the id 'b'"),
        ({"model": {"vocab": []}}, r"model\.vocab"),
        ({"model": {"merges": None}}, r"model\.merges is missing"),
        ({"model": {"merges": [["Q", "Q"]]}}, r"makes no token"),
        ({"model": {"merges": [7]}}, r"makes no token"),
        ({"added_tokens": [{"id": 1, "content": "a"}]}, r"two ids stand for 'a'"),
        ({"added_tokens": ["a"]}, r"added_tokens holds 'a'"),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_an_error(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        vocabulary(tmp_path, byte_level(**changes))


def template(*parts: str) -> dict[str, Any]:
    single = [{"SpecialToken": {"id": p}} if p != "A" else {"Sequence": {"id": "A"}} for p in parts]
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}


NAMED = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}}


@pytest.mark.parametrize(
    ("parts", "before", "after"),
    [(("A",), False, False), (("<|endoftext|>", "A"), True, False), (("A", "<|im_end|>"), False, True)],
)
def test_tokens_put_around_a_text_are_kept(tmp_path: Path, parts: tuple[str, ...], before: bool, after: bool) -> None:
    found = vocabulary(tmp_path, byte_level(post_processor=template(*parts)), tokenizer_config=NAMED)
    assert (plain(found, "bos_token_id"), plain(found, "eos_token_id")) == (0, 2)
    assert (plain(found, "add_bos_token"), plain(found, "add_eos_token")) == (before, after)


def test_another_token_put_before_a_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="post_processor"):
        vocabulary(tmp_path, byte_level(post_processor=template("<|im_start|>", "A")), tokenizer_config=NAMED)


def test_the_second_end_of_generation_becomes_the_end_of_turn(tmp_path: Path) -> None:
    generation = {"eos_token_id": [2, 1]}
    found = vocabulary(tmp_path, byte_level(), tokenizer_config=NAMED, generation_config=generation)
    assert (plain(found, "eos_token_id"), plain(found, "eot_token_id")) == (2, 1)


def test_of_several_chat_templates_the_default_is_kept_and_said_so(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    found = vocabulary(tmp_path, byte_level(), tokenizer_config={"chat_template": named})
    assert found.metadata["tokenizer.chat_template"].value == "D"
    assert found.notes == ("of 2 chat templates the default one is kept",)


@pytest.mark.parametrize(("folder", "written"), [("phi3-tuned", "model"), ("tuned", "tuned")])
def test_a_name_that_would_make_llama_cpp_take_phi_3s_tokenizer_is_not_written(
    tmp_path: Path, folder: str, written: str
) -> None:
    source = models.write(tmp_path / folder, "phi3")
    export_gguf(source, tmp_path / "m.gguf")
    assert read_gguf(tmp_path / "m.gguf").metadata["general.name"] == written


def test_phi_3s_tokenizer_is_known_by_the_name(tmp_path: Path) -> None:
    source = models.write(tmp_path / "tuned", "phi3")
    parsed = json.loads((source / "tokenizer.json").read_text())
    special = {"special": True, "normalized": False, "lstrip": False, "rstrip": True, "single_word": False}
    parsed["added_tokens"] += [{"id": 318, "content": "<unk>", **special}, {"id": 319, "content": "<s>", **special}]
    parsed["model"]["vocab"] = {t: i for t, i in parsed["model"]["vocab"].items() if i < 318}
    parsed["model"]["merges"] = [m for m in parsed["model"]["merges"] if "".join(m) in parsed["model"]["vocab"]]
    (source / "tokenizer.json").write_text(json.dumps(parsed))
    export_gguf(source, tmp_path / "m.gguf")
    assert read_gguf(tmp_path / "m.gguf").metadata["general.name"] == "phi-3 tuned"


def test_a_folder_without_a_tokenizer_json_is_refused(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    (source / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModelError, match=r"has no tokenizer\.json"):
        export_gguf(source, tmp_path / "m.gguf")
