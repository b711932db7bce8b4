"""The page of what does not go together is that of the table."""

from tools import combinations


def test_the_page_is_current():
    assert combinations.PAGE.read_text(encoding="utf-8") == combinations.make_page(), "run python -m tools.combinations"
