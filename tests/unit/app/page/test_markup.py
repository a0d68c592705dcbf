"""Untrusted text before it is Markdown."""

from __future__ import annotations

import time

import pytest

from mlxinfer.app.page.markup import JOINER, legible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a <b>c</b>", "a <~b>c<~/b>"),
        ("<!-- x --> <?php", "<~!-- x --> <~?php"),
        ("![x](http://a/b.png)", "!~[x](http://a/b.png)"),
        ("1 < 2 and 3 <4", "1 < 2 and 3 <4"),
        ("hey! [link](x)", "hey! [link](x)"),
        ("`<b>` <b>", "`<b>` <~b>"),
        ("``a ` <b>`` <i>", "``a ` <b>`` <~i>"),
        ("` <b> never closed", "` <~b> never closed"),
        ("```\n<b>\n```\n<i>", "```\n<b>\n```\n<~i>"),
        ("````\n```\n<b>\n````\n<i>", "````\n```\n<b>\n````\n<~i>"),
        ("~~~html\n<b>\n~~~\n<i>", "~~~html\n<b>\n~~~\n<~i>"),
        ("```\n<b> still open", "```\n<b> still open"),
        ("a ``` <b>", "a ``` <~b>"),
        ("$a<b$ <b>", "$a<b$ <~b>"),
        ("$$a<b$$ \\(c<d\\) \\[e<f\\] <g>", "$$a<b$$ \\(c<d\\) \\[e<f\\] <~g>"),
        ("costs $5\n<b>$", "costs $5\n<~b>$"),
        ("", ""),
    ],
)
def test_tags_and_images_are_broken_apart_outside_of_code_and_formulas(text: str, shown: str) -> None:
    assert legible(text) == shown.replace("~b>", f"{JOINER}b>").replace("<~", f"<{JOINER}").replace("!~", f"!{JOINER}")


@pytest.mark.parametrize("text", ["`<b", "```\n<b", "$<b", "\\(<b", "<b><img src=x>![a]", "~~~", "` `` ``` "])
def test_taking_the_joiner_out_gives_the_text_back(text: str) -> None:
    assert legible(text * 50).replace(JOINER, "") == text * 50


@pytest.mark.parametrize("piece", ["`", "`a``b", "$ ", "$$a ", "\\(", "\\[", "~~~\n", "<b", "!["])
def test_a_long_text_of_openings_takes_no_longer_than_its_length(piece: str) -> None:
    began = time.process_time()
    legible(piece * (400_000 // len(piece)))
    # A quadratic scan takes minutes.
    assert time.process_time() - began < 20
