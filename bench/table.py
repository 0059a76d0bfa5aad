"""Tables as aligned text that is Markdown too, so that what a command prints can be pasted into a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def text_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Numbers (and "-") to the right, words to the left."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    right = [bool(cells) and all(_numeric(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right))
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (width + 1) + (":" if r else "-") for width, r in zip(widths, right))
    return "\n".join([line(header), f"|{rule}|", *map(line, cells)])


def _numeric(cell: str) -> bool:
    """A number with a sign or a unit, perhaps starred."""
    word = cell.removesuffix(" *")
    return word in ("-", "") or (" " not in word and word.lstrip("+-")[:1].isdigit())
