"""Make tests/fixtures/fuzz_tokens.npz: what llama.cpp's tokenizer makes of the strings of tests/parity/fuzz.py.

Two steps, since llama.cpp's package doesn't belong into this project's environment (see make_goldens.py):

    python -m tests.parity.make_fuzz FOLDER
    PYTHONPATH=. /tmp/reference/bin/python tests/parity/make_fuzz.py FOLDER
    python -m tests.parity.make_fuzz FOLDER

The first writes a GGUF file for each pre-tokenizer, the second asks llama.cpp for ids, the third packs their checksums
and prints where this project differs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FIXTURE = Path(__file__).parent.parent / "fixtures" / "fuzz_tokens.npz"


def write_files(folder: Path, names: list[str]) -> None:
    from mlxinfer.formats.gguf.pretokenizers import PRE_TOKENIZERS
    from tests.parity.fuzz import strings, vocabulary
    from tests.unit.formats.gguf_files import auto, tiny_model

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "strings.json").write_text(json.dumps(strings()))
    for name in names or sorted(PRE_TOKENIZERS):
        values = vocabulary(name)
        plan = tiny_model("llama", rows=len(values["tokenizer.ggml.tokens"]))
        plan.metadata = [(k, v) for k, v in plan.metadata if not k.startswith("tokenizer.")]
        for key, value in values.items():
            plan.set(key, auto(value))
        plan.write(folder / f"{name}.gguf")


def pack(folder: Path) -> None:
    """The answers as checksums, one row for each group of names that agree; differences are printed."""
    import numpy as np

    from mlxinfer.formats.gguf.pretokenizers import PRE_TOKENIZERS
    from tests.parity.fuzz import checksum, strings
    from tests.parity.test_tokenizers import ids_of

    arrays: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.ids")):
        answers = json.loads(path.read_text())
        arrays[path.stem] = np.array([checksum(ids) for ids in answers["ids"]], dtype=np.uint16)
        kind = PRE_TOKENIZERS.get(path.stem)
        if kind is None:
            print(path.stem, "is not known")
            continue
        ours = ids_of(path.stem)
        wrong = [(text, a, b) for text, a, b in zip(strings(), ours, answers["ids"], strict=True) if a != b]
        bos = answers["bos"] == kind.add_bos
        print(path.stem, len(wrong), "wrong", "" if bos else f"BOS {answers['bos']}", *map(repr, wrong[:2]))
    rows = sorted({row.tobytes() for row in arrays.values()})
    which = {name: rows.index(row.tobytes()) for name, row in arrays.items()}
    table = np.array([np.frombuffer(row, dtype=np.uint16) for row in rows])
    np.savez_compressed(FIXTURE, checksums=table, names=np.array(list(which)), rows=np.array(list(which.values())))


def ask_all(folder: Path, names: list[str]) -> None:
    from tests.parity.llamacpp import tokenizer_of

    texts = json.loads((folder / "strings.json").read_text())
    for path in sorted(folder.glob("*.gguf")):
        if names and path.stem not in names:
            continue
        try:
            tokenize = tokenizer_of(path)
        except RuntimeError:
            print(path.stem, "is not loaded by llama.cpp")
            continue
        answer = {"ids": [tokenize(text, False) for text in texts], "bos": tokenize("a", True)[0] == 1}
        path.with_suffix(".ids").write_text(json.dumps(answer))


if __name__ == "__main__":
    where, only = Path(sys.argv[1]), sys.argv[2:]
    try:
        import xllamacpp  # noqa: F401
    except ImportError:
        write_files(where, only)
        pack(where)
    else:
        ask_all(where, only)
