"""Tables for the terminal and for the HTML report, from one list of rows."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """Columns of numbers (and "-") to the right, of words to the left; `str` is aligned text that is Markdown too."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]

    def __str__(self) -> str:
        cells = [[str(cell) for cell in row] for row in self.rows]
        widths = [max(len(row[i]) for row in [list(self.header), *cells]) for i in range(len(self.header))]
        right = self._right()

        def line(row: Sequence[str]) -> str:
            padded = (cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right))
            return f"| {' | '.join(padded)} |"

        rule = "|".join("-" * (width + 1) + (":" if r else "-") for width, r in zip(widths, right))
        return "\n".join([line(self.header), f"|{rule}|", *map(line, cells)])

    def html(self) -> str:
        right = self._right()

        def line(cells: Sequence[object], tag: str) -> str:
            styled = (
                f"<{tag}{' class=right' if r else ''}>{html.escape(str(cell))}</{tag}>" for cell, r in zip(cells, right)
            )
            return f"<tr>{''.join(styled)}</tr>"

        body = "\n".join(line(row, "td") for row in self.rows)
        return f"<table>\n<thead>{line(self.header, 'th')}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"

    def _right(self) -> list[bool]:
        return [bool(self.rows) and all(_numeric(str(row[i])) for row in self.rows) for i in range(len(self.header))]


def _numeric(cell: str) -> bool:
    """A number with a sign or a unit, perhaps starred."""
    word = cell.removesuffix(" *")
    return word in ("-", "") or (" " not in word and word.lstrip("+-")[:1].isdigit())
