"""A model that says what it is told to: one text after a user's message, another after a tool's result.

The engine, the template and the parsers are the real ones; the weights make each token follow from the one before. A
whole text is one entry of the vocabulary. With it a client can be led through a loop of tool calls.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from tokenizers import AddedToken

from tests import tiny

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n"
    "Call one as <tool_call>\n{\"name\": ..., \"arguments\": ...}\n</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}{% if messages[-1]['role'] == 'tool' %}<|after_tool|>"
    "{% else %}<|after_user|>{% endif %}{% endif %}"
)  # fmt: skip
HIDDEN = 64
SURE = 50.0


def call(name: str, arguments: Mapping[str, object]) -> str:
    """A tool call as text."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': dict(arguments)})}\n</tool_call>"


def write_folder(folder: Path, *, after_user: str, after_tool: str, context: int = 65536) -> Path:
    """Write the model into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_special_tokens(["<|after_user|>", "<|after_tool|>"])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in {after_user, after_tool}])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text in ("<|after_user|>", "<|after_tool|>", after_user, after_tool)}
    follows = {ids["<|after_user|>"]: ids[after_user], ids["<|after_tool|>"]: ids[after_tool]}
    cfg = tiny.config(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=context,
    )
    model = tiny.build_model(cfg)
    model.update(tree_map(lambda w: mx.zeros_like(w) if w.ndim > 1 else w, model.parameters()))
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    # Dimension 0 is every token's, 1 and on belong to those that something follows; the end follows the others.
    embedding, head = mx.zeros((cfg["vocab_size"], HIDDEN)), mx.zeros((cfg["vocab_size"], HIDDEN))  # pyright: ignore[reportArgumentType]
    embedding[:, 0] = 1.0
    head[2, 0] = SURE
    for dimension, (token, reply) in enumerate(follows.items(), start=1):
        embedding[token, dimension] = 1.0
        head[reply, dimension] = 2 * SURE
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = embedding, head
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(cfg))
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
