"""The math grader: right answers, and a thousand ways not to answer."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from croze.reward.math import boxed, math_equal, unbounded

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("\\boxed{45}", "45"),
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2", "1"),
        ("\\boxed{", None),
        ("none", None),
        ("\\boxed{}", ""),
        ("\\boxed{{{}}}", "{{}}"),
    ],
)
def test_boxed(text, inside):
    assert boxed(text) == inside


@given(st.text(alphabet="\\boxed{}1 ", max_size=60))
def test_boxed_is_balanced(text):
    inside = boxed(text)
    assert inside is None or inside.count("{") == inside.count("}")


@pytest.mark.parametrize(
    ("reply", "gold"),
    [
        ("so it is \\boxed{45}", "45"),
        ("45", "45"),
        ("\\boxed{1/2}", "\\frac{1}{2}"),
        ("$\\frac{1}{2}$", "0.5"),
        ("\\boxed{(1, 2)}", "(1,2)"),
        ("\\boxed{2^{10}}", "1024"),
        ("\\boxed{2^{2024}}", "2^{2024}"),
        ("\\boxed{10!}", "3628800"),
    ],
)
def test_equal(reply, gold):
    assert math_equal(reply, gold)


HOPELESS = [
    "",
    "\\boxed{}",
    "no idea",
    "\\boxed{46}",
    "\\boxed{9^{9^{9}}}",
    "\\boxed{9**9**9}",
    "\\boxed{(1+2)^(10^6)}",
    "\\boxed{2^{99999999}}",
    "\\boxed{((9^{999})^{999})^{999}}",
    "\\boxed{99999999!}",
    "\\boxed{((9!)!)!}",
    "\\boxed{9!!!!}",
    "\\boxed{1e999999999}",
    "\\boxed{" + "9" * 5000 + "}",
    "(" * 3000,
    "\\frac{" * 500,
    "\\boxed{" + "1+" * 1500 + "1}",
    "\x00\ud800\\boxed{\x00}",
    "x" * 1_000_000,
]


@pytest.mark.parametrize("reply", HOPELESS, ids=range(len(HOPELESS)))
def test_hopeless_replies_are_false_and_soon(reply):
    began = time.process_time()
    assert math_equal(reply, "45") is False
    assert time.process_time() - began < 8


def test_long_replies_are_read_at_their_end():
    assert math_equal("think " * 100_000 + "\\boxed{45}", "45")


def test_works_in_a_thread():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(math_equal("\\boxed{45}", "45")))
    thread.start()
    thread.join()
    assert seen == [True]


def test_polynomials_are_not_taken_for_towers():
    assert not unbounded("x^{10} + 3x^2 - (x+1)^3 + e^{x^2}")
    assert unbounded("2^{3^{4}}")


@given(st.text(alphabet="0123456789+-*/^(){}\\ !.,x=e", max_size=40))
@settings(max_examples=60)
def test_any_text_is_answered(text):
    assert math_equal(text, "45") in (True, False)
