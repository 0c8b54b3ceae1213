"""Runs *inside* a sandbox, beside the model's code: does what it is asked, in order, and tells the values.

Nothing here decides anything, and nothing that should not be known is here: code in this process can make it
say whatever it likes, which is no more than code that computes the wrong values.

Asked on stdin: {"modules": [...], "files": [...], "log": [op, ...]}; a result a line goes to the file
``RESULTS``. An op is ["get", path] or ["call", path, args, kwargs]; a path ["name", n, module or null],
["result", i], ["object", i], ["attr", path, n] or ["do", n], which is one of ``DOINGS``. An argument ["p", i] is
a copy of result i. A result is {"v": value} or {"h": 1} (not plain: it stays here, as result i), or {"e": [class,
text, args, attributes]}. Beside these: "x" the class, of an exception class; "n", an iterator; "w", it was awaited;
"a", a call's arguments as they are afterwards, where they changed.
"""

import asyncio
import builtins
import importlib
import importlib.util
import inspect
import itertools
import json
import operator
import os
import random
import shutil
import sys

# `pack` and `unpack` stand above this text when it runs.
# ruff: noqa: F821
# pyright: reportUndefinedVariable=false

DOINGS = {
    "bool": bool,
    "len": len,
    "contains": operator.contains,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "setattr": setattr,
    "delattr": delattr,
    "isinstance": isinstance,
    "iter": iter,
    "str": str,
    "repr": repr,
    "hash": hash,
    "take": lambda values, count: list(itertools.islice(values, count)),
}


def tidy(files):
    """Every run begins with the same files."""
    kept = {os.path.normpath(f) for f in files}
    folders = {folder for f in kept for folder in parents(f)}
    for top, inner, names in os.walk("."):
        for name in [n for n in inner if os.path.normpath(os.path.join(top, n)) not in folders]:
            shutil.rmtree(os.path.join(top, name), ignore_errors=True)
            inner.remove(name)
        for name in [n for n in names if os.path.normpath(os.path.join(top, n)) not in kept]:
            os.unlink(os.path.join(top, name))


def parents(path):
    while path := os.path.dirname(path):
        yield path


def load(name):
    """Import a file under test, also one that is named like a module of the standard library."""
    if name.partition(".")[0] not in sys.stdlib_module_names:
        return importlib.import_module(name)
    path = name.replace(".", "/")
    path = path + ".py" if os.path.exists(path + ".py") else path + "/__init__.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)  # pyright: ignore[reportArgumentType]
    sys.modules[name] = module
    spec.loader.exec_module(module)  # pyright: ignore[reportOptionalMemberAccess]
    return module


def class_form(kind):
    """[name, module, [base, ...]] up to what the language brings."""
    if kind.__module__ == "builtins":
        return [kind.__name__, "builtins", []]
    return [kind.__name__, str(kind.__module__), [class_form(b) for b in kind.__bases__]]


class Performer:
    """Does ops, and keeps what came of them."""

    def __init__(self, modules):
        self._modules = modules
        self._results, self._told, self._objects = [], [], []
        self._loop = None

    def resolve(self, path):
        kind, *rest = path
        if kind == "result":
            return self._results[rest[0]]
        if kind == "object":
            return self._objects[rest[0]]
        if kind == "attr":
            return getattr(self.resolve(rest[0]), rest[1])
        if kind == "do":
            return DOINGS[rest[0]]
        if kind == "builtin":
            return getattr(builtins, rest[0])
        name, where = rest
        for module in self._modules:
            if where in (None, module.__name__) and hasattr(module, name):
                return getattr(module, name)
        raise NameError(f"name {name!r} is not defined")

    def answer(self, op):
        value, answer = None, {}
        try:
            if op[0] == "get":
                value = self.resolve(op[1])
            else:
                args, kwargs = (unpack(form, self._argument) for form in op[2:])
                value = self.resolve(op[1])(*args, **kwargs)
                after = pack(args, lambda _: None)
                if after != op[2]:
                    answer["a"] = after
            if inspect.iscoroutine(value):
                answer["w"] = 1
                value = self._await(value)
            answer |= self._form(value)
        except Exception as error:
            answer["e"] = self._error(error)
        self._results.append(value)
        self._told.append(answer)
        return answer

    def _argument(self, tag, body):
        if tag == "p":
            answer = self._told[body]
            return unpack(answer["v"], self._argument) if "v" in answer else self._results[body]
        return self.resolve(body)

    def _await(self, value):
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(value)

    def _form(self, value):
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"h": 1, "x": class_form(value)}
        if hasattr(type(value), "__next__"):
            return {"h": 1, "n": 1}
        if callable(value):
            return {"h": 1}
        kept = len(self._objects)
        try:
            form = pack(value, self._keep)
        except TypeError:  # members of sets, keys
            form = ["r", None]
        if isinstance(form, list) and form[0] == "r":
            del self._objects[kept:]
            return {"h": 1}
        return {"v": form}

    def _keep(self, value):
        self._objects.append(value)
        return ["r", ["object", len(self._objects) - 1]]

    def _error(self, error):
        try:
            told = [pack(list(error.args)), pack(vars(error))]
        except (TypeError, RecursionError):
            told = [None, None]
        return [class_form(type(error)), str(error)[:500], *told]


def main():
    asked = json.loads(sys.stdin.read())
    dumps = json.dumps
    tidy(asked["files"])
    sys.path.insert(0, "")
    # The code is run again from the start when the tests ask more, and should say the same again.
    random.seed(0)
    out = os.open(asked["results"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def tell(answer):
        data = (dumps(answer) + "\n").encode()
        while data:
            data = data[os.write(out, data) :]

    try:
        modules = [load(name) for name in asked["modules"]]
    except BaseException as error:
        tell({"e": [type(error).__name__, str(error)[:500]]})
        raise
    tell({"h": 1})
    performer = Performer(modules)
    for op in asked["log"]:
        tell(performer.answer(op))


main()
