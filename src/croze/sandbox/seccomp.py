"""The system calls a sandbox may not make, as a BPF program for ``bwrap --seccomp``.

Namespaces keep a program from what it can name; this keeps it from kernel interfaces that are not namespaced
(vsock, keyrings, bpf, io_uring, ...) or that undo the isolation (mount, unshare, ptrace). Refused calls get
EPERM, ``clone3`` and foreign call tables ENOSYS (libc then falls back), odd socket families EAFNOSUPPORT.
Encoding: linux/filter.h and linux/seccomp.h; numbers: the kernel's call tables.
"""

from __future__ import annotations

import errno
import struct

_LD_ABS, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARG0 = 0, 4, 16
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEW{TIME,NS,CGROUP,UTS,IPC,USER,PID,NET}."""
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""

# name: (x86_64, aarch64); None where the architecture has no such call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_secret": (447, 447),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "personality": (135, 92),
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "nfsservctl": (180, 42),
    "lsm_set_self_attr": (460, 460),
}
_CLONE, _CLONE3, _SOCKET, _PRLIMIT64 = (56, 220), (435, 435), (41, 198), (302, 261)
_ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _op(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, k)


def _refuse(number: int) -> bytes:
    return _op(_RET, _ERRNO | number)


def program(machine: str) -> bytes | None:
    """The filter for ``platform.machine()``, or None where the call table is not known."""
    if machine not in _ARCHES:
        return None
    column, audit = _ARCHES[machine]
    code = [_op(_LD_ABS, _ARCH), _op(_JEQ, audit, yes=1), _op(_RET, _KILL), _op(_LD_ABS, _NR)]
    if machine == "x86_64":
        code += [_op(_JGE, 0x40000000, no=1), _refuse(errno.ENOSYS)]
    denied = [number for row in _DENIED.values() if (number := row[column]) is not None]
    for number in sorted(denied):
        code += [_op(_JEQ, number, no=1), _refuse(errno.EPERM)]
    code += [_op(_JEQ, _CLONE3[column], no=1), _refuse(errno.ENOSYS)]
    code += [
        _op(_JEQ, _CLONE[column], no=4),
        _op(_LD_ABS, _ARG0),
        _op(_JSET, _NEW_NAMESPACES, no=1),
        _refuse(errno.EPERM),
        _op(_RET, _ALLOW),
    ]
    # A sandboxed process may set its own limits, never its guardian's.
    code += [
        _op(_JEQ, _PRLIMIT64[column], no=4),
        _op(_LD_ABS, _ARG0),
        _op(_JEQ, 0, yes=1),
        _refuse(errno.EPERM),
        _op(_RET, _ALLOW),
    ]
    families = [_op(_JEQ, f, yes=len(_FAMILIES) - i) for i, f in enumerate(_FAMILIES)]
    code += [
        _op(_JEQ, _SOCKET[column], no=len(families) + 3),
        _op(_LD_ABS, _ARG0),
        *families,
        _refuse(errno.EAFNOSUPPORT),
        _op(_RET, _ALLOW),
        _op(_RET, _ALLOW),
    ]
    return b"".join(code)
