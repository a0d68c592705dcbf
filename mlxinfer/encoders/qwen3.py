"""Qwen3's embedding models and rerankers: how their texts are framed, as their model cards say.

They are decoders whose files don't always tell: conversions leave modules.json and the tokenizer's last step out.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mlxinfer.encoders.texts import Framing
from mlxinfer.errors import ModelFileError

if TYPE_CHECKING:
    from mlxinfer.encoders.kinds import EncoderKind
    from mlxinfer.encoders.modules import Recipe
    from mlxinfer.tokenizer import Tokenizer

END = "<|endoftext|>"
"""What an embedded text ends with; its hidden state is the embedding."""
TASK = "Given a web search query, retrieve relevant passages that answer the query"
PROMPTS = {"query": f"Instruct: {TASK}\nQuery:", "document": ""}
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def framing(tokenizer: Tokenizer, kind: EncoderKind, where: str) -> Framing:
    """What the published code puts around a text. Raises ModelFileError for a vocabulary that lacks it."""
    if kind == "embedding":
        end = tokenizer.encode(END, add_special_tokens=False)
        if len(end) != 1:
            raise ModelFileError(f"{where}: the tokenizer has no {END}, which ends every text of this model")
        return Framing(after=tuple(end))
    before, after = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (BEFORE, AFTER))
    return Framing(before, after)


def yes_and_no(tokenizer: Tokenizer, where: str) -> tuple[int, int]:
    """The ids of a reranker's two answers."""
    yes, no = (tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no"))
    if len(yes) != 1 or len(no) != 1:
        raise ModelFileError(f'{where}: "yes" and "no" must be one token each in a reranker\'s vocabulary')
    return yes[0], no[0]


def completed(recipe: Recipe, *, has_modules: bool) -> Recipe:
    """The recipe of the model card where the files have none."""
    prompts = recipe.prompts or PROMPTS
    if has_modules:
        return dataclasses.replace(recipe, prompts=prompts)
    return dataclasses.replace(recipe, pooling=("lasttoken",), steps=("normalize",), prompts=prompts)


def pair_text(query: str, document: str) -> str:
    """What a reranker reads of a pair."""
    return f"<Instruct>: {TASK}\n<Query>: {query}\n<Document>: {document}"
