"""A difference for people: the matrix, and what is worth a sentence. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from freezer.difference import REFERENCE, Difference, DiffRow, Pair


def matrix(found: Difference) -> Table:
    """The worst error ratio of every two classes, and of every class against the reference. Columns are numbered as rows are."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("error ratio")
    for number in range(1, len(found.classes) + 1):
        table.add_column(str(number), justify="right")
    table.add_column(REFERENCE, justify="right")
    pairs = {frozenset((pair.one, pair.other)): pair for pair in (*found.pairs, *found.to_reference)}
    for number, name in enumerate(found.classes, start=1):
        others = ["-" if name == other else _cell(pairs[frozenset((name, other))]) for other in (*found.classes, REFERENCE)]
        table.add_row(str(number), name, *others)
    return table


def _cell(pair: Pair) -> str:
    if not pair.rows:
        return "not compared"
    if pair.num_differing:
        return f"{pair.num_differing} differ"
    ratio = "equal" if pair.error_ratio is None else f"{pair.error_ratio:.2f}"
    return f"{ratio} apart" if pair.apart else ratio


def sentences(found: Difference) -> Iterator[str]:
    """What limits the matrix, and the pair that is furthest apart."""
    for name, why in found.not_compared.items():
        yield f"{name}: {why}"
    yield from found.notes
    for index, item in enumerate(found.sets):
        if len(item.classes) < len(found.classes):
            only, sizes = ", ".join(item.classes), f" ({item})" if str(item) else ""
            yield f"golden set {index}{sizes} is of {only} alone: the others were judged with other inputs"
    for pair in found.pairs:
        if not pair.rows:
            yield f"{pair.one} and {pair.other} keep no output of the same golden inputs: nothing tells how far they are apart"
    if found.worst is not None and found.worst.worst is not None:
        pair, row = found.worst, found.worst.worst
        yield f"furthest apart: {pair.one} and {pair.other}: {found.where(row)}: {_figures(row)}"
    elif len(found.classes) < 2:
        yield f"{len(found.classes)} class{'' if len(found.classes) == 1 else 'es'} with outputs: there is no pair to compare"


def _figures(row: DiffRow) -> str:
    if row.error_ratio is None:
        return row.problem or f"all {row.num_elements} elements are equal"
    allowed = f", rmse {row.rmse:.3g}, at most {row.bound:.3g} is allowed"
    return f"error ratio {row.error_ratio:.2f}, max abs err {row.max_abs_err:.3g}{allowed}"


def problem(found: Difference) -> str:
    """What is wrong with a version whose classes are apart, with every pair that is."""
    pairs = []
    for pair in found.pairs:
        if pair.apart and pair.worst is not None:
            pairs.append(f"{pair.one} and {pair.other}: {found.where(pair.worst)}: {pair.worst.problem}")
    return (
        f"{found.model}:{found.version} answers differently on different device classes: {'; '.join(pairs)}. That is more than the "
        "gate allows both together: compare their recipes with `coldpress inspect --device-class`, and freeze anew the class that "
        "is further from the reference"
    )
