"""Types of command line arguments. argparse reports wrong values with the message of the type."""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> float:
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not more than 0")
    return value


def count(text: str) -> int:
    """A whole number, at least 1."""
    value = positive(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not whole")
    return int(value)


def milliseconds(text: str) -> float:
    """0 or more; 0 is none."""
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is below 0")
    return value


def positive_list(text: str) -> list[float]:
    """'1,2.5'; an empty text is an empty list."""
    return [positive(part) for part in text.split(",")] if text else []


def milliseconds_list(text: str) -> list[float]:
    return [milliseconds(part) for part in text.split(",")]


def count_list(text: str) -> list[int]:
    return [count(part) for part in text.split(",")] if text else []


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value
