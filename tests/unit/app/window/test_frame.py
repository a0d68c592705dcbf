"""Where a window stood, kept from one start to the next."""

import json

import pytest

from mlxinfer.app.window.frame import ZOOMS, Frame, can_be_grasped, nearest, read, write, zoomed


def test_what_was_written_is_read_again(tmp_path):
    frame = Frame(900, 700, -40, 25, 1.25, maximized=True)
    write(tmp_path / "data" / "window.json", frame)
    assert read(tmp_path / "data" / "window.json") == frame


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_place(tmp_path):
    (tmp_path / "data").write_text("a file")
    write(tmp_path / "data" / "window.json", Frame())
    assert read(tmp_path / "data" / "window.json") == Frame()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "null",
        '{"width": 5, "height": 1e9, "x": "1", "y": 2}',
        '{"width": true, "zoom": true}',
        '{"zoom": 7}',
        '{"x": 3}',
        '{"maximized": 1}',
        '{"width": NaN}',
        '{"a": "' + "x" * 5000 + '"}',
    ],
)
def test_a_file_that_holds_anything_else_gives_the_usual_window(tmp_path, text):
    (tmp_path / "window.json").write_text(text)
    assert read(tmp_path / "window.json") == Frame()


def test_what_is_right_in_a_file_is_used(tmp_path):
    (tmp_path / "window.json").write_text(json.dumps({"width": 640, "height": -1, "zoom": 2.0, "other": []}))
    assert read(tmp_path / "window.json") == Frame(width=640, zoom=2.0)


@pytest.mark.parametrize(
    ("box", "grasped"),
    [
        ((100, 100, 900, 700), True),
        ((-800, 100, 900, 700), True),
        ((-850, 100, 900, 700), False),
        ((1360, 100, 500, 700), False),
        ((100, 1000, 900, 700), False),
        ((100, -600, 900, 700), False),
        ((2000, 100, 900, 700), True),
    ],
)
def test_a_window_comes_back_where_a_hand_can_take_hold_of_it(box, grasped):
    assert can_be_grasped(box, [(0, 0, 1400, 1000), (1900, 0, 1400, 1000)]) is grasped


def test_zoom_goes_along_its_places_and_stops_at_the_ends():
    assert zoomed(1.0, 1) == 1.1
    assert zoomed(1.0, -1) == 0.9
    assert zoomed(2.37, 0) == 1.0
    assert zoomed(ZOOMS[-1], 1) == ZOOMS[-1]
    assert zoomed(ZOOMS[0], -1) == ZOOMS[0]
    assert nearest(1.2500001) == 1.25
