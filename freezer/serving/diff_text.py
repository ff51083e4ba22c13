"""The difference of the classes of a version as text: a matrix, sentences, an error message."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from freezer.serving.diff import REFERENCE, Difference, DiffRow, Pair, severity


def matrix(difference: Difference) -> Table:
    """The largest error ratio of every two classes, and of every class and the reference.

    Columns are numbered like rows.
    """
    cells = {}
    for pair in (*difference.pairs, *difference.reference):
        cells[pair.one, pair.other] = cells[pair.other, pair.one] = _cell(pair)
    table = Table("", "error ratio", box=None, pad_edge=False)
    columns = (*difference.classes, REFERENCE)
    for number, column in enumerate(columns, start=1):
        header = REFERENCE if column == REFERENCE else str(number)
        table.add_column(header, justify="right")
    for number, name in enumerate(difference.classes, start=1):
        row = [cells.get((name, column), "-") for column in columns]
        table.add_row(
            str(number),
            name,
            *row,
        )
    return table


def _cell(pair: Pair) -> str:
    if not pair.num_compared:
        return "not compared"
    if pair.num_differing:
        return f"{pair.num_differing} differ"
    if pair.error_ratio is None:
        return "apart" if pair.apart else "equal"
    suffix = " apart" if pair.apart else ""
    return f"{pair.error_ratio:.2f}{suffix}"


def sentences(difference: Difference) -> Iterator[str]:
    """What is missing in the matrix, and the pair that is furthest apart."""
    for name, why_not in difference.not_compared.items():
        yield f"{name}: {why_not}"
    yield from difference.notes
    for index, golden in enumerate(difference.sets):
        if len(golden.classes) < len(difference.classes):
            yield (
                f"golden set {index} is only in {', '.join(golden.classes)}: the others were judged"
                " with other inputs"
            )
    worst = [(pair, pair.worst) for pair in difference.pairs if pair.worst]
    if worst:
        pair, row = max(
            worst,
            key=lambda item: severity(item[1]),
        )
        yield f"furthest apart: {_where(difference, pair, row)}: {_figures(row)}"


def _where(
    difference: Difference,
    pair: Pair,
    row: DiffRow,
) -> str:
    """The two classes, the output and the golden inputs, as text."""
    point = difference.sets[row.set_index].point
    sizes = "".join(f", {name} {size}" for name, size in point.items())
    classes = f"{pair.one} and {pair.other}"
    return f"{classes}: output {row.output!r}, golden set {row.set_index}{sizes}"


def _figures(row: DiffRow) -> str:
    if row.error_ratio is None:
        return row.problem or f"all {row.num_elements} elements are equal"
    return (
        f"error ratio {row.error_ratio:.2f}, max abs err {row.max_abs_err:.3g}, rmse"
        f" {row.rmse:.3g}, allowed {row.bound:.3g}"
    )


def problem(difference: Difference) -> str:
    """Error message for a version whose classes are apart; lists every pair."""
    pairs = []
    for pair in difference.pairs:
        if pair.apart and pair.worst:
            pairs.append(f"{_where(difference, pair, pair.worst)}: {pair.worst.problem}")
    return (
        f"{difference.model}:{difference.version} answers differently on different device classes:"
        f" {'; '.join(pairs)}. This exceeds the sum of both bounds: compare their recipes with"
        " `coldpress inspect --device-class`, and freeze the class again that is further from the"
        " reference"
    )
