"""Quality: the texts, the comparison of two models, sensitivities, what is learned, and the reports."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxinfer import runtime
from mlxinfer.convert import calibration, measure, report, sensitivity
from mlxinfer.convert.card import card_fields, make_card
from mlxinfer.convert.learned import LearnedSource, learn
from mlxinfer.convert.outcome import Decision, Outcome
from mlxinfer.convert.sources.base import Logical, Packing
from mlxinfer.convert.unpacked import UnpackedLinear, unpacked_on_cpu
from mlxinfer.errors import InvalidRequestError, UnsupportedModelError
from mlxinfer.kernels import layers
from mlxinfer.tokenizer import Tokenizer
from tests import tiny

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(tiny.write_folder(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def model() -> nn.Module:
    return tiny.build_model(tiny.config())


TEXTS = [
    calibration.Document("prose", "paris is the capital of france. " * 4),
    calibration.Document("code", "x = y\n" * 9),
]


def packed(model: nn.Module, bits: int) -> nn.Module:
    other = copy.deepcopy(model)
    nn.quantize(other, 32, bits)
    return other


def test_the_texts_are_two_sets_of_several_kinds_and_share_no_document() -> None:
    both = [calibration.documents(purpose) for purpose in ("calibration", "evaluation")]
    for documents in both:
        assert {d.kind for d in documents} == {"prose", "code", "chat"}
        assert len(documents) > 25
    assert not {d.text for d in both[0]} & {d.text for d in both[1]}


def test_a_text_of_ones_own_needs_no_headings() -> None:
    assert calibration.parse("plain\ntext\n") == [calibration.Document("prose", "plain\ntext")]
    with pytest.raises(InvalidRequestError):
        calibration.parse(" \n")


def test_chats_go_through_the_models_template(tokenizer: Tokenizer) -> None:
    chat = calibration.Document("chat", "user: hello\nassistant: a\nb")
    (row,) = calibration.rows([chat], tokenizer, 100)
    assert tokenizer.decode(row, skip_special_tokens=False).startswith("<|im_start|>user\nhello<|im_end|>")


def test_packed_rows_hold_every_document_and_have_one_length(tokenizer: Tokenizer) -> None:
    rows = calibration.packed_rows(TEXTS, tokenizer, 16)
    assert {len(row) for row in rows} == {16}
    whole = sum(len(tokenizer.encode(d.text)) for d in TEXTS)
    assert len(rows) == math.ceil(whole / 16)


def test_every_packed_row_begins_with_the_token_that_texts_begin_with(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    tokenizer = Tokenizer.from_folder(folder)
    bos = tokenizer.bos_token_id
    rows = calibration.packed_rows(TEXTS, tokenizer, 16)
    assert len(rows) > 3
    assert {(len(row), row[0]) for row in rows} == {(16, bos)}
    assert [row[1] == bos for row in rows[:3]] == [False] * 3, "once, not twice"
    stream = [token for d in TEXTS for token in tokenizer.encode(d.text)]
    mixed = [token for row in rows for token in row if token != bos][: len(stream) - 2]
    assert sorted(mixed) == sorted(token for token in stream if token != bos), "no token of the texts is lost"


def test_a_model_is_no_distance_from_itself(model: nn.Module, tokenizer: Tokenizer) -> None:
    result = measure.compare(model, model, tokenizer, texts=TEXTS)
    assert result.kl_max == 0
    assert result.flips == 0
    assert result.perplexity_source == result.perplexity_converted
    assert [kind for kind, _ in result.by_kind] == ["code", "prose"]


def test_the_figures_are_those_of_one_plain_forward(
    model: nn.Module, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "LARGEST_PIECE", 7)
    other = packed(model, 3)
    result = measure.compare(model, other, tokenizer, texts=TEXTS[:1], max_tokens=50)
    row = tokenizer.encode(TEXTS[0].text)[:50]
    p, q = (
        np.array(nn.log_softmax(m(mx.array([row]))[0, :-1].astype(mx.float32))).astype(np.float64)
        for m in (model, other)
    )
    kl = (np.exp(p) * (p - q)).sum(-1)
    assert result.tokens == len(row) - 1
    assert result.kl_mean == pytest.approx(kl.mean(), rel=1e-3)
    assert result.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-3)
    assert result.flips == pytest.approx((p.argmax(-1) != q.argmax(-1)).mean())
    targets = np.array(row[1:])
    assert result.perplexity_converted == pytest.approx(math.exp(-q[np.arange(len(targets)), targets].mean()), rel=1e-3)
    assert result.perplexity_source != result.perplexity_converted


def test_fewer_bits_are_further_away_and_a_limit_tells(model: nn.Module, tokenizer: Tokenizer) -> None:
    far, near = (measure.compare(model, packed(model, bits), tokenizer, texts=TEXTS) for bits in (2, 8))
    assert near.kl_mean < far.kl_mean / 20
    assert far.exceeds(near.kl_mean)
    assert not near.exceeds(far.kl_mean)


def test_a_model_that_gives_nan_exceeds_every_limit(model: nn.Module, tokenizer: Tokenizer) -> None:
    broken = copy.deepcopy(model)
    broken.update({"lm_head": {"weight": mx.full((320, 64), mx.nan)}})
    assert measure.compare(model, broken, tokenizer, texts=TEXTS).exceeds(1e9)


def test_models_of_two_vocabularies_are_not_compared(model: nn.Module, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="320 and 330"):
        measure.compare(model, tiny.build_model(tiny.config(vocab_size=330)), tokenizer, texts=TEXTS)


WIDTHS = [Packing(bits, 32) for bits in (2, 4, 8)]


def sensitivities(model: nn.Module, tokenizer: Tokenizer) -> sensitivity.Sensitivity:
    rows = calibration.packed_rows(TEXTS, tokenizer, 24)
    return sensitivity.measure_sensitivity(model, rows, widths=WIDTHS)


def test_sensitivities_leave_the_model_as_it_was_and_fall_with_bits(model: nn.Module, tokenizer: Tokenizer) -> None:
    before = mx.array(model["lm_head"]["weight"])
    found = sensitivities(model, tokenizer)
    assert mx.array_equal(model["lm_head"]["weight"], before).item()
    assert len(found.offers) == 3 * 7 + 2
    for offers in found.offers.values():
        losses = [offer.loss for offer in offers]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0] / 100


def test_sensitivities_predict_the_divergence_of_small_changes(model: nn.Module, tokenizer: Tokenizer) -> None:
    # A gentler model than the others here: the estimate is for small changes.
    model = tiny.build_model(tiny.config(), scale=1.5)
    predicted = {}
    measured = {}
    found = sensitivities(model, tokenizer)
    for path in ("lm_head", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.v_proj"):
        predicted[path] = next(o.loss for o in found.offers[path] if o.packing.bits == 4)
        other = copy.deepcopy(model)
        nn.quantize(other, 32, 4, class_predicate=lambda p, _, path=path: p == path)
        measured[path] = measure.compare(model, other, tokenizer, texts=TEXTS).kl_mean
    for path, value in measured.items():
        assert 0.3 < predicted[path] / value < 3, (predicted, measured)


def test_forms_are_the_best_of_all_that_fit() -> None:
    rng = np.random.default_rng(3)
    shapes = {str(i): (int(rng.integers(1, 5)), 64) for i in range(5)}
    offers = {
        path: [
            sensitivity.Offer(p, sensitivity.bits_of(shape, p), float(4.0**-p.bits * scale))
            for p in [Packing(bits, 64) for bits in (2, 3, 4, 6)]
        ]
        for (path, shape), scale in zip(shapes.items(), rng.uniform(0.1, 10, 5), strict=True)
    }
    problem = sensitivity.Sensitivity(shapes, offers, other_bits=160, other_weights=10)
    weights = 10 + sum(math.prod(shape) for shape in shapes.values())
    for target in (3.0, 3.7, 4.4, 5.2):
        chosen = sensitivity.choose_forms(problem, target)
        assert sensitivity.bits_per_weight(problem, chosen) <= target
        every = [
            (sum(o.loss for o in combination), sum(o.bits for o in combination))
            for combination in itertools.product(*offers.values())
        ]
        best = min(loss for loss, bits in every if bits + 160 <= target * weights)
        largest_gain = max(a.loss - b.loss for of in offers.values() for a, b in itertools.pairwise(of))
        assert best <= sensitivity.predicted_loss(chosen) <= best + largest_gain
        # Nobody with as few bits does better.
        used = sum(o.bits for o in chosen.values())
        assert sensitivity.predicted_loss(chosen) <= 1.5 * min(loss for loss, bits in every if bits <= used)


def test_a_target_makes_a_plan_of_that_size(model: nn.Module, tokenizer: Tokenizer) -> None:
    found = sensitivities(model, tokenizer)
    plan = sensitivity.plan_for(found, 5.5)
    used = found.other_bits
    for path, shape in found.shapes.items():
        packing = plan.decide(path, shape)
        assert packing is not None
        used += sensitivity.bits_of(shape, packing)
    weights = found.other_weights + sum(math.prod(s) for s in found.shapes.values())
    assert 5.2 < used / weights <= 5.5
    with pytest.raises(InvalidRequestError, match="smallest forms take"):
        sensitivity.plan_for(found, 1.5)


def test_dwq_brings_the_model_closer_to_its_teacher(tokenizer: Tokenizer) -> None:
    model = tiny.build_model(tiny.config())
    plain = copy.deepcopy(model)
    nn.quantize(plain, 32, 3)
    student = learn("dwq", copy.deepcopy(model), "llama", tokenizer, Packing(3, 32), row_tokens=64, max_rows=120)
    before, after = (
        measure.compare(model, m, tokenizer, texts=calibration.documents("evaluation")[:6]) for m in (plain, student)
    )
    assert after.kl_mean < before.kl_mean


def test_packed_layers_have_the_same_gradients_written_out() -> None:
    model = tiny.build_model(tiny.config(tie_word_embeddings=True))
    nn.quantize(model, 32, 4)
    model.freeze()
    for _, module in model.named_modules():
        if "scales" in module:
            module.unfreeze(keys=["scales", "biases"], recurse=False)
    forward: Any = model
    step = nn.value_and_grad(model, lambda: (forward(mx.array([[3, 5, 8]])) ** 2).mean())
    before = {type(module) for _, module in model.named_modules()}
    loss, gradients = step()
    with unpacked_on_cpu(model):
        changed = sum(isinstance(module, UnpackedLinear) for _, module in model.named_modules())
        other_loss, other = step()
    assert changed == (21 if runtime.on_cpu() else 0)
    assert {type(module) for _, module in model.named_modules()} == before
    assert other_loss.item() == pytest.approx(loss.item(), rel=1e-5)
    for (name, a), (_, b) in zip(tree_flatten(gradients), tree_flatten(other), strict=True):
        assert np.abs(np.array(a) - np.array(b)).max() <= 1e-5 * np.abs(np.array(a)).max(), name


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_awq_and_gptq_run_on_the_text_of_the_package_and_stdout_stays_clean(
    method: str, model: nn.Module, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    original = copy.deepcopy(model)
    layers.adopt(model)
    assert method in ("awq", "gptq")
    learned = learn(
        "awq" if method == "awq" else "gptq", model, "llama", tokenizer, Packing(4, 32), row_tokens=32, max_rows=4
    )
    assert capsys.readouterr().out == ""
    assert learned["model"]["layers"][0]["mlp"]["up_proj"].bits == 4
    assert learned["model"]["embed_tokens"].bits == 6
    result = measure.compare(original, learned, tokenizer, texts=TEXTS)
    worst = measure.compare(original, packed(original, 2), tokenizer, texts=TEXTS)
    assert result.kl_mean < worst.kl_mean / 3


def test_what_a_method_cannot_do_is_said_before_it_begins(model: nn.Module, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="2, 4 or 8"):
        learn("gptq", model, "llama", tokenizer, Packing(3, 32))
    with pytest.raises(InvalidRequestError, match="affine"):
        learn("dwq", model, "llama", tokenizer, Packing(4, 32, "mxfp4"))
    with pytest.raises(UnsupportedModelError, match="AWQ"):
        learn("awq", model, "mamba", tokenizer, Packing(4, 32), row_tokens=16, max_rows=1)


class Origin:
    kind = "safetensors"
    path = Path("somewhere")
    config = tiny.config()
    tensors: Mapping[str, Logical] = MappingProxyType({})
    dropped: Mapping[str, str] = MappingProxyType({})
    extras: Mapping[str, bytes] = MappingProxyType({})
    notes: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        return "f"

    def close(self) -> None:
        pass


def test_a_learned_model_is_a_source_with_its_codes(model: nn.Module) -> None:
    learned = packed(model, 4)
    learned.set_dtype(mx.bfloat16)
    origin: object = Origin()
    source = LearnedSource("dwq", learned, origin)  # pyright: ignore[reportArgumentType]
    logical = source.tensors["model.layers.0.mlp.up_proj.weight"]
    assert (logical.shape, logical.packing) == ((128, 64), Packing(4, 32))
    assert "model.layers.0.mlp.up_proj.scales" not in source.tensors
    assert (logical.handling, logical.note) == ("requantized", "by dwq")
    assert source.tensors["model.norm.weight"].handling == "exact"
    awq = LearnedSource("awq", learned, origin)  # pyright: ignore[reportArgumentType]
    assert awq.tensors["model.norm.weight"].handling == "requantized", "awq scales norms"
    layer = learned["model"]["layers"][0]["mlp"]["up_proj"]
    arrays = source.read_packed(logical.name)
    assert (arrays.weight == np.array(layer.weight)).all()
    assert (arrays.scales == np.array(layer.scales.astype(mx.float32))).all()
    restored = mx.dequantize(layer.weight, layer.scales.astype(mx.float32), layer.biases.astype(mx.float32), 32, 4)
    assert np.abs(source.read(logical.name) - np.array(restored)).max() < 1e-5
    norm = source.tensors["model.norm.weight"]
    assert (norm.dtype, source.read(norm.name).dtype) == ("bfloat16", np.uint16)


def outcome(folder: Path) -> Outcome:
    decisions = (
        Decision("a.weight", ("a",), (64, 64), Packing(4, 32), "bfloat16", 2560, "quantized", ""),
        Decision("norm.weight", ("n",), (64,), None, "bfloat16", 128, "exact", "kept | [as] it was"),
    )
    return Outcome(folder, "gguf", "uniform", "bfloat16", decisions, {}, ("a note",), 2688, 4160, "abc")


COMPARISON = measure.Comparison(100, 0.01, 0.005, 0.1, 0.4, 0.03, 12.5, math.inf, (("prose", 0.01),))


def test_the_report_holds_the_figures_and_is_json(tmp_path: Path) -> None:
    files = report.documents(outcome(tmp_path))
    assert set(files) == {"conversion.json", "README.md"}
    report.add_measurement(outcome(tmp_path), COMPARISON, source="org/model")
    written = json.loads((tmp_path / "conversion.json").read_text())
    assert written["measured"]["kl_mean"] == 0.01
    assert written["measured"]["perplexity_converted"] is None
    assert written["forms"] == {"4-bit affine, groups of 32": 4096, "bfloat16": 64}
    assert "12.500" in (tmp_path / "README.md").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "conversion.json"]


def test_the_report_for_a_console_has_sizes_notes_and_figures(tmp_path: Path) -> None:
    text = "\n".join(report.lines(outcome(tmp_path), COMPARISON))
    for part in (
        "5.169 bits per weight",
        "recipe: uniform",
        "4-bit affine, groups of 32",
        "98.5%",
        "1 tensors: kept",
        "a note",
        "3.00%",
    ):
        assert part in text
    assert json.dumps(report.summary(outcome(tmp_path), COMPARISON))


@pytest.mark.parametrize("line_end", ["\r", "\x0b", "\x85", "\u2028"])
def test_no_field_of_the_sources_card_closes_the_metadata(line_end: str, tmp_path: Path) -> None:
    source = line_end.join(["---\nlicense: mit", "---", " <script>"]) + "\n---\n"
    card = make_card(outcome(tmp_path), source="org/model", source_card=source)
    assert "script" not in card


def test_the_card_carries_the_licence_over_and_nothing_else_of_the_source(tmp_path: Path) -> None:
    source = "---\nlicense: apache-2.0\nlanguage:\n- en\n- de\ntags:\n- evil\nwidget: x\n---\n# Body\nlicense: gpl\n"
    assert card_fields(source) == {"license": "license: apache-2.0", "language": "language:\n- en\n- de"}
    card = make_card(outcome(tmp_path), source="org/model", source_card=source)
    assert card.startswith("---\nlicense: apache-2.0\nlanguage:\n- en\n- de\nlibrary_name: mlx\n")
    assert "evil" not in card
    assert "No licence" not in card
    assert "No licence" in make_card(outcome(tmp_path), source="org/model")
