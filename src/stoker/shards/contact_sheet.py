"""Contact sheets: a grid of small images with captions, as one PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

GAP_PIXELS = 8
CAPTION_PIXELS = 18
BACKGROUND, TEXT, FRAME = "#ffffff", "#1e293b", "#cbd5e1"


def contact_sheet(tiles: Sequence[tuple[npt.NDArray[np.uint8], str]]) -> bytes:
    """Arrange square images of equal size in a grid, with captions below, and return the PNG."""
    side = tiles[0][0].shape[0]
    columns = math.ceil(math.sqrt(len(tiles)))
    rows = math.ceil(len(tiles) / columns)
    sheet = Image.new(
        "RGB",
        (GAP_PIXELS + columns * (side + GAP_PIXELS), GAP_PIXELS + rows * (side + CAPTION_PIXELS + GAP_PIXELS)),
        BACKGROUND,
    )
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for number, (pixels, caption) in enumerate(tiles):
        x = GAP_PIXELS + number % columns * (side + GAP_PIXELS)
        y = GAP_PIXELS + number // columns * (side + CAPTION_PIXELS + GAP_PIXELS)
        sheet.paste(Image.fromarray(pixels), (x, y))
        draw.rectangle((x - 1, y - 1, x + side, y + side), outline=FRAME)
        while caption and draw.textlength(caption, font) > side:
            caption = caption[:-2] + "…" if len(caption) > 2 else ""
        draw.text((x, y + side + 2), caption, fill=TEXT, font=font)
    out = io.BytesIO()
    sheet.save(out, "PNG")
    return out.getvalue()
