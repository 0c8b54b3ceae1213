"""What the tests of the code grader share: one grading in real sandboxes."""

import asyncio

from croze.reward.code import run_tests
from croze.sandbox.bubblewrap import Bubblewrap
from croze.sandbox.protocol import Limits

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
