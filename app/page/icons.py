"""The page's few icons as SVG: fonts that have such signs aren't everywhere."""

from __future__ import annotations

_FRAME = (
    '<svg viewBox="0 0 24 24" width="16" height="16" fill="none" stroke="currentColor" stroke-width="2" '
    'stroke-linecap="round" stroke-linejoin="round" aria-hidden="true">{}</svg>'
)
_PATHS = {
    "edit": "M4 20h4L19 9l-4-4L4 16z",
    "retry": "M20 11a8 8 0 1 0-2.3 5.7M20 4v7h-7",
    "continue": "M5 5v14M10 5l9 7-9 7z",
    "earlier": "M15 5l-7 7 7 7",
    "later": "M9 5l7 7-7 7",
    "pin": "M12 21v-6M7 15h10l-2-4V5h1V3H8v2h1v6z",
    "file": "M14 3H6v18h12V7zM14 3v4h4",
    "theme": "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
    "settings": "M4 7h9M19 7h1M4 17h1M11 17h9M16 5v4M8 15v4M13 7h3M5 17h3",
    "more": "M6 12h.01M12 12h.01M18 12h.01",
}
FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="8" fill="#6366f1"/>'
    '<path d="M9 22V11l7 7 7-7v11" fill="none" stroke="white" stroke-width="3"/></svg>'
)
"""Of the browser's tab."""


def icon(name: str) -> str:
    """HTML, of the colour and without the name: the control around it carries that."""
    return _FRAME.format(f'<path d="{_PATHS[name]}"/>')
