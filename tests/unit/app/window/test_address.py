"""What a link in the window may do."""

import webbrowser

import pytest

from mlxinfer.app.window.address import Place, place, stays

HOME = "http://127.0.0.1:8123/app/?key=secret"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8123/app/en/", Place.HERE),
        ("http://127.0.0.1:8123/app/export/0.md", Place.HERE),
        ("blob:http://127.0.0.1:8123/1c0f", Place.HERE),
        ("about:blank", Place.HERE),
        ("http://127.0.0.1:8124/app/", Place.BROWSER),
        ("http://localhost:8123/", Place.BROWSER),
        ("https://127.0.0.1:8123/", Place.BROWSER),
        ("http://127.0.0.1:8123@example.com/", Place.BROWSER),
        ("https://example.com/?q=1", Place.BROWSER),
        ("mailto:a@example.com", Place.BROWSER),
        ("blob:https://example.com/1c0f", Place.NOWHERE),
        ("file:///etc/passwd", Place.NOWHERE),
        ("javascript:alert(1)", Place.NOWHERE),
        ("data:text/html,<h1>x", Place.NOWHERE),
        ("x-apple.systempreferences:", Place.NOWHERE),
        ("http://", Place.NOWHERE),
        ("http://127.0.0.1:port/", Place.NOWHERE),
        ("http://[::1/", Place.NOWHERE),
        ("", Place.NOWHERE),
    ],
)
def test_only_the_page_s_own_origin_is_here_and_only_web_and_mail_go_to_the_browser(url, expected):
    assert place(url, HOME) is expected


def test_the_usual_port_may_be_left_out():
    assert place("http://example.com:80/x", "http://example.com/") is Place.HERE


def test_the_browser_is_opened_for_what_was_clicked_and_for_nothing_else(monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert stays(HOME, HOME, clicked=True)
    assert not stays("https://example.com/", HOME, clicked=True)
    assert not stays("https://example.com/image.png", HOME, clicked=False)
    assert not stays("file:///etc/passwd", HOME, clicked=True)
    assert opened == ["https://example.com/"]
