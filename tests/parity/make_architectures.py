"""Make tests/fixtures/architectures.npz: what llama.cpp answers to a tiny random model of each architecture.

Two steps, since llama.cpp's package doesn't belong into this project's environment (see make_goldens.py):

    python -m tests.parity.make_architectures FOLDER
    PYTHONPATH=. /tmp/reference/bin/python tests/parity/make_architectures.py FOLDER tests/fixtures/architectures.npz

The first writes the GGUF files. The second asks for the probabilities after the first tokens of PROMPT, LENGTHS of
them, and keeps the logarithms for every STRIDE-th token; without numpy there it writes JSON beside the files, and
running the first step again packs it. Names after FOLDER restrict both to some architectures.
"""

from __future__ import annotations

import json
import math
import sys
import urllib.request
from pathlib import Path

PROMPT = [1, 40, 7, 99, 263, 12, 8, 8, 150, 201, 33, 64, 90, 17, 2, 250]
LENGTHS = (4, 9, 16)
STRIDE = 4
VOCABULARY = 272
LETTER_A = 100
FIXTURE = Path(__file__).parent.parent / "fixtures" / "architectures.npz"


def file_name(case: str) -> str:
    return case.replace("/", "-")


def write_files(folder: Path, only: list[str]) -> None:
    """Run by this project's Python: the GGUF files, and the fixture where llama.cpp's answers lie beside them."""
    import numpy as np

    from tests.unit.formats.gguf_writer import CASES, blueprint, build

    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, np.ndarray] = {}
    for name, case in CASES.items():
        if (only and name not in only) or not case.llama_cpp:
            continue
        blueprint(case, build(case)).write(folder / f"{file_name(name)}.gguf")
        answers = folder / f"{file_name(name)}.json"
        if answers.is_file():
            values = np.array(json.loads(answers.read_text()), dtype=np.float32)
            rows[name] = values[:, ::STRIDE]
    if len(rows) == sum(case.llama_cpp for case in CASES.values()):
        np.savez_compressed(FIXTURE, **rows)


def ask(path: Path) -> list[list[float]]:
    """Logarithms of the probabilities of all tokens, by llama.cpp in float32, after each of LENGTHS."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 512
    params.warmup = False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    answers = []
    for length in LENGTHS:
        body = {"prompt": PROMPT[:length], "n_predict": 1, "n_probs": VOCABULARY, "temperature": 0.0}
        # Probabilities are those before the bias; half a character would be answered without any.
        body["logit_bias"] = [[LETTER_A, 1000.0]]
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            first = json.load(answer)["completion_probabilities"][0]
        found = {row["id"]: row["logprob"] for row in first["top_logprobs"]}
        answers.append([found.get(i, -math.inf) for i in range(VOCABULARY)])
    return answers


def ask_all(folder: Path, only: list[str]) -> None:
    for path in sorted(folder.glob("*.gguf")):
        if not only or path.stem in {file_name(name) for name in only}:
            path.with_suffix(".json").write_text(json.dumps(ask(path)))


if __name__ == "__main__":
    try:
        import xllamacpp  # noqa: F401
    except ImportError:
        write_files(Path(sys.argv[1]), sys.argv[2:])
    else:
        ask_all(Path(sys.argv[1]), sys.argv[2:])
