"""Where a link may lead: in the window stays the app's own page, what is elsewhere goes to the system's browser."""

from __future__ import annotations

import enum
import webbrowser
from urllib.parse import SplitResult, urlsplit

ELSEWHERE = ("http", "https", "mailto")
"""What the browser is asked to open. No `file`, no scheme that starts another program."""
_PORTS = {"http": 80, "https": 443}


class Place(enum.Enum):
    HERE = "here"
    BROWSER = "browser"
    NOWHERE = "nowhere"


def place(url: str, home: str) -> Place:
    """Where `url` belongs, in a window whose page is `home`. What cannot be read as an address leads nowhere."""
    try:
        target, own = urlsplit(url), urlsplit(home)
        if target.scheme == "blob":  # a file the page itself made; its origin follows
            return Place.HERE if _origin(urlsplit(target.path)) == _origin(own) else Place.NOWHERE
        if url == "about:blank" or _origin(target) == _origin(own):
            return Place.HERE
        if target.scheme in ELSEWHERE and (target.hostname or target.scheme == "mailto"):
            return Place.BROWSER
    except ValueError:  # a port that is no number, a bracket that is not closed
        return Place.NOWHERE
    return Place.NOWHERE


def _origin(address: SplitResult) -> tuple[str, str | None, int | None]:
    return address.scheme, address.hostname, address.port or _PORTS.get(address.scheme)


def stays(url: str, home: str, *, clicked: bool) -> bool:
    """Whether the window goes there itself. Opens the browser for what is elsewhere, if it was `clicked`.

    What a page loads or asks for by itself is not followed: that would tell another machine what is in the address.
    """
    found = place(url, home)
    if found is Place.BROWSER and clicked:
        webbrowser.open(url)
    return found is Place.HERE
