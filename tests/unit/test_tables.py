"""Text and tables that fit a width: where lines end, which columns there are, how wide a screen is taken to be."""

import pytest

from commlib.reports import tables
from commlib.reports.tables import Column

NAMES = ["a", "low_precision_decentralized(hierarchical=True)", "topk(ratio=0.001, op='mean', hierarchical=True)"]


@pytest.mark.parametrize(("columns", "width"), [("100", 100), ("", 80), ("wide", 80), ("0", 80), ("-5", 80)])
def test_without_a_terminal_the_width_is_that_of_columns_or_80(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    assert tables.terminal_width() == width  # pytest's standard output is a file


@pytest.mark.parametrize("width", [20, 33, 60])
def test_lines_end_between_words_or_within_a_long_one_at_its_marks(width):
    text = "what is/said/of/a/path/that/is/longer/than/a/line, topk(ratio=0.001,op='mean') and more"
    lines = tables.wrapped(text, width, "  ")
    assert max(map(len, lines)) <= width
    assert all(line.startswith("  ") for line in lines[1:])
    joined = "".join(line.removeprefix("  ") for line in lines)
    assert joined.replace(" ", "") == text.replace(" ", "")


def test_spaces_of_a_line_that_fits_stay():
    assert tables.wrapped("    0.5  0.25", 80) == ["    0.5  0.25"]


def test_a_kept_name_is_in_one_line():
    name = "topk(ratio=0.001, op='mean')"
    lines = tables.wrapped(f"use it as {tables.kept(name)}, which is fast", 34, "  ")
    assert any(name in line for line in lines)
    assert max(map(len, lines)) <= 34


def table(width, wide=False):
    numbers = [Column(title, ["1.0", "20.0", "300.0"]) for title in ("first", "second", "third")]
    return tables.fitted([Column("name", NAMES, left=True), *numbers], width, 2, wide)


@pytest.mark.parametrize(
    ("width", "titles"), [(54, ["first"]), (68, ["first", "second"]), (69, ["first", "second", "third"])]
)
def test_columns_are_shown_as_far_as_they_fit(width, titles):
    lines = table(width)
    assert lines[0].split() == ["name", *titles]
    assert max(map(len, lines)) <= width
    assert [line.split("  ")[0] for line in lines[2:]] == NAMES


def test_wide_tables_have_all_columns():
    assert table(40, wide=True)[0].split() == ["name", "first", "second", "third"]


def test_a_name_that_does_not_fit_goes_on_below_it():
    lines = table(40)
    assert max(map(len, lines)) <= 40
    assert "low_precision_decentralized(" in lines[3]
    assert lines[4].strip() == "hierarchical=True)"
    assert "".join(line[:33].strip() for line in lines[5:]).replace(" ", "") == NAMES[2].replace(" ", "")
