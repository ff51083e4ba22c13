"""The difference of the classes of a version as text: a matrix, sentences, an error message."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from freezer.serving.diff import REFERENCE, Difference, DiffRow, Pair, severity


def matrix(difference: Difference) -> Table:
    """The largest error ratio of every two classes, and of every class and the reference.

    Columns are numbered like rows.
    """
    table = Table("", "error ratio", box=None, pad_edge=False)
    for column in (*range(1, len(difference.classes) + 1), REFERENCE):
        table.add_column(str(column), justify="right")
    pairs = {
        frozenset((pair.one, pair.other)): pair
        for pair in (*difference.pairs, *difference.reference)
    }
    for number, name in enumerate(difference.classes, start=1):
        cells = []
        for other in (*difference.classes, REFERENCE):
            cells.append("-" if name == other else _cell(pairs[frozenset((name, other))]))
        table.add_row(str(number), name, *cells)
    return table


def _cell(pair: Pair) -> str:
    if not pair.num_compared:
        return "not compared"
    if pair.num_differing:
        return f"{pair.num_differing} differ"
    if pair.error_ratio is None:
        return "apart" if pair.apart else "equal"
    return f"{pair.error_ratio:.2f}" + (" apart" if pair.apart else "")


def sentences(difference: Difference) -> Iterator[str]:
    """What is missing in the matrix, and the pair that is furthest apart."""
    for name, why in difference.not_compared.items():
        yield f"{name}: {why}"
    yield from difference.notes
    for index, item in enumerate(difference.sets):
        if len(item.classes) < len(difference.classes):
            sizes = f" ({item})" if str(item) else ""
            yield (
                f"golden set {index}{sizes} is only in {', '.join(item.classes)}: the others were"
                " judged with other inputs"
            )
    compared = [pair for pair in difference.pairs if pair.worst]
    if compared:
        pair = max(compared, key=lambda pair: severity(pair.worst))
        yield f"furthest apart: {_place(difference, pair)}: {_figures(pair.worst)}"


def _place(difference: Difference, pair: Pair) -> str:
    """The two classes, the output and the golden inputs, as text."""
    row = pair.worst
    assert row is not None
    sizes = str(difference.sets[row.set_index])
    point = f" ({sizes})" if sizes else ""
    classes = f"{pair.one} and {pair.other}"
    return f"{classes}: output {row.output!r}, golden set {row.set_index}{point}"


def _figures(row: DiffRow | None) -> str:
    assert row is not None
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
            pairs.append(f"{_place(difference, pair)}: {pair.worst.problem}")
    return (
        f"{difference.model}:{difference.version} answers differently on different device classes:"
        f" {'; '.join(pairs)}. This exceeds the sum of both bounds: compare their recipes with"
        " `coldpress inspect --device-class`, and freeze the class again that is further from the"
        " reference"
    )
