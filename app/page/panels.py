"""What the panels have in common: what they are given, and how they listen to buttons inside of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import gradio as gr

    from mlxinfer.app.comparisons import Comparisons
    from mlxinfer.app.library import Library
    from mlxinfer.app.page.texts import Texts
    from mlxinfer.app.replies import Replies
    from mlxinfer.app.store import Store
    from mlxinfer.pool import ModelPool

QUICK: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
"""Of every event here: none waits in the queue that replies stream through, none is a part of an API."""
PACE_S = 1.0
"""Between two looks at what has changed, while the panel is seen."""
RUNNING_PACE_S = 0.05
"""… at a reply that grows."""
ON_BUTTON = """
element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-act]');
  if (button) trigger('select', {act: button.dataset.act, name: button.dataset.name});
});
"""
"""A button with data-act and data-name triggers "select" with both."""
WHILE_SEEN = f"""
let version = '', asking = false, last = 0;
const look = async () => {{
  if (asking || document.hidden || element.offsetParent === null) return;
  const shown = element.querySelector('[data-key]');
  if (Date.now() - last < (shown?.dataset.running ? 0 : {PACE_S * 950:.0f})) return;
  asking = true;
  last = Date.now();
  try {{
    const now = await server.pulse(shown ? shown.dataset.key : '');
    if (now.value !== props.value) props.value = now.value;
    if (now.version !== version) {{ version = now.version; trigger('tick'); }}
  }} catch (error) {{
    version = '';  // the server is away; draw all when it is back
  }} finally {{
    asking = false;
  }}
}};
look();
const timer = setInterval(() => element.isConnected ? look() : clearInterval(timer), {RUNNING_PACE_S * 1000:.0f});
"""
"""Asks the server function `pulse` for {"value", "version"} while the component can be seen, not behind another tab or
window; a new version triggers "tick". What it shows may name itself by data-key, which `pulse` is given, and ask for
the faster pace by data-running. A server function costs a few times less than an event of Gradio's."""


class PanelContext(Protocol):
    """What a panel is given."""

    @property
    def pool(self) -> ModelPool: ...
    @property
    def store(self) -> Store: ...
    @property
    def replies(self) -> Replies: ...
    @property
    def library(self) -> Library: ...
    @property
    def comparisons(self) -> Comparisons: ...
    @property
    def texts(self) -> Texts: ...


def style(name: str) -> str:
    """The CSS of a panel's HTML; Gradio keeps it to the component that it is given to."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def pressed(event: gr.EventData) -> tuple[str, str]:
    """(act, name) of the button; empty where an event says something else."""
    data: Any = event._data
    values = data if isinstance(data, dict) else {}
    act, name = values.get("act"), values.get("name")
    return (act, name) if isinstance(act, str) and isinstance(name, str) else ("", "")
