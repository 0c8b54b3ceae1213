"""The task files that ``croze init`` writes: short, complete, and explained to who reads croze for the first time.

Each environment has two forms: for ``tiny-calc``, a model of 0.8M parameters that knows one kind of prompt and needs
no chat, and for chat models.
"""

from __future__ import annotations

import json
from typing import Literal

import msgspec

Environment = Literal["math", "code", "tool"]
TINY = "tiny-calc"


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between task files: imports, what they define first, tasks, the reward, values of the Run."""

    imports: str
    values: str = ""
    tasks: str
    reward: str
    source: str = "problems"
    steps: int = 30
    groups: int = 4
    max_tokens: int = 12
    lr: str = "2e-5"
    held_out: bool = True


def write(environment: Environment, model: str, name: str) -> str:
    """The text of the task file ``name``.py, which trains ``model``."""
    summary, tiny, chat = STARTERS[environment]
    form = tiny if model == TINY else chat
    reward = form.reward.partition("(")[0].rpartition(" ")[2]
    commands = [command.format(name=name) for command, _ in _USAGE]
    width = max(map(len, commands))
    usage = "\n".join(f"{c:<{width}}    {does}" for c, (_, does) in zip(commands, _USAGE, strict=True))
    head = _HEAD.format(summary=summary, usage=usage, imports=form.imports)
    if form.values:
        head += "\n" + form.values.strip("\n")
    parts = [
        head,
        form.tasks,
        _REWARD + form.reward.lstrip("\n"),
        _RUN.format(
            model=json.dumps(model, ensure_ascii=False),
            source=form.source,
            reward=reward,
            steps=form.steps,
            groups=form.groups,
            max_tokens=form.max_tokens,
            lr=form.lr,
            held_out=_HELD_OUT if form.held_out else "",
        ),
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts if part) + "\n"


_HEAD = '''"""{summary}

{usage}
"""

{imports}
'''

_USAGE = (
    ("croze check {name}.py", "does it all fit together? Seconds; nothing is trained"),
    ("croze train {name}.py steps=2", "two steps"),
    ("croze train {name}.py", "all of them; Ctrl-C saves, and `croze resume` goes on"),
    ("croze keys", "everything that can be set with a key=value word"),
)

_REWARD = """
# A reward is called by argument name: `reply` is what the model wrote, `sandbox` a fresh isolated place to run things
# in, any other name a column of the task. It returns a number, or a dict of named parts that are added up. It runs in
# a process of its own, with a deadline: what goes wrong with that process is never counted against the model.
"""

_RUN = """
# A Run is plain data: nothing starts before `croze train`. Its values can be overridden with key=value words.
run = cz.Run(
    model={model},
    tasks=cz.tasks({source}),
    reward={reward},
    steps={steps},
    groups_per_step={groups},  # tasks in a step
    group_size=8,  # attempts at each task; the model learns from which of them were better than their siblings
    sampling=cz.Sampling(max_tokens={max_tokens}),
    optim=cz.Optim(lr={lr}),
{held_out})
"""

_HELD_OUT = "    loop=cz.LoopOptions(eval_tasks=32),  # held out, to measure on at the start and at the end\n"

_TASKS = """
# A task is a row: a dict with a "prompt" and whatever columns the reward asks for. This function is called with a seed
# and yields rows for as long as croze wants more; the same seed must give the same rows. A list works too, and so do
# "FILE.jsonl", "FILE.parquet" and "hf:ORG/NAME".
"""

_TINY_PROBLEMS = (
    _TASKS
    + """
def problems(seed: int) -> Iterator[dict]:
    rng = random.Random(seed)
    while True:
        a, b, c = rng.randint(2, 30), rng.randint(2, 30), rng.randint(2, 9)
        # tiny-calc comes with croze, and this is the kind of prompt that it knows
        yield {"prompt": f"add {a} and {b}, times {c}=", COLUMN}
""".lstrip()
)

_SHOTS = """
# A prompt is text, or a list of chat messages. Examples in it show the model what an answer looks like: what it never
# does by chance, it cannot learn to do more often.
SHOTS = [
    SHOWN
]
"""

_CHAT_PROBLEMS = (
    _TASKS
    + """
def problems(seed: int) -> Iterator[dict]:
    rng = random.Random(seed)
    while True:
        DRAWN
        question = {"role": "user", "content": f"QUESTION"}
        yield {"prompt": [*SHOTS, question], "answer": str(ANSWER)}
""".lstrip()
)

_RANDOM = "import random\nfrom collections.abc import Iterator\n\nimport croze as cz"


def _shots(*said: str) -> str:
    """An example chat: the system's message, then questions and answers in turn."""
    roles = ["system", *["user", "assistant"] * len(said)]
    lines = [f'{{"role": "{role}", "content": "{text}"}},' for role, text in zip(roles, said, strict=False)]
    return _SHOTS.replace("SHOWN", "\n    ".join(lines))


def _chat(drawn: str, question: str, answer: str) -> str:
    return _CHAT_PROBLEMS.replace("DRAWN", drawn).replace("QUESTION", question).replace("ANSWER", answer)


_MATH_TINY = Form(
    imports=_RANDOM + "\nfrom croze.reward.expression import evaluate",
    tasks=_TINY_PROBLEMS.replace("COLUMN", '"answer": str((a + b) * c)'),
    reward="""
def correct(reply: str, answer: str) -> float:
    value = evaluate(reply)  # a parser of expressions: the model's text is never run
    return 1.0 if str(value) == answer else 0.1 * (value is not None)
""",
    steps=60,
    groups=8,
    lr="3e-4",
)

_MATH_CHAT = Form(
    imports=_RANDOM + "\nfrom croze.reward.math import math_equal",
    values=_shots("Answer with a number.", "What is 2 + 3 - 1?", "4", "What is 7 + 6 - 4?", "9"),
    tasks=_chat(
        "a, b, c = (rng.randint(1, 9) for _ in range(3))",
        "What is {a} + {b} - {c}?",
        "a + b - c",
    ),
    reward="""
async def correct(reply: str, answer: str) -> dict[str, float]:
    right = math_equal(reply, answer)  # reads LaTeX, fractions, \\boxed{}: see croze.reward.math
    return {"right": float(right), "short": 0.1 * (len(reply.strip()) <= 4)}
""",
)

_GRADED = """
    report = await run_tests(sandbox, {"solution.py": code}, tests)  # the code never sees the tests
    result = await sandbox.exec_python(code)
    # a little for code that runs at all: where all siblings get the same, there is nothing to learn
    return {"tests": report.score, "runs": 0.1 * (result.exit_code == 0)}
"""

_CODE_TINY = Form(
    imports=_RANDOM + "\nfrom croze.reward.code import run_tests",
    tasks=_TINY_PROBLEMS.replace("COLUMN", '"tests": f"assert solve() == {(a + b) * c}"'),
    reward="""
async def hidden_tests(reply: str, tests: str, sandbox: cz.Sandbox) -> dict[str, float]:
    code = f"def solve():\\n    return {reply}\\n"  # so small a model writes only what the function returns"""
    + _GRADED,
    steps=60,
    groups=8,
    lr="3e-4",
)

_CODE_CHAT = Form(
    imports="import re\n\nimport croze as cz\nfrom croze.reward.code import run_tests",
    values="""
TASKS = {
    "double(x) that returns twice x": "assert double(4) == 8\\nassert double(-1) == -2",
    "last(items) that returns the last element of a list": "assert last([1, 2, 3]) == 3",
    "is_even(n) that tells whether n is even": "assert is_even(4) is True\\nassert is_even(7) is False",
    "total(numbers) that returns the sum of a list": "assert total([1, 2]) == 3\\nassert total([]) == 0",
    "backwards(text) that reverses a string": "assert backwards('abc') == 'cba'\\nassert backwards('') == ''",
}
ASK = "Write a Python function {}. Reply with the code only, without explanation."
# A task is a row: a dict with a "prompt" (text or chat messages) and whatever columns the reward asks for. A list is
# shuffled anew every epoch. "FILE.jsonl", "FILE.parquet", "hf:ORG/NAME" and a function of a seed work too.
ROWS = [{"prompt": [{"role": "user", "content": ASK.format(w)}], "tests": t} for w, t in TASKS.items()]
""",
    tasks="",
    reward="""
async def hidden_tests(reply: str, tests: str, sandbox: cz.Sandbox) -> dict[str, float]:
    block = re.search(r"```(?:python)?\\n(.*?)(?:```|\\Z)", reply, re.DOTALL)
    code = block.group(1) if block else reply"""
    + _GRADED,
    source="ROWS",
    max_tokens=64,
    lr="1e-5",
    held_out=False,
)

_RUN_REPLY = """
async def correct(reply: str, answer: str, sandbox: cz.Sandbox) -> float:
    # a sandbox has no network and none of your files; its time and memory are limited (croze keys sandbox)
    result = await sandbox.exec_python(f"print({reply})")
    return 1.0 if result.text.strip() == answer else 0.1 * (result.exit_code == 0)
"""

_TOOL_TINY = Form(
    imports=_RANDOM,
    tasks=_TINY_PROBLEMS.replace("COLUMN", '"answer": str((a + b) * c)'),
    reward=_RUN_REPLY,
    steps=60,
    groups=8,
    lr="3e-4",
)

_TOOL_CHAT = Form(
    imports=_RANDOM,
    values=_shots("Reply with Python.", "add 3 and 4, times 2", "(3 + 4) * 2", "9 times 2", "9 * 2"),
    tasks=_chat(
        "a, b, c = rng.randint(2, 30), rng.randint(2, 30), rng.randint(2, 9)",
        "add {a} and {b}, times {c}",
        "(a + b) * c",
    ),
    reward=_RUN_REPLY,
)

STARTERS: dict[Environment, tuple[str, Form, Form]] = {
    "math": ("Teach a model arithmetic: its answer is compared with the right one.", _MATH_TINY, _MATH_CHAT),
    "code": ("Teach a model to write code, graded by tests it never sees.", _CODE_TINY, _CODE_CHAT),
    "tool": ("Teach a model to use a tool: its reply is run by Python.", _TOOL_TINY, _TOOL_CHAT),
}
"""Summary and forms of each environment."""
