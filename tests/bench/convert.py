"""Memory and time of `mlxinfer convert`, also with the search for scales, against mlx_lm.convert: interleaved.

python -m tests.bench.convert --layers 6 --rounds 3
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.tiny import CHATML, build_tokenizer

PACKINGS = {"float": None, "4bit": (4, 64)}


def generate(folder: Path, layers: int) -> None:
    """A llama in bfloat16 as on the hub, about 90 MB a layer and 262 MB of embeddings."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    build_tokenizer().save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    shapes = {"model.embed_tokens": (32000, 2048), "lm_head": (32000, 2048)}
    for layer in range(layers):
        p = f"model.layers.{layer}"
        shapes |= {f"{p}.self_attn.{n}_proj": (2048 if n in "qo" else 512, 2048) for n in "qkvo"}
        shapes |= {f"{p}.mlp.{n}_proj": (5632, 2048) for n in ("gate", "up")}
        shapes |= {f"{p}.mlp.down_proj": (2048, 5632)}
    arrays = {f"{name}.weight": mx.random.normal(shape, mx.bfloat16) for name, shape in shapes.items()}
    norms = [
        "model.norm",
        *(f"model.layers.{i}.{n}_layernorm" for i in range(layers) for n in ("input", "post_attention")),
    ]
    arrays |= {f"{name}.weight": mx.ones((2048,), mx.bfloat16) for name in norms}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "pt"})


def ours(source: Path, out: Path, packing: tuple[int, int] | None) -> None:
    from mlxinfer.convert import ConvertOptions, Packing, convert, open_source

    convert(open_source(source), out, ConvertOptions(packing=Packing(*packing) if packing else None))


def searched(source: Path, out: Path, packing: tuple[int, int] | None) -> None:
    """As `ours` with --scales search."""
    from mlxinfer.convert import ConvertOptions, Packing, convert, open_source
    from mlxinfer.convert.search import recommended

    assert packing is not None
    convert(open_source(source), out, ConvertOptions(packing=Packing(*packing), quantizer=recommended))


def theirs(source: Path, out: Path, packing: tuple[int, int] | None) -> None:
    from mlx_lm.convert import convert

    bits, group = packing or (None, None)
    with contextlib.redirect_stdout(io.StringIO()):
        convert(str(source), str(out), quantize=packing is not None, q_bits=bits, q_group_size=group)


CONVERTERS = {"ours": ours, "searched": searched, "theirs": theirs}


def child(who: str, source: Path, out: Path, packing: str) -> None:
    """One conversion in this process; its figures as JSON. Imports and their memory come before."""
    import mlx_lm.convert  # noqa: F401

    import mlxinfer.convert  # noqa: F401

    base = resource.getrusage(resource.RUSAGE_SELF)
    mx.reset_peak_memory()
    began = time.monotonic()
    CONVERTERS[who](source, out, PACKINGS[packing])
    wall = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = used.ru_utime + used.ru_stime - base.ru_utime - base.ru_stime
    peak = mx.get_peak_memory()
    print(json.dumps({"peak_mb": peak / 1e6, "rss_mb": used.ru_maxrss * 1024 / 1e6, "cpu_s": cpu, "wall_s": wall}))


def measure(who: str, source: Path, folder: Path, packing: str) -> dict[str, float]:
    out = folder / who
    arguments = ["--child", who, "--source", str(source), "--out", str(out), "--packing", packing]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.convert", *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    shutil.rmtree(out)
    return json.loads(done.stdout.splitlines()[-1])


def compare(layers: int, rounds: int, packing: str) -> dict[str, Any]:
    """Medians of each, and their ratios to mlx_lm.convert's."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        # In a process of its own: a child counts the peak of the one it was forked from as its own.
        subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.bench.convert",
                "--generate",
                str(folder / "source"),
                "--layers",
                str(layers),
            ],
            check=True,
        )
        size = (folder / "source" / "model.safetensors").stat().st_size
        runs: dict[str, list[dict[str, float]]] = {
            who: [] for who in CONVERTERS if PACKINGS[packing] or who != "searched"
        }
        for _ in range(rounds):
            for who, found in runs.items():
                found.append(measure(who, folder / "source", folder, packing))
    medians = {
        who: {key: statistics.median(run[key] for run in found) for key in found[0]} for who, found in runs.items()
    }
    ratios = {
        who: {key: value / medians["theirs"][key] for key, value in figures.items()}
        for who, figures in medians.items()
        if who != "theirs"
    }
    return {"model_mb": size / 1e6, "packing": packing, **medians, "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--packing", choices=list(PACKINGS), default="4bit")
    parser.add_argument("--child", choices=list(CONVERTERS), help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.generate:
        generate(asked.generate, asked.layers)
        return
    if asked.child:
        child(asked.child, asked.source, asked.out, asked.packing)
        return
    print(json.dumps(compare(asked.layers, asked.rounds, asked.packing), indent=1))


if __name__ == "__main__":
    main()
