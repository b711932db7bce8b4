"""`tools/count_lines.py`: docstrings, comments and blank lines do not count."""

from tools.count_lines import count_code, count_package

SOURCE = '''"""A docstring
of two lines."""

import os  # counts


# a comment
class A:
    x: int = 1
    """Describes the field."""
    text = """a value
    of two lines"""

    def f(self):
        """A docstring."""
        return {
            "a": 1,
        }
'''


def test_docstrings_comments_and_blank_lines_do_not_count():
    assert count_code(SOURCE) == 9
    assert count_code('"only a docstring"\n') == count_code("\n# only a comment\n") == 0


def test_a_package_is_counted_by_file(tmp_path):
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "norm.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "empty.py").write_text("", encoding="utf-8")
    assert count_package(tmp_path) == {"empty.py": 0, "layers/norm.py": 9}
