"""Removes the cgroups of a process that was killed. Run as a file by ``watch.py``, on its own: it imports no
croze, keeps no session, and is nobody's child, so that a kill of the whole process tree passes it by.

Arguments: the pipe to listen on, the owner's pid, the prefix of its groups' names, the directories of the
groups. A byte on the pipe is the leave to go; the pipe's end, or the owner's, is a death.
"""

import os
import select
import signal
import sys
import time

PATIENCE_S = 60.0
"""The kernel keeps a group while a process of it is still dying."""


def left_alone(pipe: int, owner: int) -> bool:
    """Waits for leave (True) or for the owner's death (False). A fork of the owner may hold the pipe open."""
    ears = select.poll()
    ears.register(pipe, select.POLLIN)
    try:
        pidfd = os.pidfd_open(owner)
        ears.register(pidfd, select.POLLIN)
    except (AttributeError, OSError):
        pidfd = -1  # an old kernel, or dead already: the pipe must do
    heard = {fd for fd, _ in ears.poll()}
    return pipe in heard and os.read(pipe, 1) != b""


def groups(homes: list[str], prefix: str) -> list[str]:
    found = []
    for home in homes:
        try:
            names = os.listdir(home)
        except OSError:
            continue
        found += [os.path.join(home, name) for name in names if name.startswith(prefix)]
    return found


def end(group: str) -> None:
    """Kill what is inside and remove the directory, where the kernel lets go of it."""
    try:
        with open(os.path.join(group, "cgroup.procs")) as procs:
            pids = [int(word) for word in procs.read().split()]
        for pid in pids:
            if pid > 1:
                os.kill(pid, signal.SIGKILL)
    except (OSError, ValueError):
        pass  # gone meanwhile; the removal decides
    try:
        os.rmdir(group)
    except OSError:
        return


def main(words: list[str]) -> None:
    pipe, owner, prefix, *homes = words
    if left_alone(int(pipe), int(owner)):
        return
    deadline = time.monotonic() + PATIENCE_S
    wait_s = 0.005
    while (left := groups(homes, prefix)) and time.monotonic() < deadline:
        for group in left:
            end(group)
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 0.25)


if __name__ == "__main__":
    main(sys.argv[1:])
