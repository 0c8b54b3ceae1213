"""The tables of a trace: their columns, and Arrow IPC stream files that survive a crash at any byte.

A table is the folder ``trace/<table>/`` of files ``NNNNNN.arrows``, read in order. Each opening of a recorder
starts a new file; a flush appends one record batch. A file cut short loses only the batch that was cut.

Times are seconds since the Unix epoch, advanced by the monotonic clock since the file was opened. ``tokens``
keeps one row a rollout, with a list per column: a row a token would take far more space. Readers unfold it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from croze.errors import InfraFault, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

TABLES = ("spans", "rollouts", "tokens")
ROLL_BYTES = 64 << 20
"""A file is closed, and the next begun, when it has reached this size."""


def schema(table: str) -> pa.Schema:
    """The Arrow schema of one of TABLES. ``recorder.Span`` and ``recorder.RolloutRow`` tell what columns mean."""
    import pyarrow as pa

    text, number, count = pa.string(), pa.float64(), pa.int64()
    stretch = [("start", pa.int32()), ("end", pa.int32())]
    columns = {
        "spans": {
            "span_id": count,
            "stave": text,
            "role": text,
            "t_request": number,
            "t_start": number,
            "t_end": number,
            "enabler_span_id": count,
            "enabler_type": text,
            "step": count,
            "rollout_id": text,
            "tokens": count,
            "bytes": count,
            "rollouts": count,
            "concurrency": number,
            "ok": pa.bool_(),
        },
        "rollouts": {
            "rollout_id": text,
            "group_id": text,
            "member": count,
            "attempt": count,
            "step": count,
            "task_id": text,
            "prompt": text,
            "reply": text,
            "score": number,
            "valid": pa.bool_(),
            "fault": text,
            "message": text,
            "parts": text,
            "turn_parts": pa.list_(pa.map_(text, number)),
            "finish": text,
            "turns": count,
            "prompt_tokens": count,
            "generated_tokens": count,
            "t_start": number,
            "t_end": number,
            "weights_id_first": text,
            "weights_id_last": text,
            "max_gap": number,
            "advantage": number,
        },
        "tokens": {
            "rollout_id": text,
            "token_id": pa.list_(pa.int32()),
            "text": pa.list_(text),
            "logprob": pa.list_(pa.float32()),
            "mask": pa.list_(pa.bool_()),
            "producers": pa.list_(pa.struct([("producer", text), *stretch])),
            "weights": pa.list_(pa.struct([("weights_id", text), *stretch])),
        },
    }
    return pa.schema(list(columns[table].items()))


class TableWriter:
    """Appends record batches to the next free file of a table's folder."""

    def __init__(self, folder: Path, table: str, metadata: Mapping[str, str]) -> None:
        import pyarrow as pa

        self._folder = folder
        self._schema = schema(table).with_metadata(dict(metadata))
        self._options = pa.ipc.IpcWriteOptions(compression="zstd")
        self._file: Any = None
        self._writer: Any = None
        with self._written():
            folder.mkdir(parents=True, exist_ok=True)
            self.number = self._next()

    def append(self, columns: Sequence[Any]) -> None:
        """Write one batch, a sequence of values per column, and hand it to the operating system."""
        import pyarrow as pa

        arrays = [
            pa.array(values, type=field.type) for values, field in zip(columns, self._schema, strict=True)
        ]
        batch = pa.record_batch(arrays, schema=self._schema)
        with self._written():
            self._writer.write_batch(batch)
            self._file.flush()
            if self._file.tell() >= ROLL_BYTES:
                self._end()
                self.number = self._next()

    def close(self) -> None:
        """End the stream. A file that was never closed reads the same."""
        with self._written():
            self._end()

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InfraFault(
                f"the trace cannot be written: {error}", where=str(self._folder), fix="free space on the disk"
            ) from error

    def _next(self) -> int:
        import pyarrow as pa

        number = max((int(p.stem) for p in table_files(self._folder)), default=0)
        while True:
            number += 1
            try:
                descriptor = os.open(
                    self._folder / f"{number:06d}.arrows", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644
                )
            except FileExistsError:
                continue
            self._file = os.fdopen(descriptor, "wb")
            self._writer = pa.ipc.new_stream(self._file, self._schema, options=self._options)
            self._file.flush()
            return number

    def _end(self) -> None:
        file, writer = self._file, self._writer
        self._file = self._writer = None
        if file is not None:
            try:
                writer.close()
            finally:
                file.close()


def table_files(folder: Path) -> list[Path]:
    """The files of a table in the order they were written."""
    return sorted(p for p in folder.glob("*.arrows") if p.stem.isdigit())


def read_table(folder: Path, table: str) -> pa.Table:
    """Every whole record batch of a table; empty when there is none. Safe while a run writes it."""
    import pyarrow as pa

    return pa.Table.from_batches(table_batches(folder, table), schema=schema(table))


def table_batches(folder: Path, table: str) -> Iterator[pa.RecordBatch]:
    """The same one batch at a time, for readers that need few of them."""
    plain = schema(table)
    for file in table_files(folder):
        for batch in read_batches(file):
            yield _conform(batch, plain, file)


def read_batches(file: Path) -> Iterator[pa.RecordBatch]:
    """The whole record batches of one stream file, up to its end or to where it was cut."""
    import pyarrow as pa

    with open(file, "rb") as source:
        try:
            with pa.ipc.open_stream(source) as stream:
                yield from stream
        except (pa.ArrowInvalid, OSError, EOFError):
            return


def _conform(batch: pa.RecordBatch, plain: pa.Schema, file: Path) -> pa.RecordBatch:
    """A batch with the columns of today's schema; nulls where an older file lacks one.

    Raises UsageError for a column whose values today's type cannot hold.
    """
    import pyarrow as pa

    batch = batch.replace_schema_metadata(None)
    if batch.schema.equals(plain):
        return batch
    columns = []
    for field in plain:
        at = batch.schema.get_field_index(field.name)
        try:
            columns.append(
                pa.nulls(batch.num_rows, field.type) if at < 0 else batch.column(at).cast(field.type)
            )
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise UsageError(
                f"the column {field.name!r} is {batch.schema.field(at).type} here, and not {field.type}",
                where=str(file),
                fix="read this run with the croze that wrote it",
            ) from None
    return pa.record_batch(columns, schema=plain)
