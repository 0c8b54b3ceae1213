"""The code grader: right code passes, wrong code fails, and no trick makes wrong code pass."""

import asyncio
import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from croze.errors import RewardFault
from croze.reward import plain
from croze.reward.code import Case, run_tests
from croze.sandbox.bubblewrap import Bubblewrap
from croze.sandbox.protocol import Limits

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

ADD = "def add(a, b):\n    return a + b\n"
LIMITS = Limits(cpu_s=2, wall_s=10, memory_mib=128, disk_mib=16)


def grade(code, tests, **words):
    async def main():
        driver = Bubblewrap()
        try:
            async with await driver.create(limits=LIMITS) as box:
                files = code if isinstance(code, dict) else {"solution.py": code}
                return await run_tests(box, files, tests, **words)
        finally:
            await driver.close()

    return asyncio.run(main())


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
