"""How pictures look: colours that colour-blind people tell apart, units on axes, nothing that carries no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

Dash = Literal["-", "--", ":", "-."]
# Okabe and Ito's palette, without its yellow, which is too light for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
DASHES: tuple[Dash, ...] = ("-", "--", ":", "-.")
GREY, INK, FAINT = "#BBBBBB", "#333333", "#E6E6E6"
MAX_LINES = len(COLOURS)  # in one panel; more settings get a panel each
MAX_PANELS = 24
_LOG_FROM = 25.0  # an axis whose largest value is so many times its smallest is logarithmic

_LINE_POINTS = 11.0  # from one label to the next

_SETTINGS: Mapping[str, object] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "tokenyard",  # so that the same runs give the same bytes
    "text.parse_math": False,  # a name of a user's may have dollar signs
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a report."""

    name: str  # of its files
    title: str
    caption: str  # what is to be known to read it
    figure: Figure


class Look(NamedTuple):
    """Of a line."""

    colour: str
    dash: Dash


def look(number: int) -> Look:
    """Of the setting or client with that number: colours first, then dashes."""
    return Look(COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)])


def styled() -> AbstractContextManager[None]:
    """Within it, figures are made and written."""
    settings: dict[Any, Any] = dict(_SETTINGS)  # matplotlib lists the names of all settings as a type
    return rc_context(settings)


def make_panels(
    count: int, *, columns: int = 3, size: tuple[float, float] = (3.3, 2.5), shares: tuple[bool, bool] = (True, True)
) -> tuple[Figure, list[Axes]]:
    """Small multiples, row by row. `size` is of one in inches, `shares` says which axes they have in common."""
    columns = min(columns, count)
    rows = -(-count // columns)
    width = max(size[0] * columns, 5.2)
    figure = Figure(figsize=(width, size[1] * rows + 0.45), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=shares[0], sharey=shares[1], squeeze=False)
    panels = list(grid.flat)
    for number, panel in enumerate(panels):
        panel.set_visible(number < count)
        if number < count and number + columns >= count:  # nothing below it
            panel.tick_params(labelbottom=True)
    return figure, panels[:count]


def key(figure: Figure, entries: Sequence[tuple[str, Look]]) -> None:
    """The names of the lines above all panels, each in its colour."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=one.colour, linestyle=one.dash, label=name) for name, one in entries]
    figure.legend(
        handles=lines,
        loc="outside upper left",
        ncols=_key_columns(figure, [name for name, _ in entries]),
        labelcolor="linecolor",
        handlelength=1.6,
        columnspacing=1.4,
    )


def _key_columns(figure: Figure, names: Sequence[str]) -> int:
    """As many as fit beside each other."""
    widest = max((len(name) for name in names), default=1) * 0.075 + 0.5  # inches
    return max(1, min(len(names), int(figure.get_figwidth() / widest)))


Label = tuple[float, float, str, str]
"""Where its point lies in the data, its text and its colour."""


def label_ends(figure: Figure, panels: Sequence[tuple[Axes, Sequence[Label]]]) -> None:
    """Name lines right of their ends, moved apart where they would overlap."""
    figure.draw_without_rendering()  # so that it is known where data lies
    for panel, labels in panels:
        _annotate(panel, labels, offset=6, align="left")


def label_points(figure: Figure, panels: Sequence[tuple[Axes, Sequence[Label]]]) -> None:
    """Name points of the left half on their right and the others on their left, moved apart."""
    figure.draw_without_rendering()
    for panel, labels in panels:
        middle = float(panel.transAxes.transform((0.5, 0.5))[0])
        lefts = [float(panel.transData.transform(one[:2])[0]) <= middle for one in labels]
        left = [one for one, is_left in zip(labels, lefts, strict=True) if is_left]
        right = [one for one, is_left in zip(labels, lefts, strict=True) if not is_left]
        _annotate(panel, left, offset=8, align="left")
        _annotate(panel, right, offset=-8, align="right")


def _annotate(panel: Axes, labels: Sequence[Label], *, offset: float, align: str) -> None:
    points_per_pixel = 72.0 / panel.figure.dpi
    heights = [float(panel.transData.transform(one[:2])[1]) * points_per_pixel for one in labels]
    order = sorted(range(len(labels)), key=heights.__getitem__)
    for number, place in zip(order, spread([heights[one] for one in order], _LINE_POINTS), strict=True):
        x, y, text, colour = labels[number]
        panel.annotate(
            text,
            (x, y),
            (offset, place - heights[number]),
            textcoords="offset points",
            color=colour,
            va="center",
            ha=align,
            annotation_clip=False,
        )


def spread(places: Sequence[float], step: float) -> list[float]:
    """Ascending places, moved as little as need be to lie `step` apart: those that overlap are centred together."""
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _top(groups[-2], step) + step > _bottom(groups[-1], step):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_bottom(group, step) + number * step for group in groups for number in range(len(group))]


def _bottom(group: Sequence[float], step: float) -> float:
    return sum(group) / len(group) - (len(group) - 1) / 2 * step


def _top(group: Sequence[float], step: float) -> float:
    return _bottom(group, step) + (len(group) - 1) * step


def is_wide(values: Sequence[float]) -> bool:
    """Whether positive values span so much that only a logarithmic axis shows all of them."""
    known = [value for value in values if value > 0]
    return bool(known) and len(known) == len(values) and max(known) / min(known) > _LOG_FROM


def log_axis(panel: Axes, which: str) -> None:
    """Logarithmic, with plain numbers."""
    if which == "x":
        panel.set_xscale("log")
    else:
        panel.set_yscale("log")
    axis = panel.xaxis if which == "x" else panel.yaxis
    axis.set_major_locator(LogLocator(numticks=7))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def linear_axis(panel: Axes, which: str) -> None:
    """Few ticks, thousands told apart."""
    axis = panel.xaxis if which == "x" else panel.yaxis
    axis.set_major_locator(MaxNLocator(nbins=5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def label_outer(panels: Sequence[Axes], x: str, y: str, *, columns: int = 3) -> None:
    """Titles of axes where they are not said by a neighbour already."""
    columns = min(columns, len(panels))
    for number, panel in enumerate(panels):
        if number + columns >= len(panels):
            panel.set_xlabel(x)
        if number % columns == 0:
            panel.set_ylabel(y)


def save(picture: Picture, folder: Path) -> tuple[Path, Path]:
    """PNG and SVG; the same runs give the same bytes."""
    picture.figure.draw_without_rendering()
    picture.figure.set_layout_engine("none")  # everything has its place; finding it twice more takes the most time
    png, svg = folder / f"{picture.name}.png", folder / f"{picture.name}.svg"
    picture.figure.savefig(png, dpi=160, metadata={"Software": None})
    picture.figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return png, svg
