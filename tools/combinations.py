"""Write `docs/combinations.md` from the table of what does not go together (`options/compatibility.py`).

The page also names what tests try together (`tests/extras/feature_pairs.py`).

python -m tools.combinations
"""

from pathlib import Path

from nanovllm_extras.options.compatibility import CONTRADICTIONS, Feature
from tests.extras.feature_pairs import FACTORS

PAGE = Path(__file__).parents[1] / "docs" / "combinations.md"
TEXT = """# What does not go together

Every option works with every other option and with every model, except for the pairs in this table. The engine
refuses such a pair when it starts, before it loads weights. The ValueError names both and recommends what works. A
feature without an option in parentheses is a model's. What a kernel cannot compute on a machine is not in the table:
`attention_backend="auto"` takes another kernel then. Nor is what one value needs by itself: ranks must divide the
model's heads and choose their own devices, a draft model needs K and V of one shape, and `mtp` needs a head in the
checkpoint.

`python -m tools.combinations` writes this page from the table of the code,
[`compatibility.py`](../nanovllm_extras/options/compatibility.py).

{contradictions}

## What is tried together

[`test_pairs.py`](../tests/extras/test_pairs.py) tries every two values of two lines of this table in one engine, unless
the table above refuses them. The long sweep of tests (`pytest -m slow`) tries every two values with every model. The
tokens must be those of an engine without the features, but with the same weights and the same bits of K and V. Where
numbers are rounded to 8 bits, another token may be chosen if it is almost as likely.

{factors}
"""


def make_page() -> str:
    """Return the text of the page."""
    rows = [f"| {with_options(row.first)} | {with_options(row.second)} | {row.reason} |" for row in CONTRADICTIONS]
    contradictions = "\n".join(["| this | and this | why not |", "|---|---|---|", *rows])
    lines = [f"| {factor} | {', '.join(levels)} |" for factor, levels in FACTORS.items()]
    return TEXT.format(contradictions=contradictions, factors="\n".join(["| feature | values |", "|---|---|", *lines]))


def with_options(feature: Feature) -> str:
    """Return the name of a feature, and its options."""
    options = ", ".join([f"`{name}`" for name in feature.options])
    return f"{feature.name} ({options})" if options else feature.name


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
