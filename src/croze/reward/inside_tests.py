"""Runs *inside* a sandbox that the model's code never enters: the hidden tests, and so the verdict.

Names that the tests use and do not define stand for the code under test; see ``inside_answers.py``. Only plain
data comes back, so that every comparison is made here, by true builtins.

Asked on stdin: {"tests", "modules", "log", "results", "dead", "most"}; answer, in the file ``VERDICT``: {"needs":
[op, ...], "kept": n}, which follow on the first n of the log, or {"passed": n, "failed": [[check, why], ...]} or
{"error": text}.
"""

import ast
import asyncio
import builtins
import inspect
import random
import sys
import types

# `inside_answers.py` stands above this text when it runs.
# ruff: noqa: F821
# pyright: reportUndefinedVariable=false

COMPOUND = (
    ast.For | ast.While | ast.If | ast.Try | ast.TryStar | ast.With | ast.AsyncFor | ast.AsyncWith | ast.Match
)


class RemoteModule(types.ModuleType):
    __path__ = ()  # pyright: ignore[reportAssignmentType]

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        path = ["name", name, self.__name__]
        try:
            return ANSWERS.ask(["get", path])
        except NameError:  # using it fails, importing it does not
            return Remote(path)


class Names(dict):
    """The tests' globals: what they do not define is the code's."""

    def __missing__(self, name):
        if name.startswith("__") or hasattr(builtins, name):
            raise KeyError(name)
        return ANSWERS.ask(["get", ["name", name, None]])


def is_instance(value, kind):
    """``isinstance`` that knows the classes of the code under test."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, Anything) or any(isinstance(k, Anything) for k in kinds):
        return True
    remote = [k for k in kinds if isinstance(k, Remote)]
    if isinstance(value, tuple([k for k in kinds if not isinstance(k, Remote)])):
        return True
    return any(bool(do("isinstance", value, k)) for k in remote)


class Verdict:
    def __init__(self):
        self.passed, self.failed = 0, []

    def check(self, label, run):
        dead, why = ANSWERS.dead, ""
        try:
            result = run()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except (Exception, SystemExit, Unanswered, Unsupported) as error:
            if is_skip(error):
                return
            why = f"{type(error).__name__}: {error}"
        if ANSWERS.dead > dead:
            self.fail(label, ASKED["dead"])
        elif why:
            self.fail(label, why)
        else:
            self.passed += 1

    def fail(self, label, why):
        self.failed.append([label, why[:300]])


def is_skip(error):
    return "unittest" in sys.modules and isinstance(error, sys.modules["unittest"].SkipTest)


def statements(tree, names, verdict):
    """Checks are top-level asserts, calls of the tests' own functions, and compound statements that hold such.
    All else prepares them; where it fails, the checks that follow fail too."""
    broken = ""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module in ASKED["modules"] and node.names[0].name == "*":
            continue
        label = ast.unparse(node)[:200]
        code = compile(ast.Module([lenient(node)], []), "tests", "exec")
        if is_check(node, names):
            if broken:
                verdict.fail(label, broken)
            else:
                verdict.check(label, lambda code=code: exec(code, names))
            continue
        if broken and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        try:
            run(node, code, names)
        except (Exception, SystemExit, Unanswered, Unsupported) as error:
            if not ANSWERS.asked and not ANSWERS.dead:
                raise Broken(f"the tests cannot be run: line {node.lineno}: {error}") from error
            broken = (ASKED["dead"] if ANSWERS.dead else "") or f"{type(error).__name__}: {error}"
            verdict.fail(label, broken)


def run(node, code, names):
    """A file under test may be named like a module of the library: then the tests that import it mean the file."""
    wanted = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None)]
    shadowed = {
        n: sys.modules.get(n) for n in wanted if n in ASKED["modules"] and n in sys.stdlib_module_names
    }
    sys.modules.update({n: RemoteModule(n) for n in shadowed})
    try:
        exec(code, names)
    except ImportError as error:
        raise Broken(f"the tests cannot be run: line {node.lineno}: {error}") from error
    finally:
        for name, module in shadowed.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


class Lenient(ast.NodeTransformer):
    """An assert holds while the tests go on with guesses, so that they ask what comes after it too."""

    def visit_Assert(self, node):
        self.generic_visit(node)
        either = ast.BoolOp(ast.Or(), [node.test, ast.Call(ast.Name(" guessing", ast.Load()), [], [])])
        return ast.copy_location(ast.Assert(either, node.msg), node)


def lenient(node):
    return ast.fix_missing_locations(Lenient().visit(node))


def is_check(node, names):
    if isinstance(node, COMPOUND):
        return any(isinstance(n, ast.Assert | ast.Raise) or calls_own(n, names) for n in ast.walk(node))
    return isinstance(node, ast.Assert) or calls_own(node, names)


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
        elif isinstance(value, type) and issubclass(value, cases) and value.__module__ == "tests":
            for method in [m for m in dir(value) if m.startswith("test")]:
                verdict.check(f"{name}.{method}", lambda c=value, m=method: unit(c, m))


def unit(kind, method):
    # What a guess is an instance of, unittest would deny.
    sys.modules["unittest.case"].isinstance = is_instance  # pyright: ignore[reportAttributeAccessIssue]
    case = kind(method)
    kind.setUpClass()
    case.setUp()
    try:
        result = getattr(case, method)()
        if inspect.iscoroutine(result):
            asyncio.run(result)
    finally:
        case.tearDown()
        case.doCleanups()


def prepare():
    for name in ASKED["modules"]:
        if name.partition(".")[0] in sys.stdlib_module_names:
            continue
        above, parts = None, name.split(".")
        for end in range(1, len(parts) + 1):
            full = ".".join(parts[:end])
            module = sys.modules.setdefault(full, RemoteModule(full))
            if above is not None:
                setattr(above, parts[end - 1], module)
            above = module
    # The tests run again with every turn, and have to ask the same again.
    random.seed(0)
    own = {"__name__": "tests", "isinstance": is_instance, " guessing": lambda: ANSWERS.guessing}
    return Names(own)


def main():
    try:
        tree = ast.parse(ASKED["tests"])
    except (SyntaxError, ValueError) as error:
        raise Broken(f"the tests are no Python: {error}") from error
    names, verdict = prepare(), Verdict()
    statements(tree, names, verdict)
    functions(names, verdict)
    if ANSWERS.unsupported:
        raise Broken(f"the tests cannot be graded: {ANSWERS.unsupported}")
    if ANSWERS.guessing:
        return {"needs": ANSWERS.needs, "kept": ANSWERS.kept}
    if not verdict.passed and not verdict.failed:
        raise Broken("the tests hold no check")
    return {"passed": verdict.passed, "failed": verdict.failed}


try:
    conclude(main())
except Broken as broken:
    conclude({"needs": ANSWERS.needs, "kept": ANSWERS.kept} if ANSWERS.guessing else {"error": str(broken)})
