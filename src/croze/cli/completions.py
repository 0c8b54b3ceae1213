"""Print a script that completes croze's words in a shell: verbs, options, files, runs, keys and their values.

bash    croze completions bash > ~/.local/share/bash-completion/completions/croze
zsh     croze completions zsh > "${fpath[1]}/_croze"
fish    croze completions fish > ~/.config/fish/completions/croze.fish

Then start a new shell. The script is made from the parsers and keys of the croze that prints it; make it again after
an upgrade. Completing starts no Python. In bash, for this shell only: source <(croze completions bash)
"""

from __future__ import annotations

import argparse

from croze.cli import complete_bash, complete_fish, complete_zsh
from croze.cli.output import Output
from croze.cli.words import describe

SHELLS = {"bash": complete_bash.script, "zsh": complete_zsh.script, "fish": complete_fish.script}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell that is to complete")


def run(arguments: argparse.Namespace, output: Output) -> None:
    shell: str = arguments.shell
    script = SHELLS[shell](describe())
    if output.json:
        output.record({"event": "completions", "shell": shell, "script": script})
    else:
        output.text(script.rstrip("\n"))
