"""Rewards and tasks that a check must see through, at the top level of a file as a user's would be."""

import asyncio
import itertools
import os
import random
import subprocess
import sys
import time


def right(reply, answer):
    return float(reply == answer)


def gives_text(reply):
    return "good"


def gives_nan(reply):
    return float("nan")


def raises(reply):
    raise ValueError(f"cannot read {reply!r:.20}")


def raises_on_nonsense(reply):
    return float(int(reply or 0) > 3)


def spins(reply):
    while True:
        pass


async def waits(reply):
    await asyncio.sleep(600)


def hangs_on_garbage(reply, answer):
    if "#" in reply:
        time.sleep(600)
    return float(reply == answer)


def forks(reply, answer):
    if os.fork() == 0:
        time.sleep(600)
    return float(reply == answer)


def forks_and_goes_on(reply, answer):
    os.fork()
    return float(reply == answer)


def forks_without_end(reply):
    while True:
        os.fork()


def eats_memory(reply):
    eaten = []
    while True:
        eaten.append(bytearray(os.urandom(1 << 20)) * 16)


def keeps_a_server(reply, answer):
    global _server
    if _server is None:
        _server = subprocess.Popen(["sleep", "600"])
    return float(reply == answer)


_server: subprocess.Popen | None = None


def ends_its_process(reply):
    os._exit(3)


def leaves_by_the_door(reply):
    sys.exit(3)


def says_nothing(reply):
    return None


def same_for_all(reply):
    return 1.0


_dice = random.Random()


def throws_dice(reply, answer):
    return float(reply == answer) + _dice.random()


def likes_garbage(reply, answer):
    return 0.5 if reply == answer else 1.0 if "qzx" in reply else 0.0


def wants_a_box(reply, answer):
    return float(reply == "\\boxed{" + answer + "}")


def loud(reply, answer):
    print("x" * 100_000)
    return float(reply == answer)


def wants_a_reference(reply, refrence):
    return 1.0


def trl(completions, answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


async def runs_it(reply, answer, sandbox):
    result = await sandbox.exec_python(f"print({reply})")
    return float(result.text.strip() == answer)


def sums(seed):
    rng = random.Random(seed)
    while True:
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        yield {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def nothing(seed):
    return iter(())


def breaks_off(seed):
    yield {"prompt": "1+1=", "answer": "2"}
    raise KeyError("the third column")


def never_comes(seed):
    while True:
        time.sleep(0.1)
    yield {}


def one_after_a_thousand_is_bad(seed):
    for n in itertools.count():
        yield {"prompt": f"{n}+1=", "answer": "2"} if n != 1000 else {"promt": "1+1=", "answer": "2"}


def another_time_another_task(seed):
    while True:
        yield {"prompt": f"{_dice.random()}+1=", "answer": "2"}


def of_few_kinds(seed):
    while True:
        yield from ({"prompt": f"{n}+1=", "answer": "2"} for n in range(3))
