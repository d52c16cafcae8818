"""A contact sheet: small images with captions, as one picture."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

GAP = 8
CAPTION = 18
PAPER, INK, FRAME = "#ffffff", "#1e293b", "#cbd5e1"


def contact_sheet(tiles: Sequence[tuple[npt.NDArray[np.uint8], str]]) -> bytes:
    """Lay squares of one size out in rows, a caption below each, and give the PNG."""
    side = tiles[0][0].shape[0]
    columns = math.ceil(math.sqrt(len(tiles)))
    rows = math.ceil(len(tiles) / columns)
    sheet = Image.new("RGB", (GAP + columns * (side + GAP), GAP + rows * (side + CAPTION + GAP)), PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for number, (pixels, caption) in enumerate(tiles):
        x = GAP + number % columns * (side + GAP)
        y = GAP + number // columns * (side + CAPTION + GAP)
        sheet.paste(Image.fromarray(pixels), (x, y))
        draw.rectangle((x - 1, y - 1, x + side, y + side), outline=FRAME)
        while caption and draw.textlength(caption, font) > side:
            caption = caption[:-2] + "…" if len(caption) > 2 else ""
        draw.text((x, y + side + 2), caption, fill=INK, font=font)
    out = io.BytesIO()
    sheet.save(out, "PNG")
    return out.getvalue()
