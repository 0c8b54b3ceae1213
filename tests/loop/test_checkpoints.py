"""A checkpoint exists through its manifest alone, whole; what is not is passed over by name."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from croze.errors import CheckpointMismatch, InfraFault
from croze.loop.checkpoints import MANIFEST, Broken, Checkpoint, Checkpoints, _seal, verify


def fill_with(content: bytes):
    def fill(folder: Path) -> None:
        (folder / "trainer").mkdir()
        (folder / "trainer" / "state.safetensors").write_bytes(content)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_bytes(b"{}")
        (folder / "empty").write_bytes(b"")

    return fill


def write(checkpoints: Checkpoints, step: int, content: bytes = b"weights" * 100) -> None:
    checkpoints.write(step, f"id{step}", {"at": step}, fill_with(content))


def test_what_was_written_is_found_again(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1)
    write(checkpoints, 2)
    found, broken = checkpoints.newest()
    assert found is not None and not broken
    assert (found.step, found.manifest.weights_id, found.manifest.state) == (2, "id2", {"at": 2})
    assert set(found.manifest.files) == {"trainer/state.safetensors", "model/config.json", "empty"}


def test_the_newest_are_kept_and_old_ones_go_only_after(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 6):
        write(checkpoints, step)
        assert len(checkpoints.all()) == min(step, 2)
    assert [p.name for p in checkpoints.all()] == ["step_000004", "step_000005"]
    assert {p.name for p in tmp_path.iterdir()} == {"step_000004", "step_000005"}


def test_keep_zero_keeps_all(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=0)
    for step in range(1, 6):
        write(checkpoints, step)
    assert len(checkpoints.all()) == 5


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_byte_falls_back_to_the_one_before(tmp_path, data):
    folder = tmp_path / "runs"
    shutil.rmtree(folder, ignore_errors=True)
    checkpoints = Checkpoints(folder)
    write(checkpoints, 1)
    write(checkpoints, 2)
    files = sorted(p for p in (folder / "step_000002").rglob("*") if p.is_file() and p.stat().st_size)
    file = data.draw(st.sampled_from(files))
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    found, broken = checkpoints.newest()
    assert found is not None and found.step == 1
    assert broken[0].path.name == "step_000002" and broken[0].why


def test_the_manifest_guards_itself(tmp_path):
    write(Checkpoints(tmp_path), 1)
    manifest = tmp_path / "step_000001" / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b"id1", b"id9"))
    assert isinstance(verify(tmp_path / "step_000001"), Broken)


@pytest.mark.parametrize("harm", ["missing", "short", "long", "no manifest"])
def test_what_is_not_whole_is_told_by_name(tmp_path, harm):
    write(Checkpoints(tmp_path), 1)
    folder = tmp_path / "step_000001"
    whole = verify(folder)
    assert isinstance(whole, Checkpoint)
    file = folder / "trainer" / "state.safetensors"
    if harm == "missing":
        file.unlink()
    elif harm == "short":
        os.truncate(file, 10)
    elif harm == "long":
        file.write_bytes(file.read_bytes() + b"x")
    else:
        (folder / MANIFEST).unlink()
    found = verify(folder)
    assert isinstance(found, Broken)
    if harm in ("missing", "short", "long"):
        assert "state.safetensors" in found.why


def test_one_of_another_format_is_refused_never_passed_over(tmp_path):
    write(Checkpoints(tmp_path), 1)
    whole = verify(tmp_path / "step_000001")
    assert isinstance(whole, Checkpoint)
    other = _seal(msgspec.structs.replace(whole.manifest, format=9))
    (tmp_path / "step_000001" / MANIFEST).write_bytes(other)
    with pytest.raises(CheckpointMismatch, match="format 9"):
        Checkpoints(tmp_path).newest()


def test_an_error_while_writing_leaves_the_old_ones_and_nothing_else(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1)

    def fails(folder: Path) -> None:
        fill_with(b"half")(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(InfraFault, match="No space left") as caught:
        checkpoints.write(2, "id2", {}, fails)
    assert caught.value.fix
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    assert isinstance(verify(tmp_path / "step_000001"), Checkpoint)


def test_a_save_that_cannot_fit_is_not_begun(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(InfraFault, match="MiB free"):
        checkpoints.write(1, "id", {}, fill_with(b"x"), expected=1 << 60)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_really_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "croze-test", disk], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mount is not allowed here")
    try:
        checkpoints = Checkpoints(disk / "checkpoints")
        write(checkpoints, 1, os.urandom(1 << 20))
        with pytest.raises(InfraFault):
            write(checkpoints, 2, os.urandom(1 << 20))
        found, broken = checkpoints.newest()
        assert found is not None and found.step == 1 and not broken
        write(checkpoints, 3, b"small")
        assert checkpoints.newest()[0].step == 3  # type: ignore[union-attr]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_what_a_cut_off_write_left_is_swept(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1)
    partial = tmp_path / ".step_000002.partial"
    partial.mkdir()
    (partial / "x").write_bytes(b"x")
    assert [p.name for p in checkpoints.all()] == ["step_000001"]
    checkpoints.go_on_from(1)
    assert not partial.exists() and checkpoints.newest()[0] is not None


def test_a_broken_one_is_replaced_not_overwritten(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1)
    write(checkpoints, 2)
    file = tmp_path / "step_000002" / "trainer" / "state.safetensors"
    file.write_bytes(b"y" * file.stat().st_size)
    write(checkpoints, 2)
    found, broken = checkpoints.newest()
    assert found is not None and found.step == 2 and not broken


def test_one_of_another_history_is_passed_over(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1)
    write(checkpoints, 2)
    found, broken = checkpoints.newest({1: "id1", 2: "id9"})
    assert found is not None and found.step == 1
    assert [b.path.name for b in broken] == ["step_000002"] and "other weights at step 2" in broken[0].why


def test_whole_ones_that_the_ledger_does_not_reach_are_not_thrown_away(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1)
    write(checkpoints, 2)
    found, broken = checkpoints.newest({1: "id1"})
    assert found is not None and found.step == 1
    assert [b.path.name for b in broken] == ["step_000002"] and "ends at step 1" in broken[0].why
    with pytest.raises(InfraFault, match="step_000002 is whole, and the ledger ends at step 0") as caught:
        checkpoints.newest({})
    assert "ledger.sqlite-wal" in (caught.value.fix or "")
    for step in (1, 2):
        (tmp_path / f"step_00000{step}" / MANIFEST).write_text("{")
    assert checkpoints.newest({})[0] is None


def test_one_under_another_name_is_none(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=0)
    write(checkpoints, 1)
    shutil.copytree(tmp_path / "step_000001", tmp_path / "step_000002")
    found, broken = checkpoints.newest({1: "id1", 2: "id2"})
    assert found is not None and found.path.name == "step_000001"
    assert "checkpoint of step 1, under another name" in broken[0].why


@pytest.mark.parametrize("keep", [1, 2])
def test_what_was_passed_over_is_kept_aside_until_a_newer_one_is_whole(tmp_path, keep):
    checkpoints = Checkpoints(tmp_path, keep=keep + 1)
    for step in (1, 2, 3):
        write(checkpoints, step)
    (tmp_path / "step_000003" / "empty").unlink()
    checkpoints = Checkpoints(tmp_path, keep=keep)
    found, _ = checkpoints.newest()
    assert found is not None and found.step == 2
    checkpoints.go_on_from(2)
    assert (tmp_path / ".old_step_000003" / MANIFEST).exists()
    assert found.path in checkpoints.all() and len(checkpoints.all()) == min(keep, 2)
    write(checkpoints, 3)
    assert {p.name for p in tmp_path.iterdir()} == {f"step_00000{s}" for s in (2, 3)[-keep:]}


def test_a_removal_that_was_cut_off_is_finished(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        write(checkpoints, step)
    (tmp_path / "step_000001" / MANIFEST).unlink()
    checkpoints.go_on_from(2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000002"]


def test_steps_are_ordered_by_number(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=0)
    for step in (999_999, 1_000_000):
        write(checkpoints, step)
    found, _ = checkpoints.newest()
    assert found is not None and found.step == 1_000_000
