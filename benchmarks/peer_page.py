"""The page and the plot of benchmarks/peers.py."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.pages import machine, markdown_table, today
from benchmarks.peer_contest import SQNR_MIN_DB, Contest, ContestOptions, Entrant
from benchmarks.peer_engines import PEERS
from freezer.spec import SamplingPolicy
from freezer.timing import Speedup, speedup

OWN, CONSENTED, DEFAULT = "coldpress", "consent", "openvino"
PACKAGES = ("onnx", "onnxscript", "onnxruntime", "openvino", "olive-ai")
DIFFERENT = "†"
ALIKE = 0.97
"""A smaller ratio to OpenVINO counts as slower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """The published artifact of a model among its peers.

    Attributes:
        gain: over eager; None if it was not timed.
        best: the fastest peer, by where it runs: `defaults`, or `any` with those at other settings.
            Peers whose outputs differ do not count.
        ratios: how many times as fast as these the published artifact is.
    """

    contest: Contest
    gain: Speedup | None
    best: dict[str, str]
    ratios: dict[str, Speedup]


def standing(contest: Contest) -> Standing:
    """Where the published artifact of a model stands."""
    timed = contest.timed
    medians = {name: statistics.median(entrant.medians_ms) for name, entrant in timed.items()}
    best = dict[str, str]()
    for group, kinds in {"defaults": {"defaults"}, "any": {"defaults", "settings"}}.items():
        rivals = [
            name
            for name, entrant in timed.items()
            if PEERS[name].at in kinds and not entrant.differs
        ]
        if rivals:
            best[group] = min(rivals, key=medians.__getitem__)
    own = OWN in timed
    return Standing(
        contest=contest,
        gain=_ratio(contest, OWN, "eager") if own and "eager" in timed else None,
        best=best,
        ratios={group: _ratio(contest, OWN, rival) for group, rival in best.items()} if own else {},
    )


def _ratio(contest: Contest, name: str, other: str) -> Speedup:
    """How many times as fast as another an entrant is."""
    return speedup(contest.sampling(), name, eager=other, num_candidates=1, policy=SamplingPolicy())


def render(
    contests: Sequence[Contest], options: ContestOptions, command: str, revision: str, plot: str
) -> str:
    """The whole page.

    Args:
        contests: in the order of the tables.
        options: of the run.
        command: that ran it.
        revision: of the code.
        plot: file name of the plot.
    """
    standings = [standing(contest) for contest in contests]
    lines = [
        f"# Published artifacts against peers, {today()}",
        *("", f"`{command}`", ""),
        *machine(),
        (
            f"- Peers: {', '.join(f'{package} {_version(package)}' for package in PACKAGES)};"
            f" Coldpress at {revision}"
        ),
        f"- Load average when the first contest began: {contests[0].load:.2f}",
        "",
        (
            f"float32, the first point of each catalog entry, {_threads(options.num_threads)}, the"
            " same inputs for all. Each entrant"
        ),
        (
            f"has its own process; one runs at a time, in blocks of at least {options.block_ms:.0f}"
            " ms, in a new random order each"
        ),
        (
            f"round, until {options.rounds} rounds were undisturbed. A time is the median of the"
            " rounds' medians; intervals are 95%,"
        ),
        "by paired bootstrap over rounds. [Protocol and peers]"
        "(../../docs/guides/compare-engines.md).",
        "",
        "## Summary",
        "",
        *_summary(standings),
        "",
        f"![times as fast as eager, for each model and entrant]({plot})",
        "",
        *_consented(contests),
        "## All entrants",
        "",
        (
            f"How many times as fast as eager. {DIFFERENT}: the outputs are not those of float32"
            f" (SQNR against eager below {SQNR_MIN_DB:.0f} dB, or other"
        ),
        (
            "integers), so it does not compete. **Bold**: the fastest of those that compete. —: did"
            " not run, see below."
        ),
        "",
        *_all(contests),
        "",
        "## Details",
        "",
        (
            "`spins`: how long the entrant's threads used CPUs after a block; the next one waits"
            " for them. `idle`: CPU time that the"
        ),
        "entrant used while others ran, as a share of that time.",
        "",
        *_details(contests),
        "",
        "## What did not run",
        "",
        *_problems(contests),
    ]
    return "\n".join(lines) + "\n"


def summary_lines(contests: Sequence[Contest]) -> list[str]:
    """The first table, as the README shows it."""
    return _summary([standing(contest) for contest in contests])


def _summary(standings: Sequence[Standing]) -> list[str]:
    head = (
        *("model", "eager ms", "published recipe", "times eager (95%)"),
        *(
            "best peer at defaults",
            "published / it (95%)",
            "best peer at any settings",
            "published / it (95%)",
        ),
    )
    rows = [_summary_row(one) for one in standings]
    gains = [one.gain.value for one in standings if one.gain]
    ratios = {
        group: [one.ratios[group].value for one in standings if group in one.ratios]
        for group in ("defaults", "any")
    }
    rows.append(
        [
            "**geometric mean**",
            "",
            "",
            _mean(gains),
            "",
            _mean(ratios["defaults"]),
            "",
            _mean(ratios["any"]),
        ]
    )
    return markdown_table(head, rows)


def _summary_row(one: Standing) -> list[str]:
    timed = one.contest.timed
    cells = [one.contest.model + (" (disturbed)" if one.contest.disturbed and timed else "")]
    cells.append(_ms(timed["eager"]) if "eager" in timed else "—")
    cells.append(timed[OWN].note if OWN in timed else "—")
    cells.append(_interval(one.gain))
    for group in ("defaults", "any"):
        rival = one.best.get(group)
        cells.append(f"{PEERS[rival].title}, {_ms(timed[rival])} ms" if rival else "—")
        cells.append(_interval(one.ratios.get(group)))
    return cells


def _consented(contests: Sequence[Contest]) -> list[str]:
    """The artifacts with consent to lower precision, beside eager and OpenVINO at its defaults."""
    rows, slower = list[list[str]](), list[str]()
    ratios: dict[str, list[float]] = {"eager": [], DEFAULT: []}
    for one in contests:
        entrant = one.timed.get(CONSENTED)
        if entrant is None:
            continue
        cells = [one.model, _ms(entrant), entrant.note]
        for name, values in ratios.items():
            ratio = _ratio(one, CONSENTED, name) if name in one.timed else None
            cells.append(_interval(ratio))
            if ratio is None:
                continue
            values.append(ratio.value)
            if name == DEFAULT and ratio.value < ALIKE:
                slower.append(one.model)
        rows.append(cells)
    if not rows:
        return []
    rows.append(["**geometric mean**", "", "", *map(_mean, ratios.values())])
    head = ("model", "ms", "recipe, bound and measured", "times eager", "times OpenVINO")
    return [
        "## With consent to bfloat16 and int8",
        "",
        "Within a budget on held-out samples, beside OpenVINO at its defaults; intervals are 95%.",
        f"Below {ALIKE} of OpenVINO: {', '.join(slower) or 'none'}.",
        "",
        *markdown_table(head, rows),
        "",
    ]


def _all(contests: Sequence[Contest]) -> list[str]:
    names = [
        name for name in PEERS if name != "eager" and any(name in one.timed for one in contests)
    ]
    rows, gains = list[list[str]](), dict[str, list[float]]()
    for one in contests:
        timed = one.timed
        eager = timed.get("eager")
        times = (
            {}
            if eager is None
            else {name: _gain(timed[name], eager) for name in names if name in timed}
        )
        fair = {name: gain for name, gain in times.items() if not timed[name].differs}
        best = max(fair, key=fair.__getitem__, default="")
        for name, gain in fair.items():
            gains.setdefault(name, []).append(gain)
        cells = []
        for name in names:
            mark = DIFFERENT if name in times and name not in fair else ""
            text = f"{times[name]:.2f}{mark}" if name in times else "—"
            cells.append(f"**{text}**" if name == best else text)
        rows.append([one.model, "—" if eager is None else _ms(eager), *cells])
    means = [f"{_mean(gains.get(name, []))} ({len(gains.get(name, []))})" for name in names]
    rows.append(["**geometric mean** (models)", "", *means])
    return markdown_table(["model", "eager ms", *(PEERS[name].title for name in names)], rows)


def _details(contests: Sequence[Contest]) -> list[str]:
    head = (
        *(
            "model",
            "entrant",
            "ms",
            "middle half of rounds",
            "build s",
            "SQNR dB",
            "max abs error",
            "spins ms",
            "idle",
        ),
        "settings",
    )
    rows = []
    for one in contests:
        rounds = (
            f"{len(next(iter(one.timed.values())).medians_ms) if one.timed else 0} rounds,"
            f" {one.num_dropped} dropped"
        )
        rows.append([f"**{one.model}**", f"{rounds}, {one.seconds:.0f} s", *([""] * 8)])
        rows += [_detail(one.model, entrant) for entrant in one.timed.values()]
    return markdown_table(head, rows)


def _detail(model: str, entrant: Entrant) -> list[str]:
    medians = list(entrant.medians_ms)
    low, _, high = statistics.quantiles(medians, n=4) if len(medians) > 1 else (medians[0],) * 3
    sqnr = "exact" if entrant.sqnr_db is None else f"{entrant.sqnr_db:.0f}"
    return [
        *(
            model,
            PEERS[entrant.name].title,
            _ms(entrant),
            f"{_figure(low)} to {_figure(high)}",
            f"{entrant.build_s:.1f}",
        ),
        sqnr + (f", {entrant.num_different} integers differ" if entrant.num_different else ""),
        f"{entrant.max_abs_err:.1e}",
        f"{1e3 * entrant.spun_s:.0f}",
        f"{100 * entrant.idle_cpu:.1f}%",
        entrant.note,
    ]


def _problems(contests: Sequence[Contest]) -> list[str]:
    found = dict[tuple[str, str], list[str]]()
    for one in contests:
        for entrant in one.entrants:
            if entrant.problem:
                found.setdefault((entrant.name, entrant.problem), []).append(one.model)
    lines = [
        f"- {PEERS[name].title}:"
        f" {'all models' if len(models) == len(contests) else ', '.join(models)}: {problem}"
        for (name, problem), models in found.items()
    ]
    return lines or ["Everything ran."]


def draw(contests: Sequence[Contest], path: Path) -> None:
    """Draw how many times as fast as eager each entrant is, a row for each model."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    names = [
        name for name in PEERS if name != "eager" and any(name in one.timed for one in contests)
    ]
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.36 * len(contests)), layout="constrained")
    colors = dict(zip(names, pyplot.get_cmap("tab20").colors, strict=False))  # type: ignore[attr-defined]
    for name in names:
        own = name in (OWN, CONSENTED)
        color = "black" if name == OWN else colors[name]
        for row, one in enumerate(contests):
            if {name, "eager"} <= one.timed.keys():
                hollow = one.timed[name].differs and name != CONSENTED
                axes.scatter(
                    _gain(one.timed[name], one.timed["eager"]),
                    row,
                    s=70 if own else 32,
                    zorder=3 if own else 2,
                    facecolors="none" if hollow else color,
                    edgecolors=color,
                    marker="D" if own else "o" if PEERS[name].at == "defaults" else "^",
                    label=PEERS[name].title,
                )
    axes.axvline(1, color="gray", linewidth=1)
    axes.set_xscale("log")
    ticks = [
        tick
        for tick in (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12)
        if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]
    ]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(contests)), [one.model for one in contests])
    axes.invert_yaxis()
    axes.grid(axis="both", alpha=0.3)
    axes.set_xlabel("times as fast as eager (more is better; hollow: outputs are not float32's)")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(
        unique.values(),
        unique,
        loc="outside lower center",
        ncols=3,
        fontsize="small",
        frameon=False,
    )
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def versions() -> dict[str, str]:
    """The versions that the results depend on."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", *PACKAGES)},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _gain(entrant: Entrant, eager: Entrant) -> float:
    return statistics.median(eager.medians_ms) / statistics.median(entrant.medians_ms)


def _mean(values: Sequence[float]) -> str:
    return f"{math.exp(statistics.fmean(map(math.log, values))):.2f}" if values else "—"


def _interval(one: Speedup | None) -> str:
    return "—" if one is None else f"{one.value:.2f} ({one.low:.2f}-{one.high:.2f})"


def _ms(entrant: Entrant) -> str:
    return _figure(statistics.median(entrant.medians_ms))


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _threads(num: int) -> str:
    of: Callable[[int], str] = lambda count: f"{count} thread" + ("s" if count != 1 else "")  # noqa: E731
    return f"{of(num)} on {len(os.sched_getaffinity(0))} CPUs"
