"""What the scripts in this folder share. Run by peers' interpreters: torch and the standard library."""

from __future__ import annotations

import json
import random
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def emit(event: str, **values: Any) -> None:
    """One JSON line to the bench that started this process."""
    print(json.dumps({"event": event, **values}), flush=True)


def cpu_s() -> float:
    """User and system seconds of this process and its ended children."""
    use = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in use)


def timed(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    before = cpu_s()
    work()
    return cpu_s() - before


def gemm_gflops(dtype: torch.dtype, size: int = 1024, repeats: int = 15) -> float:
    """The limit: median GFLOP per CPU second of a size^3 matrix product, with this process's threads."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    rates = []
    for _ in range(repeats):
        before = time.process_time()
        torch.mm(a, b)
        rates.append(2 * size**3 / (time.process_time() - before) / 1e9)
    return statistics.median(rates)


def random_prompts(groups: int, length: int, seed: int) -> list[list[int]]:
    """``groups`` different prompts of ``length`` token ids; another seed gives others, so no cache helps."""
    stream = random.Random(seed)
    return [[stream.randrange(100, 20_000) for _ in range(length)] for _ in range(groups)]
