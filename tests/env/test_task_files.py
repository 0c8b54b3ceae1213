"""Files as they come: broken, blank, packed, changed, gone; and the sparse index against a plain reading."""

import errno
import gzip
import itertools
import json
import os
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import croze.env.jsonl as jsonl_module
import croze.env.parquet as parquet_module
from croze.env.files import SAMPLE_BYTES, SAMPLES, unreadable
from croze.env.jsonl import JsonlRows
from croze.env.parquet import ParquetRows
from croze.env.tasks import TaskSource, tasks
from croze.errors import TasksError


def take(source: TaskSource, n: int) -> list:
    return list(itertools.islice(source.stream(0), n))


def write_jsonl(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_parquet(path: Path, rows: int, **options) -> Path:
    pq.write_table(
        pa.Table.from_pylist([{"prompt": f"question {i}", "answer": i} for i in range(rows)]), path, **options
    )
    return path


def test_a_broken_line_is_named_by_its_line_number(tmp_path):
    path = write_jsonl(
        tmp_path / "t.jsonl", ['{"prompt": "a"}', "", "  ", '{"prompt": "b"', '{"prompt": "c"}']
    )
    with pytest.raises(TasksError) as caught:
        take(tasks(path), 3)
    assert caught.value.where == f"{path}:4"
    assert "row 1 is not JSON" in caught.value.message


def test_a_row_without_prompt_in_a_file_is_named_by_its_line_number(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", ['{"prompt": "a"}', "", '{"question": "b"}'])
    with pytest.raises(TasksError) as caught:
        take(tasks(path), 2)
    assert caught.value.where == f"{path}:3"


@pytest.mark.parametrize("data", [b"", b"\n\n \n"])
def test_an_empty_file_has_no_rows(tmp_path, data):
    (tmp_path / "t.jsonl").write_bytes(data)
    with pytest.raises(TasksError, match="no rows"):
        take(tasks(tmp_path / "t.jsonl"), 1)


def test_byte_order_marks_and_windows_lines_are_read(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    assert sorted(t.prompt for t in take(tasks(tmp_path / "t.jsonl"), 2)) == ["a", "b"]


def test_text_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(TasksError, match=r"t\.jsonl:2"):
        take(tasks(tmp_path / "t.jsonl"), 2)


def test_a_missing_file_offers_the_nearest(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ["{}"])
    with pytest.raises(TasksError, match=r"train\.jsonl"):
        take(tasks(tmp_path / "trian.jsonl"), 1)
    with pytest.raises(TasksError, match="folder"):
        (tmp_path / "folder.jsonl").mkdir()
        take(tasks(tmp_path / "folder.jsonl"), 1)


def test_a_file_that_changes_under_the_run_is_noticed(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", ['{"prompt": "a"}'] * 3)
    stream = tasks(path).stream(0)
    next(stream)
    write_jsonl(path, ['{"prompt": "bb"}'])
    with pytest.raises(TasksError, match="changed"):
        next(stream)


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    (tmp_path / "t.parquet").write_text("no")
    with pytest.raises(TasksError, match="not a Parquet file"):
        take(tasks(tmp_path / "t.parquet"), 1)


def test_a_relative_path_stays_what_it_was_when_declared(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "t.jsonl", ['{"prompt": "a"}'])
    monkeypatch.chdir(tmp_path)
    source = tasks("t.jsonl")
    monkeypatch.chdir("/")
    assert take(source, 1)[0].prompt == "a"


_line = st.one_of(
    st.sampled_from(["", "  ", "\t"]),
    st.fixed_dictionaries(
        {"prompt": st.text(min_size=1), "x": st.none() | st.text() | st.integers(-(2**53), 2**53)}
    ),
)


@settings(max_examples=60, deadline=None)
@given(lines=st.lists(_line), crlf=st.booleans(), last=st.booleans())
def test_jsonl_reads_back_what_was_written(lines, crlf, last, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    text = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=True) for line in lines]
    end = "\r\n" if crlf else "\n"
    path.write_bytes((end.join(text) + (end if last else "")).encode())
    table = JsonlRows(path)
    assert [table[i] for i in range(len(table))] == [line for line in lines if isinstance(line, dict)]


# -------------------------------------------------------------------------------------------- what is no file


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_cannot_be_opened_is_said(suffix, tmp_path):
    loop, fifo = tmp_path / f"loop.{suffix}", tmp_path / f"fifo.{suffix}"
    loop.symlink_to(loop)
    os.mkfifo(fifo)
    for path, words in (
        (loop, "leads to itself"),
        (fifo, "regular file"),
        (tmp_path / f"{'x' * 300}.{suffix}", "name too long"),
        (Path(f"/dev/null/x.{suffix}"), "Not a directory"),
        (Path(f"a\0b.{suffix}"), "null byte"),
    ):
        for use in (lambda s: take(s, 1), lambda s: s.first(), lambda s: s.fingerprint()):
            with pytest.raises(TasksError, match=words):
                use(tasks(path))


def test_a_file_that_may_not_be_read_is_said(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", ['{"prompt": "a"}'])
    path.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(TasksError, match="Permission denied") as caught:
            take(tasks(path), 1)
    finally:
        if root:
            os.seteuid(0)
    assert caught.value.fix is not None and "chmod" in caught.value.fix
    assert "Input/output" in str(unreadable(path, OSError(errno.EIO, "Input/output error")))


def test_a_symbolic_link_is_followed(tmp_path):
    write_jsonl(tmp_path / "t.jsonl", ['{"prompt": "a"}'])
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "t.jsonl")
    assert take(tasks(tmp_path / "link.jsonl"), 1)[0].prompt == "a"


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.jsonl.zst", "t.parquet.gz"])
def test_a_compressed_file_is_refused_when_declared(name):
    with pytest.raises(TasksError, match="decompress"):
        tasks(name)


def test_a_home_that_is_nobodys_is_refused():
    with pytest.raises(TasksError, match="names no file"):
        tasks("~nobody-of-this-name/t.jsonl")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (gzip.compress(b'{"prompt": "a"}\n', mtime=0), "gunzip"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "iconv"),
        (b"PAR1....", r"name it \.parquet"),
        (b'[\n  {"prompt": "a"}\n]\n', "jq"),
        (b'{\n  "prompt": "a"\n}\n', "jq"),
        (b"[" * 100_000, "recursion"),
        (b"prompt,answer\n1,2\n", r"t\.jsonl:\d"),
        (b'{"prompt": NaN}', r"t\.jsonl:1"),
        (b'{"prompt": "a"} {"prompt": "b"}', r"t\.jsonl:1"),
        (b"\x00\x00\x00", r"t\.jsonl:1"),
    ],
)
def test_a_jsonl_file_that_is_something_else_is_said(data, words, tmp_path):
    (tmp_path / "t.jsonl").write_bytes(data)
    with pytest.raises(TasksError, match=words):
        take(tasks(tmp_path / "t.jsonl"), 3)


# ------------------------------------------------------------------------------------------ what changes under us


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("how", ["longer", "gone", "folder", "touched"])
def test_a_file_that_changes_between_rows_is_noticed(suffix, how, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_module, "WINDOW_BYTES", 0)
    path = tmp_path / f"t.{suffix}"
    if suffix == "jsonl":
        write_jsonl(path, ['{"prompt": "a"}'] * 40)
    else:
        write_parquet(path, 40, row_group_size=1)
    stream = tasks(path).stream(0)
    next(stream)
    if how == "longer":
        path.write_bytes(path.read_bytes() * 2)
    elif how == "touched":
        os.utime(path, ns=(0, 0))
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
    words = {"gone": "no such file", "folder": "a folder"}.get(how, "changed")
    with pytest.raises(TasksError, match=words):
        next(stream)


def test_a_damaged_row_group_is_said(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", 4000, row_group_size=1000)
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 2] = b"\xff" * (len(data) // 2 - 4)
    path.write_bytes(data)
    with pytest.raises(TasksError, match="damaged"):
        take(tasks(path), 4000)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(TasksError, match="not a Parquet file"):
        take(tasks(path), 1)


# ------------------------------------------------------------------------------------------------- the index


_text = st.lists(
    st.sampled_from([b"", b" ", b"\r", b"\t \r", b"1", b" 22", b"333 ", b"\xff\x00", b"x" * 40]), max_size=30
)


@settings(max_examples=120, deadline=None)
@given(
    lines=_text,
    end=st.booleans(),
    mark=st.booleans(),
    block=st.integers(1, 64),
    stride=st.integers(2, 64),
)
def test_the_index_finds_what_plain_reading_finds(lines, end, mark, block, stride, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "index.jsonl"
    head = b"\xef\xbb\xbf" if mark else b""
    path.write_bytes(head + b"\n".join(lines) + (b"\n" if end else b""))
    want, place = [], len(head)
    for number, line in enumerate(lines, 1):
        if line.strip():
            want.append((place, line, number))
        place += len(line) + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl_module, "_BLOCK", block)
        patch.setattr(jsonl_module, "STRIDE", stride)
        table = JsonlRows(path)
        got = [table._line(at) for at in range(len(table))]
    assert [(place, line.rstrip(b"\n")) for place, line in got] == [w[:2] for w in want]
    assert [table.place(at) for at in range(len(table))] == [f"{path}:{w[2]}" for w in want]
    with pytest.raises(IndexError):
        table[len(table)]


def test_a_row_of_seventy_megabytes_just_works(tmp_path):
    path, size = tmp_path / "t.jsonl", 70 << 20
    with open(path, "wb") as file:
        file.write(b'{"prompt": "first"}\n{"prompt": "' + b"x" * size + b'"}\n{"prompt": "last"}')
    table = JsonlRows(path)
    assert len(table) == 3
    assert len(table[1]["prompt"]) == size
    assert table[2] == {"prompt": "last"} and table.place(2) == f"{path}:3"


def test_a_long_table_costs_no_memory(tmp_path):
    path, rows = tmp_path / "t.jsonl", 400_000
    with open(path, "w") as file:
        for start in range(0, rows, 1000):
            file.writelines(f'{{"prompt": "{at}"}}\n' for at in range(start, start + 1000))
    source = tasks(path)
    take(tasks([{"prompt": "x"}]), 1)
    tracemalloc.start()
    try:
        held = source.holdout(5, 0)
        stream = source.stream(0, without=held)
        seen = {next(stream).id for _ in range(300)}
        source.fingerprint()
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(seen) == 300
    assert now < 200_000, "half a byte a row"
    assert peak < 8 << 20, "some blocks of the file"


def test_a_window_of_parquet_is_decoded_once(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "t.parquet", 100, row_group_size=7)
    table = ParquetRows(path)
    len(table)
    weight = table._weights[0]
    monkeypatch.setattr(parquet_module, "WINDOW_BYTES", weight * 3)
    decoded, held = [], 0
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", lambda f, g: decoded.append(g) or read(f, g))
    order = table.order(b"key")
    got = []
    for at in range(100):
        got.append(table[order[at]]["answer"])
        held = max(held, len(table._held))
    assert sorted(got) == list(range(100))
    assert sorted(decoded) == list(range(15))
    assert 2 <= held <= 3
    assert len({number // 7 for number in got[:20]}) > 1, "the rows of a window are mixed"


def test_empty_row_groups_and_an_empty_parquet(tmp_path):
    schema = pa.schema([("prompt", pa.string())])
    with pq.ParquetWriter(tmp_path / "t.parquet", schema) as writer:
        for prompts in ([], ["a"], [], ["b", "c"], []):
            writer.write_table(pa.table({"prompt": prompts}, schema=schema))
    got = take(tasks(tmp_path / "t.parquet"), 6)
    assert sorted(t.prompt for t in got[:3]) == ["a", "b", "c"]
    pq.write_table(pa.table({"prompt": []}, schema=schema), tmp_path / "none.parquet")
    with pytest.raises(TasksError, match="no rows"):
        take(tasks(tmp_path / "none.parquet"), 1)


def test_a_broken_line_deep_in_a_large_file_is_named(tmp_path):
    lines = [json.dumps({"prompt": "x" * 50})] * 5000
    lines[4321] = '{"prompt": '
    with pytest.raises(TasksError) as caught:
        take(tasks(write_jsonl(tmp_path / "t.jsonl", lines)), 5000)
    assert caught.value.where == f"{tmp_path / 't.jsonl'}:4322"


# -------------------------------------------------------------------------------------------- fingerprints


def test_a_small_files_fingerprint_sees_every_byte_and_no_name(tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", [json.dumps({"prompt": f"{i}"}) for i in range(99)])
    two = tmp_path / "two.jsonl"
    two.write_bytes(one.read_bytes())
    assert tasks(one).fingerprint() == tasks(two).fingerprint()
    data = bytearray(one.read_bytes())
    data[len(data) // 2] ^= 1
    two.write_bytes(data)
    assert tasks(one).fingerprint() != tasks(two).fingerprint()
    assert tasks(one).fingerprint() != tasks(one, prompt="{prompt}!").fingerprint()


def test_a_large_files_fingerprint_sees_its_ends_its_length_and_its_samples(tmp_path):
    path, size = tmp_path / "t.jsonl", SAMPLES * SAMPLE_BYTES * 2
    line = b'{"prompt": "' + b"x" * 1008 + b'"}'
    path.write_bytes((line + b" \n") * (size // 1024))
    before = tasks(path).fingerprint()

    def edited(place: int, byte: bytes) -> str:
        data = bytearray(path.read_bytes())
        data[place : place + 1] = byte
        other = tmp_path / "edited.jsonl"
        other.write_bytes(data)
        return tasks(other).fingerprint()

    assert edited(100, b"x") == before
    places = [100, size - 100, (size - SAMPLE_BYTES) // (SAMPLES - 1) + 100]
    assert len({before, *(edited(place, b"y") for place in places), edited(size - 1, b"")}) == 5
    assert edited(SAMPLE_BYTES + 1000, b"y") == before, "what the docstring says is missed"


def test_a_parquets_fingerprint_sees_its_rows(tmp_path):
    prints = {tasks(write_parquet(tmp_path / f"{n}.parquet", n)).fingerprint() for n in (5, 6)}
    assert len(prints) == 2
    assert tasks(write_parquet(tmp_path / "again.parquet", 5)).fingerprint() in prints
