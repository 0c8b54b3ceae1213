"""The model's files: whole, of a known architecture, with every tensor it needs. No weight is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from croze.errors import ModelError
from croze.models.architecture import read_architecture
from croze.models.source import read_header, resolve
from croze.plan.bare_process import BareProcess
from croze.plan.checks import Context, Report


def look_at_model(context: Context, report: Report) -> None:
    """Find the model (fetching it as a run would), read its shape, hold every tensor's header to it."""
    files = resolve(context.run.model)
    context.bare = BareProcess(
        files
    )  # takes seconds on another core: begun before this process imports torch
    arch = read_architecture(files.path)
    _check_tensors(files.path, arch)
    context.files, context.arch = files, arch
    millions = arch.parameters / 1e6
    report.ok(
        f"{arch.family} with {millions:.1f}M parameters, context {arch.context}; every tensor is there",
        where=files.source,
    )


def _check_tensors(path: Path, arch: Any) -> None:
    """Raises ModelError for a tensor that is missing, misshapen or of no floating-point kind."""
    from croze.models.layout import Layout

    tensors = ((n, t) for n, t in _outlines(path) if not (arch.tied and n == "lm_head.weight"))
    for _ in Layout(arch).checked(tensors, str(path)):
        pass


def _outlines(path: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of a model's files as its header describes it: a shape and a dtype, no numbers."""
    import torch

    from croze.models.layout import weight_files

    dtypes = {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
    for file in weight_files(path):
        if not os.access(file, os.R_OK):
            raise ModelError(f"{file.name} may not be read", where=str(file), fix="see its permissions")
        for name, spec in read_header(file).items():
            dtype = dtypes.get(spec["dtype"])
            if dtype is None:
                raise ModelError(
                    f"tensor {name!r} is {spec['dtype']}, which cannot be trained",
                    where=str(file),
                    fix="use the unquantised model",
                )
            yield name, torch.empty(spec["shape"], dtype=dtype, device="meta")
