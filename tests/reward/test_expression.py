import re
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from croze.reward.expression import MAX_CHARS, MAX_DEPTH, evaluate

numbers = st.integers(0, 10**6).map(str)


def grow(inner):
    binary = st.tuples(inner, st.sampled_from("+-*/"), inner, st.sampled_from(["", " ", "  ", "\t"]))
    return st.one_of(
        binary.map(lambda p: f"{p[0]}{p[3]}{p[1]}{p[3]}{p[2]}"),
        st.tuples(st.sampled_from("+-"), inner).map("".join),
        inner.map("({})".format),
    )


expressions = st.recursive(numbers, grow, max_leaves=20)


def python_says(text: str) -> Fraction | None:
    """Python's own parser and precedence over exact fractions."""
    try:
        return Fraction(eval(re.sub(r"\d+", r"Fraction(\g<0>)", text), {"Fraction": Fraction}))
    except (SyntaxError, ZeroDivisionError):
        return None


@given(expressions)
def test_agrees_with_python_on_expressions(text: str):
    if len(text) <= MAX_CHARS:
        assert evaluate(text) == python_says(text)


@given(st.text(alphabet="0123456789+-*/() ", max_size=24))
def test_agrees_with_python_on_anything_made_of_its_characters(text: str):
    stripped = text.strip()
    refused = "**" in re.sub(r"\s", "", text) or "//" in re.sub(r"\s", "", text)
    leading_zero = re.search(r"(?<!\d)0\d*[1-9]", text)
    called = re.search(r"[\d)]\s*\(|\(\s*\)", text)  # a call or an empty tuple to Python, no expression to us
    if refused or leading_zero or called or not stripped:
        assert evaluate(text) is None
    else:
        assert evaluate(text) == python_says(stripped)


@given(st.text(max_size=300))
def test_never_raises(text: str):
    value = evaluate(text)
    assert value is None or isinstance(value, Fraction)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "()",
        "(",
        ")",
        "1+",
        "*1",
        "1 2",
        "2**3",
        "7//2",
        "1e3",
        "1.5",
        "0x10",
        "1_000",
        "007",
        "٣",
        "４+1",
        "1/0",
        "1/(2-2)",
        "__import__('os')",
        "a",
        "1;2",
        "1,2",
        "1\n+2",
        "(1))",
        "1=1",
        "45.",
        "\x001",
        "(4+11*3",
    ],
)
def test_no_value(text: str):
    assert evaluate(text) is None


def test_values():
    assert evaluate("(4+11)*3") == 45
    assert evaluate(" 1/3 + 1/6\n") == Fraction(1, 2)
    assert evaluate("--3") == evaluate("+3") == evaluate("000+3") == 3
    assert evaluate("2-3-4") == -5 and evaluate("8/4/2") == 1


def test_bounds_hold_and_cost_nothing():
    deep = "(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH
    assert evaluate(deep) == 1
    assert evaluate(f"({deep})") is None
    assert evaluate("(1)+" * 60 + "1") == 61, "depth counts nesting, not parentheses"
    assert evaluate("9" * MAX_CHARS) == int("9" * MAX_CHARS)
    start = time.process_time()
    for hostile in ("9" * 10**7, "(" * 10**6, "-" * MAX_CHARS, "*".join("9" * 128), "1/" * 127 + "3"):
        evaluate(hostile)
    assert time.process_time() - start < 0.5
