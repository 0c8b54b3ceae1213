"""Train a model to write functions, graded by hidden tests that its code never meets. croze train code_tests.py"""

import re

import croze as cz
from croze.reward.code import run_tests

TASKS = {
    "double(x) that returns twice x": "assert double(4) == 8\nassert double(-1) == -2",
    "last(items) that returns the last element of a list": "assert last([1, 2, 3]) == 3",
    "is_even(n) that tells whether n is even": "assert is_even(4) is True\nassert is_even(7) is False",
    "total(numbers) that returns the sum of a list": "assert total([1, 2]) == 3\nassert total([]) == 0",
    "backwards(text) that reverses a string": "assert backwards('abc') == 'cba'\nassert backwards('') == ''",
}
ASK = "Write a Python function {}. Reply with the code only, without explanation."
ROWS = [{"prompt": [{"role": "user", "content": ASK.format(w)}], "tests": t} for w, t in TASKS.items()]


async def hidden_tests(reply: str, tests: str, sandbox: cz.Sandbox) -> float:
    block = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", reply, re.DOTALL)
    report = await run_tests(sandbox, {"solution.py": block.group(1) if block else reply}, tests)
    return report.score


run = cz.Run(
    model="smollm2-135m-instruct",
    tasks=cz.tasks(ROWS),
    reward=hidden_tests,
    steps=40,
    groups_per_step=4,
    group_size=8,
    sampling=cz.Sampling(max_tokens=64),
    optim=cz.Optim(lr=1e-5),
)
