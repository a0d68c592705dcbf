"""A comparison as HTML. Replies are shown as the text that they are, escaped: it is the text that is compared."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from mlxinfer.app.comparisons import same_until

if TYPE_CHECKING:
    from mlxinfer.app.comparisons import Comparison
    from mlxinfer.app.page.texts import Texts
    from mlxinfer.app.replies import Shown

_WORD = re.compile(r"\s*(?:[\w'\u2019]{1,40}|\S)", re.ASCII)
"""What is marked of a difference: a word, or one sign of a script without spaces."""


def comparison(key: str, made: Comparison, votes: tuple[int, int], words: Texts) -> str:
    left, right = made.shown()
    same = same_until(left.text, right.text)
    differ = _differ(left, right, same)
    columns = "".join(
        _column(made, side, shown, same if differ else None, words) for side, shown in enumerate((left, right))
    )
    # Read out once it is certain, not at every word.
    said = _said(left, right, same, differ, words)
    live = ' role="status"' if made.over else ""
    running = "" if made.over else " data-running=1"
    return (
        f'<div class="comparison" data-key="{key}"{running}><p class="same"{live}>{said}</p>'
        f'<div class="columns">{columns}</div>{_votes(made, votes, words)}</div>'
    )


def _differ(left: Shown, right: Shown, same: int) -> bool:
    """Whether the texts are known to differ: one that ends where the other goes on may still be written."""
    if same < min(len(left.text), len(right.text)):
        return True
    shorter, longer = (left, right) if len(left.text) < len(right.text) else (right, left)
    return shorter.over and len(longer.text) > same


def _said(left: Shown, right: Shown, same: int, differ: bool, words: Texts) -> str:
    if not left.text and not right.text:
        return words("compare_shared") if not (left.over and right.over) else ""
    if differ:
        return words("compare_differs", count=f"{same:,}") if same else words("compare_first_word")
    if left.over and right.over:
        return words("compare_same")
    return words("compare_same_so_far", count=f"{same:,}")


def _column(made: Comparison, side: int, shown: Shown, same: int | None, words: Texts) -> str:
    name = escape(made.question.models[side])
    stage = words(f"stage_{'waiting' if made.waits(side) else shown.stage}")
    thinking = error = ""
    if shown.reasoning:
        still = " open" if not shown.text and not shown.over else ""
        thinking = (
            f"<details{still}><summary>{words('compare_thinking')} ({shown.reasoning_s:.1f} s)</summary>"
            f'<div class="text" dir="auto">{escape(shown.reasoning)}</div></details>'
        )
    if shown.error:
        error = f'<p class="error" role="alert">{escape(shown.error)}</p>'
    calls = "".join(f"<pre>{escape(called)}({escape(arguments)})</pre>" for called, arguments in shown.calls)
    return (
        f'<section aria-label="{words("compare_column", name=name)}"><header><h3>{name}</h3>'
        f'<span class="stage {shown.stage}">{stage}</span></header>{thinking}'
        f'<div class="text" dir="auto">{_marked(shown.text, same, words)}</div>{calls}{error}'
        f'<p class="figures">{_figures(shown, words)}</p>{_buttons(made, side, shown, name, words)}</section>'
    )


def _marked(text: str, same: int | None, words: Texts) -> str:
    """The text with its first difference marked."""
    if same is None or same >= len(text):
        return escape(text)
    match = _WORD.match(text, same)
    end = match.end() if match else len(text)
    here = words("compare_here")
    return f'{escape(text[:same])}<mark title="{here}">{escape(text[same:end])}</mark>{escape(text[end:])}'


def _figures(shown: Shown, words: Texts) -> str:
    figures, said = shown.figures, []
    if rate := figures.get("decode_tok_s"):
        said.append(words("tok_s", rate=f"{rate:g}"))
    if (first := figures.get("ttft_s")) is not None:
        said.append(words("figure_ttft", seconds=f"{first:.2f}"))
    if (count := figures.get("completion_tokens")) is not None:
        said.append(words("figure_tokens", count=f"{count:,}"))
    if cached := figures.get("cached_tokens"):
        said.append(words("figure_cached", count=f"{cached:,}"))
    return " · ".join(said)


def _buttons(made: Comparison, side: int, shown: Shown, name: str, words: Texts) -> str:
    """`name` comes escaped."""
    if not made.over or not (shown.text or shown.reasoning):
        return ""
    acts = ("continue", "better")
    return (
        '<div class="acts">'
        + "".join(
            f'<button type="button" data-act="{act}" data-name="{side}" aria-label="{words(f"compare_{act}")}: {name}">'
            f"{words(f'compare_{act}')}</button>"
            for act in acts
        )
        + "</div>"
    )


def _votes(made: Comparison, votes: tuple[int, int], words: Texts) -> str:
    if not any(votes):
        return ""
    left, right = map(escape, made.question.models)
    return (
        f'<p class="votes" role="status">{words("compare_votes", left=left, right=right, a=votes[0], b=votes[1])}</p>'
    )
