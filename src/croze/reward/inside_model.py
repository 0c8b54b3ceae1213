"""Runs *inside* a sandbox, beside the model's code: does what it is asked, in order, and tells the values.

Nothing here decides anything, and nothing that should not be known is here: code in this process can make it
say whatever it likes, which is no more than code that computes the wrong values.

Asked on stdin: {"modules": [...], "log": [op, ...]}; a result a line goes to the file ``RESULTS``. An op is
["get", path] or ["call", path, args, kwargs]; a path ["name", n], ["result", i] or ["attr", path, n]. A result
is {"v": value}, {"h": 1} for what is not plain (it stays here, as result i), or {"e": [type, text]}; a call
also tells its arguments as they are afterwards, as "a".
"""

import importlib
import json
import os
import sys

# `pack` and `unpack` stand above this text when it runs.
# ruff: noqa: F821
# pyright: reportUndefinedVariable=false


def main():
    asked = json.loads(sys.stdin.read())
    results = []
    out = os.open(asked["results"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def tell(answer):
        data = (json.dumps(answer) + "\n").encode()
        while data:
            data = data[os.write(out, data) :]

    try:
        modules = [importlib.import_module(name) for name in asked["modules"]]
    except BaseException as error:
        tell({"e": [type(error).__name__, str(error)[:500]]})
        raise
    tell({"h": 1})

    def resolve(path):
        kind, *rest = path
        if kind == "result":
            return results[rest[0]]
        if kind == "attr":
            return getattr(resolve(rest[0]), rest[1])
        for module in modules:
            if hasattr(module, rest[0]):
                return getattr(module, rest[0])
        raise NameError(f"name {rest[0]!r} is not defined")

    def perform(op):
        if op[0] == "get":
            return resolve(op[1]), None
        args, kwargs = (unpack(form, lambda _, path: resolve(path)) for form in op[2:])
        return resolve(op[1])(*args, **kwargs), args

    for op in asked["log"]:
        value, answer = None, {}
        try:
            value, args = perform(op)
            answer = {"h": 1} if callable(value) else {"v": pack(value, _refuse)}
            if args is not None:
                answer["a"] = pack(args, lambda _: None)
        except _Opaque:
            answer = {"h": 1}
        except Exception as error:
            answer = {"e": [type(error).__name__, str(error)[:500]]}
        results.append(value)
        tell(answer)


class _Opaque(Exception):
    pass


def _refuse(value):
    raise _Opaque


main()
