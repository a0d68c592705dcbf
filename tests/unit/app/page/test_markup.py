"""Untrusted text before it is Markdown."""

from __future__ import annotations

import re
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
        ("$a<b$ <b>", "$~a<b~$ <~b>"),
        ("$$a<b$$ \\(c<d\\) \\[e<f\\] <g>", "$$a<b$$ \\(c<d\\) \\[e<f\\] <~g>"),
        ("costs $5\n<b>$", "costs $5\n<~b>$"),
        ("", ""),
    ],
)
def test_tags_and_images_are_broken_apart_outside_of_code_and_formulas(text: str, shown: str) -> None:
    marked = re.sub(r"(?<=[<!$])~|~(?=\$)", JOINER, shown)
    assert legible(text) == marked


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        ("It costs $5 and $6", []),
        ("$5-$10, A$7/A$8, ($9)", []),
        ("5$ and 6$", []),
        ("$HOME and $PATH", []),
        ("$5 and $6, so $x^2$", ["x^2"]),
        ("$x$ costs $5, $y$ costs $6", ["x", "y"]),
        ("($x$), $y$. $z$s", ["x", "y", "z"]),
        ("$ x$ and $x $", []),
        ("$20,000 for $x=1$ and $30,000", ["x=1"]),
        ("$x$5", []),
        (r"\$5 and \$6, $\$7$", [r"\$7"]),
        ("$a\nb$", []),
        ("$$5 and $$", []),
        ("`$x$` $y$", ["y"]),
        ("```\n$x$\n``` $y$\n```\n$z$", ["z"]),
    ],
)
def test_dollar_signs_are_a_formula_as_pandoc_has_it(text: str, formulas: list[str]) -> None:
    found = re.findall(rf"\${JOINER}(.*?){JOINER}\$", legible(text))
    assert found == formulas
    assert legible(text).count(JOINER) == 2 * len(formulas)


@pytest.mark.parametrize("text", ["`<b", "```\n<b", "$<b", "\\(<b", "<b><img src=x>![a]", "~~~", "` `` ``` "])
def test_taking_the_joiner_out_gives_the_text_back(text: str) -> None:
    assert legible(text * 50).replace(JOINER, "") == text * 50


@pytest.mark.parametrize("piece", ["`", "`a``b", "$ ", "$a", "$a \\$", "$$a ", "\\(", "\\[", "~~~\n", "<b", "!["])
def test_a_long_text_of_openings_takes_no_longer_than_its_length(piece: str) -> None:
    began = time.process_time()
    legible(piece * (400_000 // len(piece)))
    # A quadratic scan takes minutes.
    assert time.process_time() - began < 20
