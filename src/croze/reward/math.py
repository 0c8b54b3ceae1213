"""Grading mathematics with math-verify: is the answer in a reply equal to the known one?"""

from __future__ import annotations

import logging
import re
import threading
from functools import lru_cache
from typing import Any

_LONGEST = 4000
_DIGITS = 400
_EXPONENT = 5000
_FACTORIAL = 1000
_TIMEOUT_S = 5

_POWER = r"(?:\^|\*\*)\s*[{(\s]*[-+]?\s*"
_NUMERIC_POWER = re.compile(_POWER + r"(\d+)")
_TOWER = re.compile(_POWER + r"\d[\d.]*[\s})]*(?:\^|\*\*|!|e\d)", re.IGNORECASE)
_POWER_OF_POWER = re.compile(r"[)}\]]\s*" + _POWER + r"\d{2,}")
_FACTORIAL_OF = re.compile(r"(\d+)\s*!")
_NESTED_FACTORIAL = re.compile(r"[)}\]!]\s*!")
_SCIENTIFIC = re.compile(r"\d\s*e\s*[-+]?\s*(\d+)", re.IGNORECASE)
_LONG_NUMBER = re.compile(rf"\d{{{_DIGITS},}}")


def boxed(text: str) -> str | None:
    """What the last complete ``\\boxed{...}`` holds, braces balanced; None where there is none."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth = 0
        for i in range(start + len("\\boxed"), len(text)):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[start + len("\\boxed{") : i]
        end = start
    return None


def math_equal(reply: str, gold: str) -> bool:
    """Whether the reply's final answer (its last ``\\boxed``, else what math-verify finds in its last 4,000
    characters) equals ``gold``. False for anything unreadable, and for expressions whose value nobody could
    write down (towers of powers, huge factorials): evaluating those would not end.

    On a process's main thread math-verify's own time limit holds; elsewhere the reward worker's does.
    """
    answer = boxed(reply)
    answer = reply[-_LONGEST:] if answer is None else f"\\boxed{{{answer}}}"
    if len(answer) > _LONGEST + 20 or unbounded(answer):
        return False
    limit = _TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    try:
        plain = boxed(gold) is None and "$" not in gold
        wanted = _parsed(f"\\boxed{{{gold}}}" if plain else gold, limit)
        given = _parse(answer, limit)
        return bool(_library().verify(list(wanted), given, timeout_seconds=limit))
    except Exception:  # sympy and its parsers raise anything at all on what a model may write
        return False


async def math_reward(reply: str, answer: str) -> float:
    """1 where the reply's final answer equals the column ``answer``, else 0.

    A coroutine though it awaits nothing: sympy and its parser are not made for threads, and the worker's
    event loop runs one at a time.
    """
    return float(math_equal(reply, str(answer)))


def unbounded(expression: str) -> bool:
    """Whether evaluating might take for ever: numbers that no notation of the answer would need."""
    powers = [n for n in _NUMERIC_POWER.findall(expression) if len(n) > 2]
    too_large = (
        any(len(n) > 5 or int(n) > _EXPONENT for n in powers),
        len(powers) > 2 or len(_POWER_OF_POWER.findall(expression)) > 1,
        any(len(n) > 5 or int(n) > _FACTORIAL for n in _FACTORIAL_OF.findall(expression)),
        any(len(n) > 3 for n in _SCIENTIFIC.findall(expression)),
    )
    return any(too_large) or any(p.search(expression) for p in (_TOWER, _NESTED_FACTORIAL, _LONG_NUMBER))


@lru_cache(maxsize=4096)
def _parsed(gold: str, limit: int | None) -> tuple[Any, ...]:
    return tuple(_parse(gold, limit))


def _parse(text: str, limit: int | None) -> list[Any]:
    return _library().parse(text, parsing_timeout=limit)


@lru_cache(maxsize=1)
def _library() -> Any:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return math_verify
