"""Completions: made from the parsers, and right in the shells themselves where those are here."""

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from croze.cli import words
from croze.cli.completions import SHELLS
from croze.cli.main import VERBS
from croze.run import all_keys

CROZE = [sys.executable, "-m", "croze.cli.main"]
BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def described() -> words.Words:
    return words.describe()


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bash") / "croze.bash"
    path.write_text(subprocess.run([*CROZE, "completions", "bash"], capture_output=True, text=True).stdout)
    return path


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with task files and a run."""
    for name in ("calc.py", "code tests.py", "notes.txt"):
        (tmp_path / name).touch()
    run = tmp_path / "runs" / "calc-7f3a21"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (tmp_path / "runs" / "no-run").mkdir()
    return tmp_path


def test_everything_is_described(described):
    assert [verb.name for verb in described.verbs] == list(VERBS)
    assert [key.name for key in described.keys] == all_keys_in_order()
    by_name = {verb.name: verb for verb in described.verbs}
    assert [p.kind for p in by_name["train"].places] == ["file", "key"]
    assert [p.kind for p in by_name["eval"].places] == ["file or run", "key"]
    assert {"--tasks", "--samples"} <= {f for o in by_name["eval"].options if o.takes for f in o.flags}
    takes = {key.name: key.takes for key in described.keys}
    assert takes["optim.schedule"].choices == ("constant", "linear", "cosine")
    assert takes["trace.tokens"].choices == ("true", "false")
    assert "bubblewrap" in takes["sandbox.driver"].choices and "auto" not in takes["algo.name"].choices
    assert "tiny-calc" in takes["model"].choices and takes["optim.lr"].kind == "none"


def all_keys_in_order() -> list[str]:
    from croze.cli.keys import describe_keys

    rows = [row["key"] for row in describe_keys()]
    assert set(rows) == set(all_keys())
    return rows


@pytest.mark.parametrize("shell", SHELLS)
def test_every_word_is_in_every_script(shell, described):
    script = SHELLS[shell](described)
    assert "@" not in script.replace("${#words[@]}", "").replace("[@]", "").replace("$@", "").replace(
        "pass@k", ""
    )
    for verb in described.verbs:
        assert verb.name in script
        for option in verb.options:
            for flag in option.flags:
                assert flag in script or f"-l {flag[2:]}" in script or f"-s {flag[1:]}" in script
    for key in described.keys:
        assert key.name in script
        for value in key.takes.choices:
            assert value in script
    assert script.isascii(), "a shell without a UTF-8 locale reads it too"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_reads_its_script(shell, described, tmp_path):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "script").write_text(SHELLS[shell](described))
    done = subprocess.run([program, "-n", "script"], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_balanced(shell, described):
    """What can be told without the shell: what is opened is closed."""
    lines = SHELLS[shell](described).splitlines()
    starts = [line.split()[0] for line in lines if line.strip() and not line.rstrip().endswith("; end")]
    if shell == "fish":
        blocks = ("function", "if", "for", "switch", "begin")
        assert sum(word in blocks for word in starts) == starts.count("end")
    else:
        assert starts.count("case") == starts.count("esac")
        assert sum("() {" in line for line in lines) == lines.count("}")


def complete(script: Path, line: str, cwd: Path, wordbreaks: str = " \t\n\"'><=;|&(:") -> list[str]:
    """What bash is offered at the end of ``line``, taken apart as readline does."""
    program = r"""
source "$1"; COMP_WORDBREAKS=$3; COMP_LINE=$2; COMP_POINT=${#COMP_LINE}
text=$2; [[ $COMP_WORDBREAKS == *=* ]] && text=${text//=/ = }
read -ra COMP_WORDS <<< "$text"
[[ $2 == *" " || ( $2 == *= && $COMP_WORDBREAKS == *=* ) ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_croze 2>/dev/null
printf '%s\n' "${COMPREPLY[@]}"
"""
    assert BASH is not None
    done = subprocess.run(
        [BASH, "--norc", "-c", program, "-", str(script), line, wordbreaks],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stderr == ""
    return sorted(filter(None, done.stdout.splitlines()))


@pytest.mark.skipif(BASH is None, reason="no bash here")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("croze tr", ["trace", "train"]),
        ("croze --json st", ["stop"]),
        ("croze --vers", ["--version"]),
        ("croze train ", ["calc.py", "code tests.py", "runs"]),
        ("croze train cal", ["calc.py"]),
        ("croze train calc.py optim.sche", ["optim.schedule="]),
        ("croze train calc.py optim.schedule=", ["constant", "cosine", "linear"]),
        ("croze train calc.py steps=3 optim.schedule=li", ["linear"]),
        ("croze train calc.py steps=3 optim.lr=", []),
        ("croze train calc.py --qu", ["--quiet"]),
        ("croze train -q calc.py algo.na", ["algo.name="]),
        ("croze train calc.py algo.name=rein", ["reinforce++"]),
        ("croze train calc.py run.dir=r", ["runs"]),
        ("croze train nothing-li", []),
        ("croze resume ", ["calc-7f3a21"]),
        ("croze resume ru", ["runs"]),
        ("croze resume runs/ca", ["runs/calc-7f3a21"]),
        ("croze eval --tasks ", []),
        ("croze eval --tasks 4 calc-", ["calc-7f3a21"]),
        ("croze trace calc-7f3a21 ", []),
        ("croze keys op", ["optim"]),
        ("croze init sums --env ", ["code", "math", "tool"]),
        ("croze completions ", ["bash", "fish", "zsh"]),
        ("croze ps ", ["runs"]),
        ("croze nosuch ", []),
    ],
)
def test_bash_is_offered_the_right_words(bash_script, place, line, offered):
    assert complete(bash_script, line, place) == offered


@pytest.mark.skipif(BASH is None, reason="no bash here")
def test_bash_is_offered_every_verb_and_key(bash_script, place, described):
    assert {*VERBS, "--help", "--json", "--version"} == set(complete(bash_script, "croze ", place))
    assert {f"{key}=" for key in all_keys()} == set(complete(bash_script, "croze train calc.py ", place))


@pytest.mark.skipif(BASH is None, reason="no bash here")
def test_where_an_equals_sign_breaks_no_word_the_key_is_kept(bash_script, place):
    offered = complete(bash_script, "croze train calc.py optim.schedule=c", place, " \t\n")
    assert offered == ["optim.schedule=constant", "optim.schedule=cosine"]


@pytest.mark.skipif(BASH is None, reason="no bash here")
def test_a_person_at_a_terminal(bash_script, place):
    """Typed with tabs into a real bash: the words arrive whole."""
    typed = "croze tra\x15croze trai\tcal\toptim.sched\tli\t --qu\t\r"
    told = in_a_terminal([str(BASH), "--norc", "-i"], bash_script, typed, place)
    assert "<train><calc.py><optim.schedule=linear><--quiet>" in told


def in_a_terminal(program: list[str], script: Path, typed: str, cwd: Path) -> str:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execve(program[0], program, os.environ | {"TERM": "dumb", "PS1": "> ", "INPUTRC": "/dev/null"})
    seen = b""
    try:
        setup = f"source {script}; croze() {{ printf '<%s>' \"$@\"; echo; }}; echo read''y\r"
        for text, until in ((setup, b"\nready"), (typed, b"<--quiet>")):
            os.write(terminal, text.encode())
            deadline = time.monotonic() + 20
            while until not in seen and time.monotonic() < deadline:
                if select.select([terminal], [], [], 0.2)[0]:
                    seen += os.read(terminal, 65536)
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    return seen.decode(errors="replace")


def test_as_json_and_with_a_wrong_shell():
    done = subprocess.run(
        [*CROZE, "completions", "fish", "--json"], capture_output=True, text=True, timeout=60
    )
    told = json.loads(done.stdout)
    assert told["shell"] == "fish" and told["script"].startswith("# fish completion for croze")
    done = subprocess.run([*CROZE, "completions", "csh"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "csh" in done.stderr


def test_making_a_script_loads_no_torch():
    program = "from croze.cli.words import describe; describe(); import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
