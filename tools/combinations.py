"""Write `docs/combinations.md` from the table of what does not go together (`nanovllm_extras/compatibility.py`).

python -m tools.combinations
"""

from collections.abc import Iterable
from pathlib import Path

from nanovllm_extras.compatibility import CONTRADICTIONS, Feature, Row

PAGE = Path(__file__).parents[1] / "docs" / "combinations.md"
TEXT = """# What does not go together

Every option works with every other option and with every model, except for the pairs in these tables. The engine
refuses such a pair when it starts, before it loads weights. The ValueError names both and recommends what works. A
feature without an option in parentheses is a model's. The tables do not have what a kernel cannot compute on a machine,
for which `attention_backend="auto"` takes another kernel.

`python -m tools.combinations` writes this page from the table of the code,
[`compatibility.py`](../nanovllm_extras/compatibility.py).

## Contradictions

{contradictions}

## Not written yet

Only the code is missing for these pairs, or a test.

{to_do}
"""


def make_page() -> str:
    """Return the text of the page."""
    contradictions = as_table([row for row in CONTRADICTIONS if not row.is_to_do])
    return TEXT.format(contradictions=contradictions, to_do=as_table([row for row in CONTRADICTIONS if row.is_to_do]))


def as_table(rows: Iterable[Row]) -> str:
    lines = [f"| {with_options(row.first)} | {with_options(row.second)} | {row.reason} |" for row in rows]
    return "\n".join(["| this | and this | why not |", "|---|---|---|", *lines])


def with_options(feature: Feature) -> str:
    """Return the name of a feature, and its options."""
    options = ", ".join([f"`{name}`" for name in feature.options])
    return f"{feature.name} ({options})" if options else feature.name


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
