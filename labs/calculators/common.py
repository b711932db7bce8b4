"""Print the tables and draw the curves of the calculators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. The first column is text, aligned left; the other columns are numbers, aligned right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, ["-" * width for width in widths], *rows):
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *numbers]))


@dataclass(frozen=True)
class Panel:
    """One plot: lines over a shared horizontal axis, which is logarithmic with base 2, with a tick for each value."""

    x_label: str
    y_label: str
    xs: Sequence[float]
    lines: Mapping[str, Sequence[float]]
    levels: Mapping[str, float] = field(default_factory=dict)
    """Horizontal lines."""
    is_log: bool = False
    """Whether the vertical axis is logarithmic, too."""


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Draw the panels to a file, in the format of its suffix (PNG, for example). Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5.4 * len(panels), 4), layout="constrained", squeeze=False
    )  # [1, num_panels]
    for axis, panel in zip(axes[0], panels, strict=True):
        for name, ys in panel.lines.items():
            axis.plot(panel.xs, ys, marker="o", markersize=4, label=name)
        for i, (name, level) in enumerate(panel.levels.items()):
            axis.axhline(level, color="gray", linestyle=("--", ":", "-.")[i % 3], label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(panel.xs, [f"{x:,.0f}" for x in panel.xs], rotation=45)
        axis.minorticks_off()
        axis.set(xlabel=panel.x_label, ylabel=panel.y_label)
        if panel.is_log:
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, None)
        axis.grid(alpha=0.3)
        if len(panel.lines) + len(panel.levels) > 1:
            axis.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
