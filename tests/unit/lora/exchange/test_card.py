"""The README.md of an adapter: valid metadata, the base's licence, and no markup out of names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxinfer.lora import MethodOptions
from mlxinfer.lora.card import adapter_card

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = MethodOptions("rslora", rank=4, alpha=6.0, targets=("model.layers.0.self_attn.q_proj",))


def test_a_card_says_method_rank_layers_and_what_the_caller_knows() -> None:
    card = adapter_card(OPTIONS, name="sql", base="org/base", facts={"rows trained": 1200, "held-out loss": 1.25})
    for line in ("| method | rsLoRA |", "| rank | 4 |", "| adapted | q_proj |", "| rows trained | 1200 |"):
        assert line in card.splitlines()
    assert "| held-out loss | 1.25 |" in card
    assert "base_model: org/base" in card.splitlines()
    assert "mlxinfer run org/base --adapter ." in card


def test_licence_and_languages_are_the_bases_and_their_lack_is_said(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\nlanguage:\n- de\ndatasets:\n- x/y\n---\n")
    card = adapter_card(OPTIONS, name="a", base="", base_folder=tmp_path)
    assert card.startswith("---\nlicense: mit\nlanguage:\n- de\nlibrary_name: mlx\n")
    assert "x/y" not in card
    assert "No licence" not in card
    assert "No licence was found" in adapter_card(OPTIONS, name="a", base="")


def test_names_open_no_markup_and_no_metadata() -> None:
    card = adapter_card(OPTIONS, name="<b>\n---\n[x](y)", base='evil"\nlicense: mit\n---', facts={"a|b": "c|d\n| e |"})
    assert card.count("\n---\n") == 1
    assert "license: mit" not in card.splitlines()
    assert not set("<[") & set(card)
    assert "| ab | cd e |" in card.replace("  ", " ")
