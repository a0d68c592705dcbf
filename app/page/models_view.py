"""The panel "Models" as HTML. Whatever a file, a hub or a person named is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from mlxinfer.zoo import human_bytes
from mlxinfer.zoo.files import human_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mlxinfer.app.library import MemoryBar, Offer
    from mlxinfer.app.page.texts import Texts
    from mlxinfer.app.pulls import Pull
    from mlxinfer.zoo import FitReport

PHASES = ("resolve", "download", "unpack", "verify")
PARTS = ("weights", "kv", "cache", "other", "free")


def memory(bar: MemoryBar, words: Texts) -> str:
    """The bar and its legend."""
    whole = max(1, bar.budget)
    parts = [(name, getattr(bar, name)) for name in PARTS]
    said = ", ".join(f"{words(f'memory_{name}')} {human_bytes(size)}" for name, size in parts)
    cells = "".join(f'<span class="part {name}" style="width:{size / whole:.2%}"></span>' for name, size in parts)
    legend = "".join(
        f'<li><span class="dot {name}"></span>{words(f"memory_{name}")} <b>{human_bytes(size)}</b></li>'
        for name, size in parts
    )
    title = f"{words('memory_title')}: {human_bytes(bar.budget)}"
    label = escape(f"{title}; {said}")
    return (
        f'<p class="title">{title}</p><div class="bar" role="img" aria-label="{label}">{cells}</div>'
        f'<ul class="legend" aria-hidden="true">{legend}</ul>'
    )


def matching(offers: Iterable[Offer], text: str, only_here: bool) -> list[Offer]:
    """Those that have every word of `text` in their name, licence, origin or abilities."""
    sought = text.lower().split()
    return [
        offer
        for offer in offers
        if (offer.here or not only_here)
        and all(
            word in " ".join((offer.name, offer.licence, offer.origin, *offer.capabilities, *offer.adapters)).lower()
            for word in sought
        )
    ]


def table(offers: list[Offer], count: int, fits: Mapping[str, FitReport], chosen: str, words: Texts) -> str:
    """Rows with a button each that chooses the model; `count` is that of all offers."""
    columns = ("name", "fit", "state", "size", "parameters", "bits", "licence", "can")
    heads = "".join(f'<th scope="col" class="{column}">{words(f"models_{column}")}</th>' for column in columns)
    rows = "".join(_row(offer, fits.get(offer.name), offer.name == chosen, words) for offer in offers)
    if not rows:
        rows = f'<tr><td colspan="{len(columns)}">{words("models_none")}</td></tr>'
    caption = f"{words('models_table')}: {words('models_count', shown=len(offers), all=count)}"
    # The scrolled region can be reached and moved with the keyboard.
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{words("models_table")}"><table>'
        f"<caption>{caption}</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(offer: Offer, fit: FitReport | None, chosen: bool, words: Texts) -> str:
    name = escape(offer.name)
    can = ", ".join(words(f"can_{one}") for one in offer.capabilities)
    cells = {
        "fit": _fit(fit, words),
        "state": _state(offer, words),
        "size": human_bytes(offer.size_bytes) if offer.size_bytes else "",
        "parameters": _count(offer.parameters),
        "bits": f"{offer.bits:g}" if offer.bits else "",
        "licence": escape(offer.licence),
        "can": can,
    }
    adapters = "".join(f'<span class="adapter">{name}:{escape(adapter)}</span>' for adapter in offer.adapters)
    # What a narrow window hides from the columns stands below the name there.
    brief = escape(" · ".join(part for part in (cells["size"], cells["parameters"], offer.licence, can) if part))
    return (
        f'<tr class="{"chosen" if chosen else ""}"><th scope="row" class="name"><button type="button" '
        f'data-act="choose" data-name="{name}" aria-pressed="{"true" if chosen else "false"}">{name}</button>{adapters}'
        f'<span class="brief">{brief}</span></th>'
        + "".join(f'<td class="{column}">{value}</td>' for column, value in cells.items())
        + "</tr>"
    )


def _fit(fit: FitReport | None, words: Texts) -> str:
    if fit is None:
        return ""
    rate = f'<span class="rate">{words("tok_s", rate=_rate(fit.tok_s))}</span>' if fit.tok_s else ""
    return f'<span class="badge {fit.verdict}">{words(f"fit_{fit.verdict}")}</span>{rate}'


def _state(offer: Offer, words: Texts) -> str:
    state = "catalogue" if not offer.here else "at_work" if offer.at_work else offer.state
    pinned = f' <span class="badge">{words("state_pinned")}</span>' if offer.pinned else ""
    error = f'<span class="error">{escape(offer.error)}</span>' if offer.error else ""
    return f'<span class="state {state}">{words(f"state_{state}")}</span>{pinned}{error}'


def _count(number: int) -> str:
    """Parameters, in millions or billions."""
    return "" if not number else f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.3g}M"


def _rate(tok_s: float) -> str:
    return f"{tok_s:,.0f}" if tok_s >= 10 else f"{tok_s:.1f}"


def detail(offer: Offer | None, fit: FitReport | None, words: Texts) -> str:
    """What is known of one model before it is loaded."""
    if offer is None:
        return f'<p class="none">{words("detail_none")}</p>'
    lines = [f'<h3>{escape(offer.name)}</h3><p class="facts">{_state(offer, words)}</p>']
    if fit is None:
        lines.append(f"<p>{words('detail_unknown')}</p>")
    else:
        lines.append(f'<p class="verdict {fit.verdict}"><b>{words(f"detail_{fit.verdict}")}</b></p>')
        needs = words(
            "detail_needs", total=human_bytes(fit.total_bytes), context=f"{fit.context:,}",
            weights=human_bytes(fit.weight_bytes), cache=human_bytes(fit.cache_bytes),
            rest=human_bytes(fit.overhead_bytes), budget=human_bytes(fit.budget_bytes),
        )  # fmt: skip
        lines.append(f"<p>{needs}</p>")
        if fit.max_context:
            lines.append(f"<p>{words('detail_longest', context=f'{fit.max_context:,}')}</p>")
        if fit.tok_s:
            speed = words("detail_speed", rate=_rate(fit.tok_s), bandwidth=f"{fit.bandwidth_gb_s:g}")
            lines.append(f"<p>{speed}</p>")
        if fit.advice:
            lines.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in fit.advice) + "</ul>")
    if offer.origin:
        lines.append(f'<p class="facts">{words("detail_from", origin=escape(offer.origin))}</p>')
    for adapter in offer.adapters:
        both = escape(f"{offer.name}:{adapter}")
        drop = _button("drop", escape(adapter), words("adapter_drop"), words("adapter_drop_of", name=both))
        lines.append(f'<p class="adapter"><code>{both}</code> {drop}</p>')
    return "".join(lines)


def pulls(found: list[Pull], words: Texts) -> str:
    """Each with its bar and the buttons that it has at the moment."""
    if not found:
        return ""
    return f'<p class="title">{words("pulls")}</p>' + "".join(_pull(pull, words) for pull in found)


def _pull(pull: Pull, words: Texts) -> str:
    name = escape(pull.name)
    share = pull.done / pull.total if pull.total else 0.0
    phase = pull.phase if pull.phase in PHASES else "download"
    said = [words(f"pull_{'cancelling' if pull.cancelling else phase if pull.state == 'running' else pull.state}")]
    if pull.total:
        said.append(words("pull_of", done=human_bytes(pull.done), total=human_bytes(pull.total)))
    if rate := pull.rate:
        said.append(words("pull_rate", rate=human_bytes(rate)))
    if (left := pull.left_s) is not None:
        said.append(words("pull_left", time=human_seconds(left)))
    actions = {
        "running": () if pull.cancelling else ("cancel",),
        "done": ("clear",),
        "cancelled": ("resume", "discard"),
        "failed": ("resume", "discard"),
    }[pull.state]
    buttons = "".join(_button(act, name, words(f"pull_{act}"), f"{words(f'pull_{act}')}: {name}") for act in actions)
    error = f'<p class="error" role="alert">{escape(pull.error)}</p>' if pull.error else ""
    return (
        f'<div class="pull {pull.state}"><div class="line"><b>{name}</b><span class="said">{" · ".join(said)}</span>'
        f'{buttons}</div><div class="bar" role="progressbar" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{int(share * 100)}" aria-label="{words("pull_progress", name=name)}">'
        f'<span class="part" style="width:{share:.2%}"></span></div>{error}</div>'
    )


def _button(act: str, name: str, text: str, label: str) -> str:
    """`name` and `label` come escaped."""
    return f'<button type="button" data-act="{act}" data-name="{name}" aria-label="{label}">{text}</button>'


def notice(text: str, *, bad: bool = False) -> str:
    """What came of what was asked for; read out where it appears."""
    return (
        f'<p class="notice {"bad" if bad else ""}" role="{"alert" if bad else "status"}">{escape(text)}</p>'
        if text
        else ""
    )
