"""A small skill that can be checked: SmolLM2 learns to answer with one JSON object of a fixed shape.

Each question is a sentence about a person; the answer is {"name": …, "age": …, "city": …}. Names and cities of the
held-out rows are in no row that is trained on. An answer counts when it parses and every value is right.

    python -m tests.bench.lora_skill smollm2-135m --plot docs/lora-skill.svg
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import mlxinfer
from mlxinfer.lora import fine_tune

FIRST = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Elif",
    "Felix",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Katja",
    "Liam",
    "Mina",
    "Noah",
    "Olga",
    "Paul",
    "Quinn",
    "Rosa",
    "Sven",
    "Tara",
]
LAST = ["Umar", "Vera", "Wanda", "Xaver", "Yara", "Zeno", "Amal", "Boris", "Chloe", "Dario"]
CITIES = [
    "Oslo",
    "Rome",
    "Lima",
    "Cairo",
    "Delhi",
    "Kyoto",
    "Porto",
    "Quito",
    "Sofia",
    "Tunis",
    "Vienna",
    "Warsaw",
    "Zurich",
    "Athens",
    "Berlin",
    "Dublin",
]
FAR = ["Madrid", "Nairobi", "Prague", "Seoul", "Lisbon", "Geneva"]
FORMS = (
    "{name} is {age} years old and lives in {city}.",
    "In {city} lives {name}, aged {age}.",
    "{name}, {age}, comes from {city}.",
    "At {age}, {name} has moved to {city}.",
)
HELD_OUT_FORM = "Meet {name} from {city}: {age} years old."


def rows(count: int, names: list[str], cities: list[str], forms: tuple[str, ...], seed: int) -> list[dict[str, Any]]:
    """Chats of one question and its answer."""
    rng = random.Random(seed)
    made: list[dict[str, Any]] = []
    for _ in range(count):
        facts = {"name": rng.choice(names), "age": rng.randint(18, 90), "city": rng.choice(cities)}
        question = rng.choice(forms).format(**facts)
        answer = json.dumps(facts)
        made.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    return made


def score(name: str, adapter: Path | None, asked: list[dict[str, Any]]) -> tuple[float, float]:
    """(answers that are right, answers that are JSON of the shape), each a part of all."""
    with mlxinfer.load(name, adapter=adapter) as llm:
        replies = llm.batch([row["messages"][:1] for row in asked], max_tokens=48, temperature=0.0)
        texts = [reply if isinstance(reply, str) else reply.content for reply in replies]
    right = shaped = 0
    for row, text in zip(asked, texts, strict=True):
        try:
            found = json.loads(text)
        except ValueError:
            continue
        wanted = json.loads(row["messages"][1]["content"])
        shaped += isinstance(found, dict) and found.keys() == wanted.keys()
        right += found == wanted
    return right / len(asked), shaped / len(asked)


def plot(path: Path, points: list[tuple[int, float, float]]) -> None:
    """Both parts over updates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    updates = [point[0] for point in points]
    axes.plot(updates, [100 * point[1] for point in points], marker="o", label="every value right")
    axes.plot(updates, [100 * point[2] for point in points], marker="o", linestyle="--", label="JSON of the shape")
    axes.set(xlabel="updates of 8 rows", ylabel="held-out answers, %", ylim=(-3, 103))
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--updates", type=int, nargs="*", default=[10, 20, 40, 80])
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    asked = rows(100, LAST, FAR, (*FORMS, HELD_OUT_FORM), seed=1)
    points = [(0, *score(arguments.model, None, asked))]
    print(json.dumps({"updates": 0, "right": points[0][1], "shaped": points[0][2]}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "train.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows(640, FIRST, CITIES, FORMS, seed=0)))
        seconds = 0.0
        for updates in arguments.updates:
            began = time.perf_counter()
            history = fine_tune(
                model=arguments.model,
                data=str(data),
                output=f"{folder}/adapter",
                updates=updates,
                micro_batch_size=8,
                learning_rate=1e-3,
                warmup_updates=4,
                resume=True,
            )
            seconds += time.perf_counter() - began
            points.append((updates, *score(arguments.model, Path(folder) / "adapter", asked)))
            print(
                json.dumps(
                    {
                        "updates": updates,
                        "loss": round(history.losses[-1], 4),
                        "right": points[-1][1],
                        "shaped": points[-1][2],
                        "training_seconds": round(seconds, 1),
                    }
                ),
                flush=True,
            )
    if arguments.plot:
        plot(arguments.plot, points)


if __name__ == "__main__":
    main()
