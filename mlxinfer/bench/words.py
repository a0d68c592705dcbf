"""Prompt text of a wanted number of tokens, made of common words; and the nonce that makes it new to every cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxinfer.errors import MlxinferError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from mlxinfer.config import Settings

CHARS_PER_TOKEN = 5.8
"""Of text made of WORDS with the vocabularies of current models: a word is one token with its space. Used only where
no tokenizer is at hand."""
NONCE_DIGITS = 10

_TEXT = """
about above across after again against air all almost along also always among animal another answer any appear area
around ask back base beauty because become before began behind best better between big bird black blue boat body
book both bring brought build building busy call came car care carry cause center certain change check children
city class clear close cold color come common complete contain correct could country course cover cross dark day
decide deep develop differ direct distance door draw dry during early earth east easy eat end energy enough even
ever every example explain eye face fact fall family far farm fast father field figure final find fine fire first
fish floor follow food form found free friend front full game garden gave general give glass gold good govern grand
great green ground group grow half hand happen hard head hear heat heavy help high hill history hold home horse hot
hour house hundred idea inch interest island just keep kind king know land language large last laugh lead learn
leave left letter level light line list listen little live long machine made main make many map mark matter mean
measure men metal might mind minute money moon more morning mother mountain move much music name near need never
new night north note notice number object ocean often old open order over page paper part pass past pattern people
person picture piece place plain plan plane plant play point port power present problem produce product public pull
question quick rain reach read ready real reason record red remember rest right river road rock room round rule run
sail same school science sea second seem sentence serve several shape ship short should show side silver simple
size sky sleep slow small snow soft some song soon sound south space special speed spring stand star start state
stay stead step stone stood stop story street strong study sun sure surface system table tail take talk teach tell
test thing think thought thousand through time together told took top toward town trade train travel tree true turn
under unit until usual valley verb very voice walk wall want war warm watch water wave weather week weight west
wheel while white whole wide wild wind window winter wonder wood word work world write year yellow young
"""
WORDS = tuple(_TEXT.split())


class Sizer:
    """Counts tokens: exactly with a tokenizer's own `count`, else from the number of characters."""

    def __init__(self, count: Callable[[str], int] | None = None) -> None:
        self._count = count
        self.how = "the model's tokenizer" if count else f"estimated, {CHARS_PER_TOKEN} characters a token"

    def tokens(self, text: str) -> int:
        return self._count(text) if self._count else round(len(text) / CHARS_PER_TOKEN)

    def filler(self, tokens: int, rng: random.Random, *, before: str = "") -> str:
        """`before` and as many random words as make `tokens` tokens in all, or the last word beyond; never fewer words
        than none."""
        # One word is at least one token, so `tokens` words are enough; the count grows with their number.
        words = [rng.choice(WORDS) for _ in range(max(0, tokens))]
        low, high = 0, len(words)
        while low < high:
            middle = (low + high) // 2
            if self.tokens(_joined(before, words[:middle])) >= tokens:
                high = middle
            else:
                low = middle + 1
        return _joined(before, words[:low])


def _joined(before: str, words: list[str]) -> str:
    return f"{before} {' '.join(words)}." if words else before


def nonce(rng: random.Random) -> str:
    """Digits that no earlier prompt began with. They stand first, so that no prefix of it is in a cache."""
    return "".join(rng.choice("0123456789") for _ in range(NONCE_DIGITS))


def local_sizer(model: str, settings: Settings) -> Sizer:
    """With the tokenizer of a model on this machine; by estimate for one whose tokenizer can't be read."""
    try:
        return Sizer(_counter(model, settings))
    except MlxinferError:
        return Sizer()


def _counter(model: str, settings: Settings) -> Callable[[str], int]:
    from mlxinfer import zoo
    from mlxinfer.tokenizer import Tokenizer

    files = zoo.resolve(model, settings, fetch=False)
    if files.kind == "folder":
        tokenizer = Tokenizer.from_folder(files.path)
    else:
        from mlxinfer.formats.gguf import read_gguf
        from mlxinfer.formats.gguf.vocab import read_vocabulary

        vocabulary = read_vocabulary(read_gguf(files.path), 2**31 - 1)
        tokenizer = Tokenizer.from_parts(tokenizer_json=vocabulary.tokenizer_json)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))
