"""`python -m tests.fuzz.files [--files N] [--seed S]`: damaged model files through convert's readers and its planner.

Each file is a small sound GGUF or safetensors folder with one to four things wrong in it. It may still be read, or end
in an error of ours that names it; no other exception, no signal, nothing longer than ten seconds, no more than
ALLOWED_BYTES of address space beyond what the reader had before. Prints findings as JSON lines and a summary.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SLOW_S = 10.0
ALLOWED_BYTES = 512 << 20
EXTREMES = (0, 1, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1)
FORMATS = ("gptq", "awq", "fp8", "compressed-tensors", "modelopt", "mxfp4", "bitnet", "fbgemm_fp8", "x", 7, None)


def damaged(data: bytes, head: int, drawn: random.Random) -> bytes:
    """Bytes with one to four things wrong, most of them before `head`."""
    made = bytearray(data)
    for _ in range(drawn.choice((1, 1, 1, 2, 4))):
        end = min(len(made), head) if drawn.random() < 0.8 else len(made)
        at = drawn.randrange(max(1, end))
        kind = drawn.randrange(8)
        if kind == 0:
            del made[at:]
        elif kind == 1:
            del made[at : at + drawn.choice((1, 4, 8, 64))]
        elif kind == 2:
            made[at:at] = drawn.randbytes(drawn.choice((1, 4, 8, 64)))
        elif kind in (3, 4):
            width = drawn.choice((4, 8))
            made[at : at + width] = (drawn.choice(EXTREMES) % 2 ** (8 * width)).to_bytes(width, "little")
        elif kind == 5 and end > 64:
            other = drawn.randrange(end - 32)
            made[at : at + 32] = made[other : other + 32]
        else:
            made[at : at + 1] = bytes((drawn.randrange(256),))
    return bytes(made)


class Bases:
    """Sound files to damage."""

    def __init__(self, home: Path) -> None:
        from gguf.constants import GGMLQuantizationType as Kind

        from mlxinfer.convert import ConvertOptions, Packing, convert, open_source
        from tests import tiny
        from tests.unit.formats import gguf_files, gguf_writer

        kinds = (Kind.F32, Kind.F16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
        made = [gguf_files.tiny_model(a, k) for a, k in zip(("llama", "qwen2", "gemma3") * 3, kinds, strict=False)]
        experts = gguf_writer.CASES["qwen3moe"]
        made.append(gguf_writer.blueprint(experts, gguf_writer.build(experts), Kind.Q8_0))
        self.ggufs = [(blueprint.build(), len(blueprint.header())) for blueprint in made]
        floats = tiny.write_folder(home / "floats")
        source = open_source(floats)
        convert(source, home / "packed", ConvertOptions(packing=Packing(4, 32)))
        source.close()
        self.folders = [{p.name: p.read_bytes() for p in f.iterdir() if p.is_file()} for f in (floats, home / "packed")]

    def write(self, folder: Path, drawn: random.Random) -> Path:
        """A damaged model in `folder`, which is empty."""
        if drawn.random() < 0.6:
            data, head = drawn.choice(self.ggufs)
            path = folder / "m.gguf"
            path.write_bytes(damaged(data, head, drawn))
            return path
        files = dict(drawn.choice(self.folders))
        weights = next(name for name in files if name.endswith(".safetensors"))
        kind = drawn.randrange(4)
        if kind == 0:
            files["config.json"] = _config(files["config.json"], drawn)
        elif kind == 1:
            files[weights] = _header(files[weights], drawn)
        else:
            size = 8 + int.from_bytes(files[weights][:8], "little")
            files[weights] = damaged(files[weights], size, drawn)
        if drawn.random() < 0.1:
            name = drawn.choice(sorted(files))
            files[name] = damaged(files[name], len(files[name]), drawn)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return folder


def _config(data: bytes, drawn: random.Random) -> bytes:
    from tests.fuzz.bodies import mutated

    config: dict[str, Any] = json.loads(data)
    if drawn.random() < 0.5:
        config["quantization_config"] = {"quant_method": drawn.choice(FORMATS), "bits": drawn.choice((2, 3, 4, 8, 99))}
        config["quantization_config"] |= {"group_size": drawn.choice((32, 64, -1, 0, 10**9)), "desc_act": True}
    return json.dumps(mutated(config, drawn)).encode()


def _header(data: bytes, drawn: random.Random) -> bytes:
    from tests.fuzz.bodies import mutated

    size = int.from_bytes(data[:8], "little")
    text = json.dumps(mutated(json.loads(data[8 : 8 + size]), drawn)).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def examine(path: Path) -> tuple[str, str | None]:
    """(what came of it, a finding or None)."""
    from mlxinfer.convert import ConvertOptions, Packing, open_source, plan
    from mlxinfer.errors import MlxinferError

    try:
        source = open_source(path)
        try:
            plan(source, ConvertOptions(packing=Packing(4, 32)))
            for name, tensor in source.tensors.items():
                source.read(name)
                if tensor.packing is not None:
                    source.read_packed(name)
        finally:
            source.close()
    except MlxinferError as error:
        named = path.name in str(error) or str(path) in str(error)
        return type(error).__name__, None if named else f"the error names no file: {error!s:.200}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        return "finding", f"{type(error).__name__}: {error!s:.200}"
    return "read", None


def work(seed: int, start: int, stop: int, home: Path) -> None:
    """Files start … stop - 1 of a seed; the number under way is in home/at."""
    # mlx and the readers are imported before the limit is set.
    with tempfile.TemporaryDirectory() as made:
        bases = Bases(Path(made))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ALLOWED_BYTES, resource.RLIM_INFINITY))
    counts: collections.Counter[str] = collections.Counter()
    for number in range(start, stop):
        (home / "at").write_text(str(number))
        with tempfile.TemporaryDirectory(dir=home) as folder:
            path = bases.write(Path(folder), random.Random(f"{seed}:{number}"))
            outcome, finding = examine(path)
        counts[outcome] += 1
        if finding is not None:
            print(json.dumps({"seed": seed, "file": number, "what": finding}), flush=True)
    print(json.dumps({"counts": counts}), flush=True)


def campaign(files: int, seed: int) -> dict[str, Any]:
    """{"files", "findings": […], "counts"}. Readers that die or hang are started again behind the file they died of."""
    findings: list[dict[str, Any]] = []
    counts: collections.Counter[str] = collections.Counter()
    start = 0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        while start < files:
            command = [sys.executable, "-m", "tests.fuzz.files", "--worker", str(home), "--seed", str(seed)]
            command += ["--start", str(start), "--files", str(files)]
            (home / "at").write_text(str(start))
            reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            hangs = _watch(reader, home / "at")
            out = reader.communicate()[0]
            for line in map(json.loads, filter(None, out.splitlines())):
                if "counts" in line:
                    counts.update(line["counts"])
                else:
                    findings.append(line)
            if reader.returncode == 0:
                break
            if reader.returncode == 1:
                raise RuntimeError("the reader's own code failed; see above")
            at = int((home / "at").read_text() or start)
            what = "hangs" if hangs else f"the reader ended with {reader.returncode}"
            findings.append({"seed": seed, "file": at, "what": what})
            start = at + 1
    return {"files": files, "findings": findings, "counts": dict(counts)}


def _watch(reader: subprocess.Popen[str], at: Path) -> bool:
    """Wait for its end, or for it to stay at one file too long; the first one has the imports before it."""
    since, last = time.monotonic() + 60, ""
    while reader.poll() is None:
        try:
            reader.wait(0.5)
        except subprocess.TimeoutExpired:
            now = at.read_text()
            if now != last:
                since, last = max(since, time.monotonic()), now
            elif time.monotonic() - since > SLOW_S:
                reader.kill()
                return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--worker", type=Path)
    args = parser.parse_args()
    if args.worker:
        work(args.seed, args.start, args.files, args.worker)
        return 0
    found = campaign(args.files, args.seed)
    for finding in found["findings"]:
        print(json.dumps(finding))
    print(json.dumps(found | {"findings": len(found["findings"])}))
    return 1 if found["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
