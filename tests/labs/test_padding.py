"""The demonstration of padding, for lengths that are given."""

import re
import sys

import pytest

from labs.demos import padding


@pytest.mark.parametrize("lens", [[2, 5, 10], [1], [60, 1, 7]])
def test_the_waste_of_given_lengths_is_that_of_the_drawn_masks(lens, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["padding", *map(str, lens)])
    padding.main()
    out = capsys.readouterr().out
    rectangle, packed = padding.rectangle_mask(lens), padding.packed_mask(lens)
    empty = int((~rectangle.any(-1)).sum())  # places that see nothing
    assert f"{rectangle.shape[0] * rectangle.shape[1]} places, {empty} of padding" in out
    assert f"{int(packed.sum()):,} of {packed.numel():,} are True" in out
    if sum(lens) <= padding.MAX_DRAWN:
        assert len(re.findall("■", out)) == int(packed.sum())


def test_a_length_is_at_least_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["padding", "2", "0"])
    with pytest.raises(SystemExit):
        padding.main()
    assert "at least 1 token, got the lengths [2, 0]" in capsys.readouterr().err
