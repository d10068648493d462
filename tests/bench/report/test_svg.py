"""Scales, ticks, numbers and elements."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from quire.bench.report.svg import (
    Scale,
    best_scale,
    element,
    linear_scale,
    linear_ticks,
    log_scale,
    log_ticks,
    round_down,
    round_up,
    short,
    text,
)

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "-"), (0, "0"), (0.012345, "0.0123"), (4.5678, "4.57"), (99.96, "100"), (1234.5, "1,234"),
        (9999.6, "10,000"), (45_678, "45.7k"), (2_000_000, "2M"), (-1500, "-1,500"),
    ],
)  # fmt: skip
def test_short_numbers(value, written):
    assert short(value) == written


def test_text_and_attributes_are_escaped():
    written = element("g", text(1, 2, "<b>&\"'"), data_tip='"><script>&')
    parsed = ElementTree.fromstring(written)
    assert parsed.attrib == {"data-tip": '"><script>&'}
    assert parsed[0].text == "<b>&\"'"


def test_attributes_without_a_value_are_left_out():
    assert element("rect", x=1.04, class_=None) == '<rect x="1"/>'


@pytest.mark.parametrize("high", [0.003, 0.7, 1, 1.01, 7, 42, 99, 100, 101, 12_345, 9.99e8])
def test_a_linear_scale_holds_all_values_between_round_ticks(high):
    scale = linear_scale([high / 3, high], 0, 100)
    ticks = scale.ticks()
    assert ticks[0] == scale.low == 0
    assert ticks[-1] == pytest.approx(scale.high)
    assert 3 <= len(ticks) <= 7
    assert high <= scale.high <= 2 * high
    assert scale(high) > 50


@pytest.mark.parametrize("low", [1e-6, 0.02, 1, 3, 900])
@pytest.mark.parametrize("factor", [1, 1.5, 40, 1e4, 1e9])
def test_a_log_scale_holds_all_values(low, factor):
    scale = log_scale([low, low * factor], 0, 100)
    assert scale.low <= low * (1 + 1e-9)
    assert low * factor <= scale.high * (1 + 1e-9)
    assert scale.low < scale.high
    assert 1 <= len(scale.ticks()) <= 7
    assert scale(math.sqrt(scale.low * scale.high)) == pytest.approx(50)


@pytest.mark.parametrize("values", [[], [0, 0], [0.0]])
def test_scales_without_positive_values(values):
    for make in (linear_scale, log_scale, best_scale):
        scale = make(values, 0, 10)
        assert scale.low < scale.high


def test_the_best_scale_is_logarithmic_for_a_wide_range_only():
    assert best_scale([1, 31], 0, 1).log
    assert not best_scale([1, 29], 0, 1).log
    assert not best_scale([0, 1, 1000], 0, 1).log


def test_values_outside_are_cut_to_the_ends():
    scale = Scale(0, 10, 100, 0)
    assert [scale(value) for value in (-5, 0, 5, 10, 99)] == [100, 100, 50, 0, 0]


def test_round_numbers():
    assert [round_down(value) for value in (1, 1.9, 2, 4.9, 5, 9.9, 0.03)] == [1, 1, 2, 2, 5, 5, 0.02]
    assert [round_up(value) for value in (1, 1.1, 2, 2.1, 5, 5.1, 9.9)] == [1, 2, 2, 5, 5, 10, 10]


def test_ticks():
    assert linear_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert log_ticks(1, 100) == [1, 2, 5, 10, 20, 50, 100]
    assert log_ticks(1, 1e6) == pytest.approx([10.0**n for n in range(7)])
