"""What hidden tests can ask: however much and in whatever form, right code passes or the tests are at fault."""

import pytest
from grading import ADD, grade

from croze.errors import RewardFault

MANY_CALLS = {
    "loop": "for i in range(200): assert double(i) == i * 2",
    "list": "assert [double(i) for i in range(70)] == [2 * i for i in range(70)]",
    "ten thousand": "for i in range(10_000): assert double(i) == i * 2",
    "in a function": "def test():\n  for i in range(300):\n    assert abs(double(i / 3) - i / 1.5) < 1e-9",
    "each on the one before": "x = 1\nfor i in range(300):\n  x = double(x)\nassert x == 2 ** 300",
    "isclose": "import math\nfor i in range(300): assert math.isclose(double(i), 2 * i)",
    "random": "import random\nfor _ in range(300):\n  n = random.random()\n  assert double(n) == n + n",
    "deciding": "while ask():\n  assert double(1) == 2",
    "endless when guessed": "while not done(): pass\nassert done() is True",
    "unittest": """
import unittest
class T(unittest.TestCase):
    def test(self):
        for i in range(300):
            with self.subTest(i): self.assertEqual(double(i), 2 * i)
            self.assertIsInstance(double(i), int)
""",
}
DOUBLE = """
left = 5
calls = 0
def double(x): return 2 * x
def ask():
    global left
    left -= 1
    return left > 0
def done():
    global calls
    calls += 1
    return calls > 3
"""


@pytest.mark.parametrize("name", MANY_CALLS)
def test_calls_cost_no_score(name):
    tests = MANY_CALLS[name]
    assert grade(DOUBLE, tests).ok
    wrong = DOUBLE.replace("2 * x", "2 * x + (x >= 150)").replace("calls > 3", "calls > 3 and 7")
    if name not in ("list", "deciding", "random", "in a function"):
        report = grade(wrong, tests)
        assert (report.passed, report.total) == (0, 1)


COMPOUND = """
for i in range(3):
    assert add(i, i) == 2 * i
if add(1, 1) == 2:
    assert add(2, 2) == 4
else:
    raise AssertionError
try:
    add(1, "a")
    assert False
except TypeError:
    pass
import contextlib
with contextlib.suppress(KeyError):
    assert add(1, 1) == 2
def check(f): assert f(1, 2) == 3
for f in (add, add): check(f)
async def waits(): assert add(1, 2) == 3
import asyncio
with contextlib.nullcontext():
    asyncio.run(waits()); assert True
async def test_async():
    assert add(1, 2) == 3
"""


def test_compound_statements_are_checks():
    report = grade(ADD, COMPOUND)
    assert report.ok and report.total == 7
    assert grade("def add(a, b): return 9", COMPOUND).passed == 0


def test_checks_after_a_failed_preparation_fail():
    report = grade(
        "def add(a, b): return a + b\n", "assert add(1, 1) == 2\nx = add(1, 'a')\nassert x\nassert x"
    )
    assert (report.passed, report.total) == (1, 4)


OBJECTS = {
    "solution.py": """
import asyncio, collections, dataclasses, datetime, decimal, fractions
from decimal import Decimal
class AppError(Exception): pass
class MyErr(AppError, KeyError):
    def __init__(self, code): super().__init__(code); self.code = code
    def __str__(self): return f"code {self.code}"
class Node:
    def __init__(self, v, *children): self.v, self.children, self.next = v, list(children), None
    def __len__(self): return len(self.children)
    def __getitem__(self, i): return self.children[i]
    def __contains__(self, v): return v == self.v
    def __enter__(self): return self
    def __exit__(self, *error): self.v = 0
Point = collections.namedtuple("Point", "x y")
async def later(x):
    await asyncio.sleep(0)
    if x < 0: raise MyErr(x)
    return x + 1
def fail(code): raise MyErr(code)
def same(x): return x
def tree(): return Node(1, Node(2, Node(3)), Node(4))
def pairs(): return [(Node(1), "a"), (Node(2), "b")]
def forever():
    n = 0
    while True:
        yield n
        n += 1
class Holder:
    limit = 3
LIMIT = None
def half(x): return Decimal(x) / 2
def tomorrow(d): return d + datetime.timedelta(days=1)
def parse(x):
    import json
    return json.loads(x)
"""
}
EXPRESSED = """
import asyncio, collections, datetime, fractions, itertools, json, unittest
from decimal import Decimal
from solution import *
from solution import MyErr, AppError, LIMIT, Node
import solution
t = tree()
assert t.children[0].v == 2
assert t.children[0].children[0].v == 3 and t.children[-1].v == 4
assert t[1].v == 4 and len(t) == 2 and 1 in t and t.next is None and LIMIT is None
assert [c.v for c in t.children] == [2, 4] and [c.v for c in t] == [2, 4]
assert [(n.v, s) for n, s in pairs()] == [(1, "a"), (2, "b")]
assert isinstance(t, Node) and not isinstance(t, Holder) and isinstance(t.v, int) and t
assert t != None
t.v = 8
assert t.v == 8 and same(t).v == 8
with Node(5) as n:
    assert n.v == 5
assert n.v == 0
try:
    fail(3)
except MyErr as e:
    assert e.code == 3 and str(e) == "code 3" and isinstance(e, KeyError)
for kind in (AppError, solution.MyErr, KeyError):
    try: fail(1)
    except kind: pass
    else: raise AssertionError
try: parse("{")
except json.JSONDecodeError: assert True
class T(unittest.TestCase):
    def test(self):
        with self.assertRaises(MyErr): fail(2)
        self.assertRaises(AppError, fail, 2)
assert asyncio.run(later(1)) == 2
async def test_await():
    assert await asyncio.gather(later(1), later(2)) == [2, 3]
    try: await later(-1)
    except MyErr: pass
    else: assert False
assert half("3") == Decimal("1.5") and type(half("3")) is Decimal
assert tomorrow(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)
for v in [{1}, (1, 2), 2j, b"x", frozenset({2}), fractions.Fraction(1, 3), datetime.timedelta(3),
          collections.deque([1]), datetime.datetime(2024, 1, 1), datetime.time(3), {(1, 2): {3}}, slice(1, 2)]:
    assert same(v) == v and type(same(v)) is type(v)
assert Point(1, 2).y == 2 and Point(1, 2) == (1, 2)
g = forever()
assert next(g) == 0 and next(g) == 1 and list(itertools.islice(g, 100)) == list(range(2, 102)) and next(g) == 102
assert Holder.limit == 3 and Holder().limit == 3 and hasattr(Holder, "limit") and not hasattr(Holder, "x")
"""


def test_what_can_be_expressed():
    report = grade(OBJECTS, EXPRESSED)
    assert report.ok, report.failures
    assert report.total == 22


INEXPRESSIBLE = {
    "ap(lambda x: x + 1, 3)": "function",
    "P(1, 2) == P(1, 2)": "compared",
    "P(1, 2) < P(1, 3)": "compared",
    "P(1, 2) in [P(1, 2)]": "compared",
    "len({P(1, 2)}) == 1": "hashed",
    "P(1, 2) == U(1)": "U",
    "ap(U, 3)": "type",
}


@pytest.mark.parametrize("check", INEXPRESSIBLE)
def test_what_cannot_be_expressed_is_a_fault(check):
    code = """
import dataclasses
def ap(f, x): return f(x)
@dataclasses.dataclass(frozen=True, order=True)
class P:
    x: int
    y: int
"""
    tests = f"class U:\n  def __init__(self, *_): pass\n\ndef test():\n  try:\n    assert {check}\n  except: pass\n"
    for text, line in ((tests, 6), ("class U:\n  def __init__(s, *_): pass\nassert " + check, 3)):
        with pytest.raises(RewardFault, match=f"line {line}: .*{INEXPRESSIBLE[check]}"):
            grade(code, text)


def test_tests_that_ask_something_else_each_time_are_a_fault():
    with pytest.raises(RewardFault, match="something else"):
        grade(ADD, "import os\nn = int.from_bytes(os.urandom(6), 'big')\nassert add(n, 1) == n + 1")


def test_code_that_answers_something_else_each_time_is_no_fault_of_the_tests():
    code = "import os\ndef draw(): return int.from_bytes(os.urandom(6), 'big')\ndef same(x): return x"
    report = grade(code, "x = draw()\nassert same(x + 1) == x + 1")
    assert (report.passed, report.total) == (0, 1) and "each time" in report.failures[0]
    assert grade(code.replace("import os", "import random").replace("int.from_bytes(os.urandom(6), 'big')",
                 "random.random()"), "x = draw()\nassert same(x + 1) == x + 1").ok  # fmt: skip


def test_files_that_the_code_writes_do_not_outlive_a_run():
    code = """
import os
def note(x):
    os.makedirs("notes/deep", exist_ok=True)
    with open("notes/deep/log", "a") as f: f.write(x)
    with open("notes/deep/log") as f: return f.read()
"""
    assert grade(code, "a = note('x')\nb = note(a + 'y')\nassert note(b[-1:]) == 'xxyy'").ok


@pytest.mark.parametrize("name", ["json", "random", "asyncio", "decimal", "inspect", "time", "types"])
def test_files_named_like_the_library(name):
    files = {f"{name}.py": ADD}
    assert grade(files, "assert add(1, 2) == 3").ok
    assert grade(files, f"import {name}\nfrom {name} import add as a\nassert a(1, 2) == {name}.add(0, 3)").ok
    assert grade({**files, "solution.py": f"def two():\n  from {name} import add\n  return add(1, 1)"},
                 "from solution import two\nassert two() == 2").ok  # fmt: skip


def test_packages():
    files = {
        "pkg/__init__.py": "ONE = 1",
        "pkg/sums.py": ADD,
        "pkg/other.py": "from pkg.sums import add\nx = add(1, 1)",
    }
    tests = "import pkg, pkg.sums\nfrom pkg.sums import add\nfrom pkg import ONE, other\n"
    assert grade(files, tests + "assert pkg.sums.add(1, 2) == add(2, ONE)\nassert other.x == 2").ok


def test_a_missing_name_fails_what_uses_it():
    report = grade(ADD, "from solution import add, sub\nassert add(1, 2) == 3\nassert sub(2, 1) == 1")
    assert (report.passed, report.total) == (1, 2)
