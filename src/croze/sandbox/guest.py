"""Process 1 of a bubblewrap sandbox: starts one job at a time, reaps, kills, reports. Runs *inside*.

Only C modules are imported, so that it starts fast. It never reads what a job holds: the child that runs the
job does, so that no job's code, input or file lies in the memory that the next one inherits. What it reports
is believed by nobody: the host parses it strictly.

On the control socket (SOCK_SEQPACKET), host to guest: ``J`` with the descriptors job, stdin, stdout, stderr,
or ``K`` to kill what runs; guest to host: ``R`` once ready, and then a row of numbers per job (``_report``).
A job is a little-endian u32 header length, the header (fields ended by NUL, see ``_Job``), and a body.
"""

import _signal  # pyright: ignore[reportMissingImports]
import _socket
import builtins
import gc
import os
import resource
import select
import sys

CONTROL = int(sys.argv[1])
UID = int(sys.argv[2])
"""User that jobs run as; 0: as the guest itself is not privileged, jobs share its user."""

PR_SET_DUMPABLE = 4
NOTE_MEMORY = 1


class _Job:
    """What to run, as the host described it."""

    def __init__(self, fd):
        data = b""
        while chunk := os.pread(fd, 1 << 20, len(data)):
            data += chunk
        os.close(fd)
        size = int.from_bytes(data[:4], "little")
        fields = data[4 : 4 + size].split(b"\0")
        self.body = data[4 + size :]
        self.kind, self.cwd = fields[0].decode(), fields[1]
        numbers = [int(f) for f in fields[2:8]]
        self.cpu_s, self.address_space, self.file_size, self.pids, self.fds, env_count = numbers
        self.env = dict(pair.split(b"=", 1) for pair in fields[8 : 8 + env_count])
        self.argv = fields[8 + env_count : -1]


def _prctl(option, value):
    """prctl(2) without the cost of importing all of ctypes (same private calls that ctypes makes)."""
    import _ctypes

    program = _ctypes.dlopen(None, 0)  # pyright: ignore[reportArgumentType]
    _ctypes.call_cdeclfunction(_ctypes.dlsym(program, "prctl"), (option, value, 0, 0, 0))


def _prefer_for_oom():
    with open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")


def _begin():
    """Process 1 ignores every signal that it has no handler for, from inside: keep it so."""
    if os.getpid() != 1:
        sys.exit("the sandbox guest must be process 1 of its own namespace")
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    if UID == 0:
        # Jobs share our user: none may look into our memory, and all may die before the host's programs do.
        _prefer_for_oom()
        _prctl(PR_SET_DUMPABLE, 0)
    # A child's collections then leave our objects alone, instead of copying every page that they lie on.
    gc.freeze()
    os.closerange(3, CONTROL)
    os.closerange(CONTROL + 1, 1 << 16)


def _serve(control):
    """Run jobs until the host hangs up. Returns only in a child, with its job."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    control.send(b"R")
    while True:
        data, ancillary, _, _ = control.recvmsg(16, 256)
        if not data:
            os._exit(0)
        if data != b"J":
            continue
        fds = [
            int.from_bytes(raw[i : i + 4], sys.byteorder)
            for _, _, raw in ancillary
            for i in range(0, len(raw), 4)
        ]
        note_read, note_write = os.pipe()
        child = os.fork()
        if child == 0:
            _signal.set_wakeup_fd(-1)
            _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
            return fds, note_write
        for fd in (*fds, note_write):
            os.close(fd)
        numbers = _supervise(control, wake_read, poll, child)
        note = os.read(note_read, 1) if select.select([note_read], [], [], 0)[0] else b""
        os.close(note_read)
        control.send(_report(numbers, note))


def _supervise(control, wake_read, poll, child):
    """Wait for the job's own process, reaping every orphan; then end whatever it left running."""
    killed, status, cpu, rss, starved = 0, None, 0.0, 0, 0
    while status is None:
        for fd, _ in poll.poll():
            if fd == wake_read:
                _drain(wake_read)
            else:
                word = control.recv(16)
                if not word:
                    os._exit(0)
                killed, starved = 1, _starved_ms(child)
                _kill_everyone()
        for pid, code, usage in _reap(os.WNOHANG):
            cpu += usage.ru_utime + usage.ru_stime
            rss = max(rss, usage.ru_maxrss)
            if pid == child:
                status = code
    leftover = 0
    _kill_everyone()
    for _, _, usage in _reap(0):
        leftover += 1
        cpu += usage.ru_utime + usage.ru_stime
        rss = max(rss, usage.ru_maxrss)
    return status, killed, cpu, rss, leftover, starved


def _starved_ms(child):
    """How long a job of one single thread was ready to run but had no core; 0 where it has more threads."""
    alone = len(os.listdir(f"/proc/{child}/task")) == 1 and sum(n.isdigit() for n in os.listdir("/proc")) == 2
    if not alone:
        return 0
    try:
        with open(f"/proc/{child}/schedstat") as f:
            return int(f.read().split()[1]) // 1_000_000
    except OSError:
        return 0


def _reap(flags):
    while True:
        try:
            pid, code, usage = os.wait4(-1, flags)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, code, usage


def _kill_everyone():
    try:
        os.kill(-1, _signal.SIGKILL)
    except ProcessLookupError:
        return


def _drain(fd):
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        return


def _report(numbers, note):
    """exit code or -1, signal or 0, killed by the host, CPU ms, max RSS KiB, leftovers, ms starved of CPU,
    /box full, note byte."""
    status, killed, cpu, rss, leftover, starved = numbers
    exit_code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1
    signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    box = os.statvfs("/box")
    full = int(box.f_bavail == 0)
    row = (exit_code, signum, killed, round(cpu * 1000), rss, leftover, starved, full, note[0] if note else 0)
    return b" ".join(b"%d" % n for n in row)


def _become(fds, note):
    """Turn this child into the job: its files, limits, user and environment. Returns the job."""
    os.setsid()
    for target, fd in enumerate(fds[1:]):
        os.dup2(fd, target)
    held = sorted((fds[0], note))
    os.closerange(3, held[0])
    os.closerange(held[0] + 1, held[1])
    os.closerange(held[1] + 1, 1 << 16)
    job = _Job(fds[0])
    if UID:
        _prefer_for_oom()
        os.setgroups([])
        os.setresgid(UID, UID, UID)
        os.setresuid(UID, UID, UID)
    limits = {
        resource.RLIMIT_CPU: (job.cpu_s, job.cpu_s + 1),
        resource.RLIMIT_FSIZE: (job.file_size, job.file_size),
        resource.RLIMIT_NPROC: (job.pids, job.pids),
        resource.RLIMIT_NOFILE: (job.fds, job.fds),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_MEMLOCK: (65536, 65536),
    }
    if job.address_space:
        limits[resource.RLIMIT_AS] = (job.address_space, job.address_space)
    for which, (soft, hard) in limits.items():
        most = resource.getrlimit(which)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(which, (soft, hard))
    if not job.address_space:
        os.close(note)
    try:
        os.chdir(job.cwd)
    except OSError as error:
        os.write(2, b"cwd %s: %s\n" % (job.cwd, os.strerror(error.errno or 0).encode()))
        os._exit(126)
    return job


def _fail(error):
    """A file operation failed: say so where the host looks for it."""
    os.write(2, b"%d" % (error.errno or 0))
    os._exit(1)


def _read_file(path):
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    info = os.fstat(fd)
    if info.st_mode & 0o170000 == 0o040000:
        raise IsADirectoryError(21, "is a directory")
    if info.st_mode & 0o170000 != 0o100000:
        raise OSError(22, "not a regular file")
    while chunk := os.read(fd, 1 << 16):
        _write_all(1, chunk)


def _write_file(path, body):
    if parent := os.path.dirname(path):
        os.makedirs(parent, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
    if os.fstat(fd).st_mode & 0o170000 != 0o100000:
        raise OSError(22, "not a regular file")
    _write_all(fd, body)


def _write_all(fd, data):
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _files(job):
    """Read, write or list as the job's user, inside: whatever links say, no path of the host is there."""
    path = job.argv[0]
    try:
        if job.kind == "read":
            _read_file(path)
        elif job.kind == "write":
            _write_file(path, job.body)
        else:
            _write_all(1, b"".join(name + b"\0" for name in sorted(os.listdir(path))))
    except OSError as error:
        _fail(error)
    os._exit(0)


def _execute(job):
    try:
        os.execvpe(job.argv[0], job.argv, job.env)
    except OSError as error:
        os.write(2, b"%s: %s\n" % (job.argv[0], os.strerror(error.errno or 0).encode()))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _python(job, note):
    """Run source as ``__main__``, and end as the interpreter would."""
    import _sitebuiltins

    os.environ.clear()
    for key, value in job.env.items():
        os.environ[os.fsdecode(key)] = os.fsdecode(value)
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    sys.argv = [os.fsdecode(a) for a in job.argv]
    sys.path.insert(0, "")
    main = type(sys)("__main__")
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    exit_code = 0
    try:
        exec(compile(job.body, job.argv[0], "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        exit_code = _exit_code(error.code)
    except BaseException as error:
        if isinstance(error, MemoryError) and job.address_space:
            os.write(note, bytes([NOTE_MEMORY]))
        frames = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        exit_code = 1
    _leave(main, exit_code)


def _exit_code(code):
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _leave(main, exit_code):
    """Join threads, call atexit, close files, flush. The rest of the interpreter's end would take apart every
    object there is, which copies each page of memory this process shares with the guest, to no effect."""
    import atexit

    if threading := sys.modules.get("threading"):
        threading._shutdown()
    atexit._run_exitfuncs()
    main.__dict__.clear()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError, AttributeError):
            exit_code = exit_code or 120
    os._exit(exit_code)


def _main():
    _begin()
    job_fds, note = _serve(_socket.socket(fileno=CONTROL))
    job = _become(job_fds, note)
    if job.kind == "exec":
        _execute(job)
    elif job.kind == "python":
        _python(job, note)
    else:
        _files(job)


_main()
