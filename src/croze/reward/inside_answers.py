"""Runs *inside* the sandbox of the hidden tests: what the code under test has said, and what stands for it.

The tests ask in a fixed order, and the log of what they asked is played to the code from the start. Where an
answer is missing they go on with a guess, so that one turn finds many questions; nothing that comes after a
guess is ever a verdict, and the log is cut where a guess was wrong.
"""

import builtins
import json
import os
import sys

# `pack` and `unpack` stand above this text when it runs.
# ruff: noqa: F821
# pyright: reportUndefinedVariable=false

ASKED = json.loads(sys.stdin.read())
MOST_GUESSES = 100_000


def conclude(answer):
    with open(ASKED["verdict"], "w") as out:
        json.dump(answer, out)


class Unanswered(BaseException):
    """There never will be an answer. A check that meets one has not passed, whatever it catches."""


class Broken(Exception):
    """The tests are at fault, not what they test."""


class Unsupported(BaseException):
    """The tests want what cannot be had across the wall."""


class Answers:
    """What the code under test has said, in the order of asking."""

    def __init__(self):
        self.asked, self.needs, self.dead, self.unsupported = 0, [], 0, ""
        self.kept = 0
        self._guesses = 0

    @property
    def guessing(self):
        return bool(self.needs)

    def ask(self, op, args=()):
        index = self.asked
        if self.dead:
            self.dead += 1
            raise Unanswered
        if not self.guessing and index < len(ASKED["log"]) and self._same(op, ASKED["log"][index]):
            if index < len(ASKED["results"]):
                self.asked += 1
                return self._given(index, ASKED["results"][index], args)
            if ASKED["dead"]:
                self.dead += 1
                raise Unanswered
        if not self.guessing:
            self.kept = index
        self.needs.append(op)
        self.asked += 1
        if len(self.needs) >= ASKED["most"]:
            self.leave()
        return Guess(["result", index])

    def _same(self, op, logged):
        return op == logged or (op[:2] == logged[:2] and op[2:] == [self._settled(f) for f in logged[2:]])

    def _settled(self, form):
        """A form with the answers in place that were guesses when it was asked."""
        if not isinstance(form, list):
            return form
        tag, body = form
        if tag == "p":
            told = ASKED["results"][body] if body < len(ASKED["results"]) else {}
            return told.get("v", ["r", ["result", body]])
        if tag == "d":
            return [tag, [[k, self._settled(v)] for k, v in body]]
        return [tag, [self._settled(v) for v in body]] if tag in ("l", "t", "q") else form

    def _given(self, index, result, args):
        for mine, theirs in zip(args, plain_of(result.get("a")) or (), strict=False):
            follow(mine, theirs)
        if "w" in result:
            return awaited(index, result)
        return value_of(index, result)

    def guess(self):
        """Count a guess. Endless ones end the turn."""
        self._guesses += 1
        if self._guesses > MOST_GUESSES:
            self.leave()

    def leave(self):
        conclude({"needs": self.needs, "kept": self.kept})
        os._exit(0)

    def refuse(self, why):
        """The tests' fault, once it is certain that they come this way."""
        if self.guessing:
            raise Unanswered
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_filename != "tests":
            frame = frame.f_back
        line = f"line {frame.f_lineno}: " if frame is not None else ""
        self.unsupported = self.unsupported or line + why
        raise Unsupported(why)


def value_of(index, result):
    if "e" in result:
        raise error_of(*result["e"])
    path = ["result", index]
    if "x" in result:
        kind = class_of(result["x"])
        CLASS_PATHS[kind] = path
        return kind
    if "n" in result:
        return RemoteIterator(path)
    return Remote(path) if "h" in result else plain_of(result["v"])


async def awaited(index, result):
    return value_of(index, result)


def plain_of(form):
    return unpack(form, lambda _, path: Remote(path))


CLASSES, CLASS_PATHS = {}, {}


def class_of(form):
    """The exception class of that name and those bases; one of the tests' own modules where it comes from there."""
    name, module, bases = form
    known = getattr(sys.modules.get(module), name, None) if module.partition(".")[0] in LIBRARY else None
    if isinstance(known, type) and issubclass(known, BaseException):
        return known
    key = json.dumps(form)
    if key not in CLASSES:
        parents = tuple(dict.fromkeys(class_of(b) for b in bases if b[0] != "object")) or (Exception,)
        body = {"__str__": lambda self: self._text, "_text": ""}
        try:
            CLASSES[key] = type(name, parents, body)
        except TypeError:  # bases that do not go together here
            CLASSES[key] = type(name, (Exception,), body)
    return CLASSES[key]


LIBRARY = sys.stdlib_module_names - {"unittest"}
"""Whose exceptions are their own. A skip is the tests' to decide."""


def error_of(form, text, args, attributes):
    kind = class_of(form)
    if not issubclass(kind, Exception):
        kind = Exception
    error = kind.__new__(kind)  # some, like UnicodeDecodeError, want more than a text to begin with
    error.args = tuple(plain_of(args)) if args is not None else (text,)
    error.__dict__.update(plain_of(attributes) or {}, _text=text)
    return error


def follow(mine, theirs):
    """Functions that change their arguments do so here too."""
    if type(mine) is not type(theirs):
        return
    if isinstance(mine, list):
        mine[:] = theirs
    elif isinstance(mine, dict | set):
        mine.clear()
        mine.update(theirs)


def form_of(value):
    """An argument that is not plain."""
    if isinstance(value, Guess):
        return ["p", value._path[1]]
    if isinstance(value, Remote):
        return ["r", value._path]
    if isinstance(value, type) and value in CLASS_PATHS:
        return ["r", CLASS_PATHS[value]]
    if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
        return ["r", ["builtin", value.__name__]]
    if isinstance(value, Anything):
        raise Unanswered
    return ANSWERS.refuse(f"a {type(value).__name__} cannot be handed to the code under test")


def call(path, args, kwargs):
    try:
        forms = [pack(list(args), form_of), pack(kwargs, form_of)]
    except (TypeError, RecursionError) as error:
        ANSWERS.refuse(str(error))
    return ANSWERS.ask(["call", path, *forms], args)


def do(what, *args):
    return call(["do", what], args, {})


class Remote:
    """Something of the code under test. It decides nothing here: compared with plain data it is never equal."""

    __slots__ = ("_path",)

    def __init__(self, path):
        object.__setattr__(self, "_path", path)

    def __call__(self, *args, **kwargs):
        return call(self._path, args, kwargs)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return ANSWERS.ask(["get", ["attr", self._path, name]])

    def __setattr__(self, name, value):
        do("setattr", self, name, value)

    def __delattr__(self, name):
        do("delattr", self, name)

    def __eq__(self, other):
        if other is self:
            return True
        if other is None:
            return False
        return against(other)

    def __ne__(self, other):
        return not self == other

    def __bool__(self):
        return bool(do("bool", self))

    def __len__(self):
        return do("len", self)

    def __iter__(self):
        return iter(do("iter", self))  # pyright: ignore[reportCallIssue, reportArgumentType]

    def __getitem__(self, key):
        return do("getitem", self, key)

    def __setitem__(self, key, value):
        do("setitem", self, key, value)

    def __delitem__(self, key):
        do("delitem", self, key)

    def __contains__(self, item):
        return bool(do("contains", self, item))

    def __str__(self):
        return str(do("str", self))

    def __hash__(self):
        return ANSWERS.refuse("an object of the code under test cannot be hashed")

    def __enter__(self):
        return call(["attr", self._path, "__enter__"], (), {})

    def __exit__(self, *error):
        return call(["attr", self._path, "__exit__"], error, {})


def against(other):
    """Comparing an object of the code with something: its own methods would decide, so nothing does."""
    if isinstance(other, Guess):
        return True
    if isinstance(other, Remote):
        ANSWERS.refuse("objects of the code under test cannot be compared or reckoned with each other")
    try:
        pack(other, form_of)
    except TypeError as error:
        ANSWERS.refuse(str(error))
    raise TypeError("the code gave an object where the tests compare plain data")


for _name in ("lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(Remote, f"__{_name}__", lambda self, other: against(other))
    setattr(Remote, f"__r{_name}__", lambda self, other: against(other))


class RemoteIterator(Remote):
    """An iterator of the code, read ahead in growing portions."""

    __slots__ = ("_ahead", "_ended", "_portion")

    def __init__(self, path):
        for name, value in (("_path", path), ("_ahead", []), ("_ended", False), ("_portion", 1)):
            object.__setattr__(self, name, value)

    def __iter__(self):
        return self

    def __next__(self):
        if not self._ahead and not self._ended:
            told = do("take", self, self._portion)
            if isinstance(told, Guess):
                raise StopIteration
            if not isinstance(told, list):
                raise TypeError("the code gave no list of items")
            self._ahead.extend(reversed(told))
            object.__setattr__(self, "_ended", len(told) < self._portion)
            object.__setattr__(self, "_portion", min(4 * self._portion, 4096))
        if not self._ahead:
            raise StopIteration
        return self._ahead.pop()


class Anything:
    """What a guess computes to. Whatever is asked of it, it answers so that the tests go on."""

    __slots__ = ("_path",)


class Guess(Anything):
    """An answer that is not known yet."""

    __slots__ = ()

    def __init__(self, path):
        self._path = path

    def __call__(self, *args, **kwargs):
        return call(self._path, args, kwargs)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return ANSWERS.ask(["get", ["attr", self._path, name]])


def _guessed(value):
    def method(self, *_):
        ANSWERS.guess()
        return value() if isinstance(value, type) else value

    return method


for _names, _value in (
    ("eq ne lt le gt ge contains bool", True),
    (
        "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg abs round",
        Anything,
    ),
    ("and rand or ror xor rxor getitem enter", Anything),
    ("len hash int index", 1),
    ("float", 1.0),
    ("str", ""),
    ("exit setitem delitem", None),
):
    for _name in _names.split():
        setattr(Anything, f"__{_name}__", _guessed(_value))
Anything.__iter__ = lambda self: iter(())  # pyright: ignore[reportAttributeAccessIssue]

ANSWERS = Answers()
