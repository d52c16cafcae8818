"""Progress bars in logs: the last state of a line that a program redraws, as tqdm, Keras and rich do. Pure."""

from __future__ import annotations

import re

COLOUR = r"\x1b\[[0-9;]*m"
"""Pattern of an escape sequence that sets a colour or style."""
_COLOUR = re.compile(COLOUR)
_CONTROL = re.compile(r"[\r\b]|\x1b\[[0-9;?]*[A-Za-ln-z]")
_TOKEN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|.", re.DOTALL)
_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ERASE = re.compile(r"\x1b\[[02]?K")
_RESET = re.compile(r"\x1b\[0?m")
_MAX_STYLES = 4
"""Colours and styles that a cell keeps, such as bold, a foreground and a background; a program may never reset them."""

Cell = tuple[str, str]
"""The colour and the character in one column of a terminal."""


def is_redrawn(text: str) -> bool:
    """Whether a text moves the cursor of a terminal, by a carriage return, a backspace or an escape sequence."""
    return _CONTROL.search(text) is not None


def may_be_redrawn(data: bytes) -> bool:
    """Whether a log has a character that `is_redrawn` looks for; much faster than looking at every line."""
    return b"\r" in data or b"\b" in data or b"\x1b" in data


def strip_colours(text: str) -> str:
    """Return a text without the escape sequences that set colours and styles."""
    return _COLOUR.sub("", text)


def last_state(line: str) -> str:
    """Return a line as a terminal shows it in the end; colours are kept, movements of the cursor are not."""
    if not is_redrawn(line):
        return line
    cells: list[Cell] = []
    for redraw in reversed(line.split("\r")):  # what was drawn later hides what was drawn before
        drawn = redraw.rstrip("\b")
        if len(_SEQUENCE.sub("", drawn)) > len(cells):
            cells += _draw(drawn)[len(cells) :]
        if _ERASE.search(redraw):
            break
    return _join(cells)


def _draw(text: str) -> list[Cell]:
    """Return the cells that a text without a carriage return draws."""
    cells: list[Cell] = []
    column, colour = 0, ""
    styles: list[str] = []
    for token in _TOKEN.findall(text):
        if token == "\b":
            column = max(0, column - 1)
        elif len(token) == 1:
            cells[column : column + 1] = [(colour, token)]
            column += 1
        elif token[-1] == "m":
            kept = [] if _RESET.fullmatch(token) else [*(style for style in styles if style != token), token]
            styles = kept[-_MAX_STYLES:]
            colour = "".join(styles)
        elif _ERASE.fullmatch(token):
            del cells[column:]
    return cells


def _join(cells: list[Cell]) -> str:
    """Return the cells as text, with an escape sequence where the colour changes, and without trailing blanks."""
    while cells and cells[-1][1] == " ":
        cells.pop()
    parts, current = [], ""
    for colour, character in cells:
        if colour != current:
            parts.append(("\x1b[0m" if current else "") + colour)
            current = colour
        parts.append(character)
    return "".join(parts) + ("\x1b[0m" if current else "")
