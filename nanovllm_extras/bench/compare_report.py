"""Write a comparison as text, as a table in Markdown, or as JSON."""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median

import torch

from nanovllm_extras.bench.compare_figures import MIN_TURNS, Comparison, Figure, TokenComparison

HEADS = ("", "base", "extension", "ratio of each turn", "verdict")


@dataclass(frozen=True)
class Report:
    """The result of a comparison."""

    package: str
    model: str
    extension: str
    options: Mapping[str, object]
    workload: str
    num_requests: int
    num_turns: int
    computed_by: tuple[str, str]
    """Of the base, and of the extension."""
    figures: Mapping[str, Comparison]
    peak_memory_bytes: tuple[int, int]
    """Of the base's process, and of the extension's."""
    tokens: TokenComparison

    @property
    def title(self) -> str:
        return f"{self.extension} on {self.package}, {self.model}"

    @property
    def summary(self) -> str:
        """Return what was run, and what computed if the sides differ in that."""
        options = "".join(f", {name} {value}" for name, value in self.options.items())
        ways = "" if len(set(self.computed_by)) == 1 else (
            f" The base is computed by {self.computed_by[0]}, the extension by {self.computed_by[1]}."
        )  # fmt: skip
        return (
            f"Workload {self.workload} (requests: {self.num_requests}{options}). Medians of {self.num_turns} turns "
            f"after one warm-up; in parentheses the smallest and the largest.{ways}"
        )

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table, for each figure."""
        rows: list[tuple[str, ...]] = []
        for one in self.figures.values():
            figure = one.figure
            values = spread(one.base, figure), spread(one.extension, figure)
            rows.append((figure.label, *values, ratio_text(one.ratios), one.verdict))
        base, extension = (size / 2**20 for size in self.peak_memory_bytes)
        if base and extension:  # else the system does not say
            ratio = f"{extension / base:.3f}"
            rows.append(("peak memory, MiB", f"{base:,.0f}", f"{extension:,.0f}", ratio, "one value each"))
        return rows

    @property
    def token_text(self) -> str:
        """Return whether the tokens are equal, or where they differ first."""
        tokens = self.tokens
        if tokens.first is None:
            text = f"Tokens: equal in every request ({tokens.num_requests}) of every turn."
        else:
            first = tokens.first
            text = (
                f"Tokens: {len(tokens.differing)} of {tokens.num_requests} requests differ. First difference: request "
                f"{first.request}, position {first.position} (base {name_token(first.base_token)}, extension "
                f"{name_token(first.extension_token)}), in turn {first.turn + 1}."
            )
        if tokens.unsteady:
            text += (
                f" The base differs from itself between turns in {len(tokens.unsteady)} requests: kernels may round "
                f"differently in other batches."
            )
        return text

    @property
    def rule(self) -> str:
        """Return how the verdicts are made, and how often they are wrong."""
        how = "every run of one side is better than every run of the other" if self.num_turns == MIN_TURNS else (
            f"a rank test of the {self.num_turns} runs of each side"
        )  # fmt: skip
        return (
            f"Better or worse: {how}; equal engines show that in fewer than 1 of 100 figures. Otherwise the difference "
            f"is below the spread of the runs."
        )


def spread(values: list[float], figure: Figure) -> str:
    """Return the median, and the smallest and the largest value if they differ."""
    low, middle, high = (
        f"{value * figure.scale:,.{figure.decimals}f}" for value in (min(values), median(values), max(values))
    )
    return middle if low == high else f"{middle} ({low} to {high})"


def ratio_text(ratios: list[float] | None) -> str:
    """Return the median of the ratios, with the smallest and the largest; a dash if there are none."""
    if ratios is None:
        return "–"
    return f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def name_token(token_id: int | None) -> str:
    return "has ended" if token_id is None else f"token {token_id}"


def as_text(report: Report) -> str:
    """Return the report for a terminal."""
    rows = [HEADS, *report.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADS))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([report.title, report.summary, "", *table, "", report.token_text, report.rule])


def as_markdown(report: Report) -> str:
    """Return the report as a table for a page."""
    head = ["figure", *HEADS[1:]]
    rows = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in report.rows)]
    table = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([f"**{report.title}.** {report.summary}", "", *table, "", report.token_text, "", report.rule])


def as_json(report: Report) -> dict[str, object]:
    """Return all values, of every turn, and the machine."""
    return {
        "package": report.package,
        "model": report.model,
        "extension": report.extension,
        "options": dict(report.options),
        "workload": report.workload,
        "num_requests": report.num_requests,
        "num_turns": report.num_turns,
        "base_computed_by": report.computed_by[0],
        "extension_computed_by": report.computed_by[1],
        "figures": {name: one.report() for name, one in report.figures.items()},
        "base_peak_memory_bytes": report.peak_memory_bytes[0],
        "extension_peak_memory_bytes": report.peak_memory_bytes[1],
        "tokens": {"are_equal": report.tokens.first is None, **asdict(report.tokens)},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
    }
