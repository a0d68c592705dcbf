"""Draws the icon: `python -m mlxinfer.app.packaging.icon FOLDER` writes icon.png and an iconset for `iconutil`.

A speech bubble with two lines of text. Edges lie on whole pixels at 16 px, where most icons blur.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SIZES = (16, 32, 128, 256, 512)
"""Points; an iconset has each once more at twice the pixels."""
SIZE = 512
"""Pixels of icon.png, which the Linux window shows and from which PyInstaller makes the Mac's .icns."""
_OVER = 4
_TOP, _BOTTOM = (58, 110, 230), (96, 52, 190)
_WHITE, _INK = (255, 255, 255), (62, 66, 190)


def draw(size: int) -> Any:
    """A Pillow image of `size` by `size` pixels, RGBA."""
    from PIL import Image, ImageDraw

    side = size * _OVER
    unit = side / 16
    shape, fill = Image.new("L", (side, side), 0), Image.new("RGBA", (1, side))
    ImageDraw.Draw(shape).rounded_rectangle((unit / 2, unit / 2, side - unit / 2, side - unit / 2), 3.5 * unit, 255)
    for y in range(side):
        shares = (round(a + (b - a) * y / side) for a, b in zip(_TOP, _BOTTOM, strict=True))
        fill.putpixel((0, y), (*shares, 255))
    icon = Image.new("RGBA", (side, side), (0, 0, 0, 0))
    icon.paste(fill.resize((side, side)), mask=shape)
    pen = ImageDraw.Draw(icon)

    def box(left: float, top: float, right: float, bottom: float) -> tuple[float, ...]:
        return left * unit, top * unit, right * unit - 1, bottom * unit - 1

    pen.rounded_rectangle(box(3, 3, 13, 11), 1.5 * unit, _WHITE)
    pen.polygon([(4.5 * unit, 10.5 * unit), (8.5 * unit, 10.5 * unit), (4.5 * unit, 13.5 * unit)], _WHITE)
    pen.rectangle(box(5, 5, 11, 6), _INK)
    pen.rectangle(box(5, 8, 9, 9), _INK)
    return icon.resize((size, size), Image.Resampling.BOX)


def write(folder: Path) -> None:
    """icon.png and icon.iconset/ in `folder`, which is made. Raises OSError."""
    iconset = folder / "icon.iconset"
    iconset.mkdir(parents=True, exist_ok=True)
    draw(SIZE).save(folder / "icon.png", optimize=True)
    for size in SIZES:
        draw(size).save(iconset / f"icon_{size}x{size}.png", optimize=True)
        draw(2 * size).save(iconset / f"icon_{size}x{size}@2x.png", optimize=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
