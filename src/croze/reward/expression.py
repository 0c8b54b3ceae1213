"""Arithmetic in a model's reply, evaluated exactly and without ever running it."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 256
"""A longer text is no expression. It also bounds the value: no result has more digits than its text."""
MAX_DEPTH = 32
"""Deepest nesting of parentheses."""

_TOKEN = re.compile(r"[ \t]*(?:([0-9]+)|([-+*/()]))", re.ASCII)


def evaluate(text: str) -> Fraction | None:
    """The exact value of an expression of integers, ``+ - * /``, signs and parentheses, as Python reads it.

    None where there is no value: another character, no or half an expression, ``**`` or ``//``, a number with
    a leading zero, a division by zero, more than MAX_CHARS characters or MAX_DEPTH parentheses. Never raises.
    """
    if len(text) > MAX_CHARS:
        return None
    try:
        return _Parser(_split(text)).value()
    except (_NoValue, ZeroDivisionError):
        return None


class _NoValue(Exception):
    """The text is no expression within the bounds."""


def _split(text: str) -> list[str]:
    text = text.strip(" \t\n\r")
    words, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _NoValue
        number, operator = match.groups()
        if number and number[0] == "0" and number.strip("0"):
            raise _NoValue
        words.append(number or operator)
        at = match.end()
    return words


class _Parser:
    """Recursive descent: sum = product {+- product}, product = factor {*/ factor}, factor = {+-} atom."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.at = 0
        self.depth = 0

    def value(self) -> Fraction:
        result = self.sum()
        if self.at < len(self.words):
            raise _NoValue
        return result

    def take(self, choices: str) -> str | None:
        if self.at < len(self.words) and self.words[self.at] in tuple(choices):
            self.at += 1
            return self.words[self.at - 1]
        return None

    def sum(self) -> Fraction:
        left = self.product()
        while operator := self.take("+-"):
            right = self.product()
            left = left + right if operator == "+" else left - right
        return left

    def product(self) -> Fraction:
        left = self.factor()
        while operator := self.take("*/"):
            right = self.factor()
            left = left * right if operator == "*" else left / right
        return left

    def factor(self) -> Fraction:
        sign = 1
        while operator := self.take("+-"):
            sign = -sign if operator == "-" else sign
        return sign * self.atom()

    def atom(self) -> Fraction:
        if self.take("("):
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise _NoValue
            inner = self.sum()
            if not self.take(")"):
                raise _NoValue
            self.depth -= 1
            return inner
        if self.at == len(self.words) or not self.words[self.at].isdigit():
            raise _NoValue
        self.at += 1
        return Fraction(self.words[self.at - 1])
