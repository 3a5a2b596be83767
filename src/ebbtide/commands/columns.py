"""Plain aligned columns, which a pipe gets as a terminal does."""

from collections.abc import Sequence

GAP = "  "


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line a row: the first column to the left, all others to the right.

    Args:
        rows: As many cells in each.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for first, *others in rows:
        cells = [
            first.ljust(widths[0]),
            *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True)),
        ]
        lines.append(GAP.join(cells).rstrip())
    return lines
