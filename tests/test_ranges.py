"""Ranges of numbers, and the sentence for one that lies outside."""

import math

import pytest

from jitllm.errors import SettingError
from jitllm.ranges import Range, check_counts


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (Range(int, 1), "a whole number of 1 or more"),
        (Range(int, 0, 20), "a whole number from 0 to 20"),
        (Range(float, 0.001, 10), "a number from 0.001 to 10"),
    ],
)
def test_a_range_is_said_in_words(allowed, words):
    assert str(allowed) == words


def test_what_is_no_number_of_the_kind_is_in_no_range():
    assert Range(int).holds(10**400) and Range(float).holds(1) and Range(float).holds(1e300)
    for value in (True, "1", None, 1.0, math.nan):
        assert not Range(int).holds(value)
    for value in (math.inf, -math.inf, math.nan, False, "1", None, -1e-9):
        assert not Range(float).holds(value)


def test_a_setting_has_its_own_name_in_python_and_its_flag_on_a_command_line():
    with pytest.raises(SettingError) as caught:
        Range(float, 0, 1).check("top_p", 7.0)
    assert str(caught.value) == "top_p has to be a number from 0 to 1, but is 7.0"
    assert caught.value.typed == "-top-p has to be a number from 0 to 1, but is 7.0"
    room = SettingError("n", "no room for n: in an inn, lower n or -n")
    assert room.typed == "no room for -n: in an inn, lower -n or -n"


def test_counts_that_are_not_set_are_not_checked():
    class Counts:
        max_seq, threads = None, 0

    check_counts(Counts, max_seq=1)
    with pytest.raises(SettingError, match="threads has to be a whole number of 1 or more"):
        check_counts(Counts, max_seq=1, threads=1)
