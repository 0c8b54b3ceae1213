"""Runs *inside* a sandbox that the model's code never enters: the hidden tests, and so the verdict.

Names that the tests use and do not define stand for the code under test. Using one looks the answer up in
what the code's own sandbox has told so far; where it has not, the check is left for the next round and the
question is noted. Only plain data comes back, so that every comparison is made here, by true builtins.

Asked on stdin: {"tests", "modules", "log", "results", "dead"}; answer, in the file ``VERDICT``: {"needs": [op,
...]} or {"passed": n, "failed": [[check, why], ...]} or {"error": text}.
"""

import ast
import builtins
import inspect
import json
import sys
import types

# `pack` and `unpack` stand above this text when it runs.
# ruff: noqa: F821
# pyright: reportUndefinedVariable=false

ASKED = json.loads(sys.stdin.read())


class Unanswered(BaseException):
    """There is no answer, yet or ever. A check that meets one has not passed, whatever it catches."""


class Broken(Exception):
    """The tests are at fault, not what they test."""


class Answers:
    """What the code under test has said, by question and by how often it was asked."""

    def __init__(self):
        self.needs = []
        self.dead = 0
        self._asked = {}
        self._known = {}
        counts = {}
        for index, (op, result) in enumerate(zip(ASKED["log"], ASKED["results"], strict=False)):
            key = json.dumps(op)
            counts[key] = counts.get(key, 0) + 1
            self._known[key, counts[key]] = index, result

    def ask(self, op, args=()):
        key = json.dumps(op)
        self._asked[key] = self._asked.get(key, 0) + 1
        known = self._known.get((key, self._asked[key]))
        if known is None:
            if ASKED["dead"]:
                self.dead += 1
            else:
                self.needs.append(op)
            raise Unanswered
        index, result = known
        if "e" in result:
            raise _error(*result["e"])
        for mine, theirs in zip(args, _plain(result.get("a")) or (), strict=False):
            _follow(mine, theirs)
        return Remote(["result", index]) if "h" in result else _plain(result["v"])


def _plain(form):
    return unpack(form, lambda tag, body: None)


def _error(name, text) -> Exception:
    known = getattr(builtins, str(name), None)
    if not (isinstance(known, type) and issubclass(known, Exception)):
        known = type(str(name), (Exception,), {})
    try:
        return known(str(text))
    except TypeError:  # some, like UnicodeDecodeError, want more than a text
        return ValueError(str(text))


def _follow(mine, theirs):
    """Functions that change their arguments do so here too."""
    if type(mine) is not type(theirs) or mine == theirs:
        return
    if isinstance(mine, list):
        mine[:] = theirs
    elif isinstance(mine, dict | set):
        mine.clear()
        mine.update(theirs)


class Remote:
    """Something of the code under test. Comparing or counting it fetches its plain value."""

    __slots__ = ("_path",)
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, path):
        object.__setattr__(self, "_path", path)

    def __call__(self, *args, **kwargs):
        forms = [pack(list(args), _path_of), pack(kwargs, _path_of)]
        return ANSWERS.ask(["call", self._path, *forms], args)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote(["attr", self._path, name])

    def _value(self):
        value = ANSWERS.ask(["get", self._path])
        if isinstance(value, Remote):
            raise TypeError("tests can compare plain data only, not objects of the code under test")
        return value

    def __eq__(self, other):
        return self._value() == other

    def __ne__(self, other):
        return self._value() != other

    def __bool__(self):
        return bool(self._value())

    def __len__(self):
        return len(self._value())

    def __iter__(self):
        return iter(self._value())

    def __getitem__(self, key):
        return self._value()[key]

    def __contains__(self, item):
        return item in self._value()


def _path_of(value):
    if isinstance(value, Remote):
        return ["r", value._path]
    raise TypeError(f"a {type(value).__name__} cannot be handed to the code under test")


class RemoteModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote(["name", name])


class Verdict:
    def __init__(self):
        self.passed, self.failed, self.pending = 0, [], False

    def check(self, label, run):
        needs, dead, why = len(ANSWERS.needs), ANSWERS.dead, ""
        try:
            run()
        except (Exception, SystemExit, Unanswered) as error:
            why = f"{type(error).__name__}: {error}"
        if len(ANSWERS.needs) > needs:
            self.pending = True
        elif ANSWERS.dead > dead:
            self.fail(label, ASKED["dead"])
        elif why:
            self.fail(label, why)
        else:
            self.passed += 1

    def fail(self, label, why):
        self.failed.append([label, why[:300]])


def statements(tree, names, verdict):
    """Top-level asserts and calls of the tests' own functions are checks. All else prepares them, and ends
    the tests if it fails."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module in ASKED["modules"] and node.names[0].name == "*":
            continue
        code = compile(ast.Module([node], []), "tests", "exec")
        if isinstance(node, ast.Assert) or calls_own(node, names):
            verdict.check(ast.unparse(node)[:200], lambda code=code: exec(code, names))
            continue
        try:
            exec(code, names)
        except (Exception, Unanswered) as error:
            if isinstance(node, ast.Import | ast.ImportFrom):
                raise Broken(f"the tests cannot be run: {error}") from error
            verdict.pending = bool(ANSWERS.needs)
            verdict.fail(ast.unparse(node)[:200], ASKED["dead"] or f"{type(error).__name__}: {error}")
            return


def calls_own(node, names):
    """Whether a statement calls something that the tests define, like ``check(candidate)``."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    called = node.value.func
    return isinstance(called, ast.Name) and isinstance(names.get(called.id), types.FunctionType)


def functions(names, verdict):
    """``test_*`` functions without arguments, and the methods of unittest cases."""
    cases = sys.modules["unittest"].TestCase if "unittest" in sys.modules else ()
    for name, value in list(names.items()):
        if name.startswith("test") and isinstance(value, types.FunctionType):
            if not inspect.signature(value).parameters:
                verdict.check(name, value)
        elif isinstance(value, type) and issubclass(value, cases):
            for method in [m for m in dir(value) if m.startswith("test")]:
                verdict.check(f"{name}.{method}", lambda c=value, m=method: unit(c(m), m))


def unit(case, method):
    case.setUp()
    try:
        getattr(case, method)()
    finally:
        case.tearDown()


def main():
    for name in ASKED["modules"]:
        if name not in sys.stdlib_module_names:
            sys.modules[name] = RemoteModule(name)
    try:
        tree = ast.parse(ASKED["tests"])
    except (SyntaxError, ValueError) as error:
        raise Broken(f"the tests are no Python: {error}") from error
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - set(dir(builtins))
    names = {"__name__": "tests", **{n: Remote(["name", n]) for n in used}}
    verdict = Verdict()
    statements(tree, names, verdict)
    functions(names, verdict)
    if verdict.pending:
        return {"needs": ANSWERS.needs}
    return {"passed": verdict.passed, "failed": verdict.failed}


ANSWERS = Answers()
try:
    answer = main()
except Broken as broken:
    answer = {"error": str(broken)}
with open(ASKED["verdict"], "w") as out:
    json.dump(answer, out)
