"""Text to token ids and back, chat templates, and the incremental detokenizer. Knows no arrays."""

from mlxinfer.tokenizer.text import Detokenizer, StopMatcher
from mlxinfer.tokenizer.tokenizer import Tokenizer
from mlxinfer.tokenizer.turns import message_starts, turn_tokens

__all__ = ["Detokenizer", "StopMatcher", "Tokenizer", "message_starts", "turn_tokens"]
