"""The code grader: right code passes, wrong code fails, and no trick makes wrong code pass."""

import contextlib
import json

import pytest
from grading import ADD, grade
from hypothesis import given, settings
from hypothesis import strategies as st

from croze.errors import RewardFault
from croze.reward import plain
from croze.reward.code import Case

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

STYLES = """
from solution import add, Stack as S
import math, unittest
stack = S()
stack.push(1)
stack.push([2])

def test_stack():
    assert stack.pop() == [2]
    assert stack.items == [1]
    assert len(stack.items) == 1

def test_error():
    try:
        S().pop()
    except IndexError:
        pass
    else:
        raise AssertionError("no error")

def test_in_place():
    a = [3, 1, 2]
    order(a)
    assert a == [1, 2, 3]

class Cases(unittest.TestCase):
    def setUp(self):
        self.one = 1

    def test_add(self):
        self.assertEqual(add(self.one, 2), 3)
        with self.assertRaises(TypeError):
            add(1, "a")

    def test_wrong(self):
        self.assertEqual(add(1, 2), 4)

def check(candidate):
    assert candidate(1, 2) == 3
    assert math.isclose(candidate(0.1, 0.2), 0.3)
    assert candidate((1,), (2,)) == (1, 2)
    assert add(candidate(1, 2), 3) == 6

check(add)
assert LIMIT == 7
assert list(count(3)) == [0, 1, 2]
assert add({"a": {1, 2}}.get("a") and [1], []) == [1]
"""
MANY = (
    ADD
    + """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
def order(a): a.sort()
def count(n): yield from range(n)
LIMIT = 7
"""
)


def test_every_style_of_test():
    report = grade(MANY, STYLES)
    assert (report.passed, report.total) == (8, 9) and "test_wrong" in report.failures[0]
    assert report.score == 8 / 9 and not report.ok


def test_cases_of_calls_and_of_stdin():
    cases = [
        Case(call="add(2, 3)", expected=5),
        Case(call="add('a', 'b')", expected="ab"),
        Case(call="add(1, 1)", expected=3),
    ]
    report = grade(ADD, cases)
    assert (report.passed, report.total) == (2, 3) and "add(1, 1)" in report.failures[0]
    program = {
        "util.py": "def twice(x): return 2 * x",
        "main.py": "from util import twice\nprint(twice(int(input())))",
    }
    report = grade(program, [Case(stdin="4\n", expected="8"), Case(stdin="x", expected="8")], main="main.py")
    assert (report.passed, report.total) == (1, 2)


ZERO = "\ndef add(a, b): return 0"
FORGERIES = {
    "leaves at once": "import os; os._exit(0)",
    "leaves when called": "import os\ndef add(a, b): os._exit(0)",
    "sys.exit": "def add(a, b): raise SystemExit(0)",
    "claims to have passed": "print('PASS'); print('{\"passed\": 99, \"failed\": []}')" + ZERO,
    "equals everything": """
class E:
    def __eq__(s, o): return True
    def __bool__(s): return True
def add(a, b): return E()
""",
    "int that equals everything": """
class E(int):
    def __eq__(s, o): return True
    def __ne__(s, o): return False
def add(a, b): return E(0)
""",
    "list that equals everything": "class E(list):\n  def __eq__(s, o): return True\ndef add(a, b): return E()",
    "str that lies": """
class E(str):
    def __str__(s): return '5'
    def __eq__(s, o): return True
def add(a, b): return E('x')
""",
    "patches builtins": "import builtins\nbuiltins.AssertionError = Warning\nbuiltins.abs = lambda x: 0"
    + ZERO,
    "shadows what tests use": "def abs(x): return 0\ndef isinstance(a, b): return True" + ZERO,
    "patches json and the codec": """
import json, sys
json.dumps = lambda *a, **k: '{"v": 4}'
sys.modules['__main__'].pack = lambda *a: 99
"""
    + ZERO,
    "writes the verdict": "open('/box/.croze-verdict', 'w').write('{\"passed\": 9, \"failed\": []}')" + ZERO,
    "writes the results": """
import os
def add(a, b):
    open('/box/.croze-results', 'w').write('{"h": 1}\\n{"passed": 9}\\n{"v": {"v": 5}}\\n')
    os._exit(0)
""",
    "writes results that are no data": """
import os
def add(a, b):
    open('/box/.croze-results', 'w').write('{"h": 1}\\n{"v": ["x", 1]}\\n{"e": 7}\\n')
    os._exit(0)
""",
    "dies in the result": """
class E:
    def __reduce__(s): raise SystemExit
    def __getattr__(s, n): raise SystemExit
def add(a, b): return E()
""",
    "raises what a test may catch": "def add(a, b): raise AssertionError",
    "raises a skip": "import unittest\ndef add(a, b): raise unittest.SkipTest('x')",
    "spins": "def add(a, b):\n  while True: pass",
    "eats memory": "def add(a, b):\n  x = []\n  while True: x.append(bytearray(1 << 20))",
    "returns far too much": "def add(a, b): return 'x' * (40 << 20)",
    "returns endless nesting": "def add(a, b):\n  x = []\n  x.append(x)\n  return x",
    "forks away": "import os\ndef add(a, b):\n  os.fork() and os._exit(0)\n  return 0",
    "subtracts to an object": """
class E:
    def __sub__(s, o): return s
    def __abs__(s): return s
    def __gt__(s, o): return False
    def __float__(s): return 5.0
def add(a, b): return E()
""",
    "raises a class named like a skip": """
class SkipTest(Exception): __module__ = 'unittest.case'
def add(a, b): raise SkipTest
""",
    "a class that is the answer": """
class M(type):
    def __eq__(s, o): return True
    def __hash__(s): return 1
class add(metaclass=M):
    def __new__(c, *a): return c
""",
    "an iterator that equals everything": """
class E:
    def __next__(s): return s
    def __eq__(s, o): return True
def add(a, b): return E()
""",
    "tells of two answers": """
import os
def add(a, b):
    open('/box/.croze-results', 'w').write('{"h": 1}\\n{"h": 1}\\n{"v": 1}\\n{"e": 3, "v": 5, "w": 1}\\n')
    os._exit(0)
""",
    "does not parse": "def add(",
    "is absent": "x = 1",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_no_forgery_passes(name):
    report = grade(FORGERIES[name], "assert add(2, 3) == 5\nassert not abs(add(2, 3) - 5) > 0\n", cpu_s=1)
    assert (report.passed, report.total) == (0, 2), report


EXPECTS_AN_ERROR = """
def test_refuses():
    try:
        add(1, "a")
    except:
        pass
    else:
        raise SystemError
"""


@pytest.mark.parametrize("code", ["import os; os._exit(0)", "import os\ndef add(a, b): os._exit(0)"])
def test_dying_is_not_the_error_that_a_test_expects(code):
    assert grade(code, EXPECTS_AN_ERROR).passed == 0
    assert grade(ADD, EXPECTS_AN_ERROR).ok


def test_hidden_tests_are_nowhere_near_the_code():
    spy = """
import os, sys, gc
def add(a, b):
    seen = []
    for top, folders, names in os.walk('/box'):
        for n in names:
            with open(os.path.join(top, n), 'rb') as f: seen.append(f.read())
    for p in os.listdir('/proc'):
        if p.isdigit():
            for what in ('cmdline', 'environ', 'mem'):
                try:
                    with open(f'/proc/{p}/{what}', 'rb') as f: seen.append(f.read())
                except OSError: pass
    seen += [repr(o).encode('utf-8', 'replace') for o in gc.get_objects() if isinstance(o, (dict, list))]
    return (b'73' + b'1195') in b''.join(seen)
"""
    report = grade(spy, "assert add(2, 3) == 731195\nassert add(2, 3) == False")
    assert report.passed == 1 and "731195" in report.failures[0]


def test_broken_tests_are_our_fault_not_the_models():
    for tests in ("assert (", "import no_such_module\nassert add(1, 2) == 3"):
        with pytest.raises(RewardFault, match="tests"):
            grade(ADD, tests)


@pytest.mark.parametrize("tests", ["", "  # later", "x = add(1, 2)", "def helper(n): assert n", []])
def test_tests_without_a_check_are_a_fault(tests):
    with pytest.raises(RewardFault, match="no check"):
        grade(ADD, tests)


def test_no_files_and_odd_cases_are_a_fault():
    with pytest.raises(RewardFault, match="no files") as caught:
        grade({}, "assert add(1, 2) == 3")
    assert caught.value.fix
    with pytest.raises(RewardFault, match="none of the files"):
        grade(ADD, [Case(stdin="", expected="")], main="main.py")
    with pytest.raises(RewardFault, match="call or stdin"):
        grade(ADD, [Case(expected=3)])


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False) | st.decimals(allow_nan=False) | st.fractions() | st.dates()
    | st.datetimes() | st.times() | st.timedeltas(),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple)
    | st.dictionaries(st.text() | st.integers() | st.booleans(), inner, max_size=4),
    max_leaves=10,
) | st.sets(st.integers() | st.text()) | st.frozensets(st.binary())  # fmt: skip


def kinds(value):
    if isinstance(value, dict):
        return dict, [(kinds(k), kinds(v)) for k, v in value.items()]
    return (type(value), [kinds(v) for v in value]) if isinstance(value, list | tuple) else type(value)


@given(PLAIN)
def test_plain_values_cross_unchanged(value):
    back = plain.unpack(json.loads(json.dumps(plain.pack(value))))
    assert back == value and kinds(back) == kinds(value)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3), lambda x: st.lists(x, max_size=3), max_leaves=8
    )
)
def test_any_form_unpacks_or_is_refused(form):
    with contextlib.suppress(ValueError, TypeError):
        plain.unpack(form)
