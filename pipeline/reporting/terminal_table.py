"""Tables that drop columns until they fit the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

Cells = Mapping[str, Text | str]
"""The cells of a row, by column."""

UNLIMITED = 1000
"""Columns of a terminal that every table fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns of a table.

    Attributes:
        names: every column, in order.
        numeric: columns that are aligned to the right.
        dropped_first: columns to drop on a narrow terminal, in order.
        optional: columns to drop if all their cells are empty.
    """

    names: Sequence[str]
    numeric: Sequence[str]
    dropped_first: Sequence[str]
    optional: Sequence[str] = ()


def fitting_table(
    columns: Columns, rows: Sequence[Cells], console: Console, *, title: str | None = None
) -> Table:
    """Return a table with the columns that fit a console."""
    used = {name for cells in rows for name, cell in cells.items() if cell}
    names = [name for name in columns.names if name not in columns.optional or name in used]
    unlimited = console.options.update(max_width=UNLIMITED)
    table = _table(columns, names, rows, title)
    for dropped in columns.dropped_first:
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            break
        names = [name for name in names if name != dropped]
        table = _table(columns, names, rows, title)
    return table


def _table(
    columns: Columns, names: Sequence[str], rows: Sequence[Cells], title: str | None
) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=name != columns.names[0])
        if name in columns.numeric:
            table.columns[-1].justify = "right"
    for cells in rows:
        table.add_row(*(cells[name] for name in names))
    return table
