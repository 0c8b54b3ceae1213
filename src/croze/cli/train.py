"""Train the run that a task file declares.

croze train calc.py                     as declared
croze train calc.py steps=60 optim.lr=2e-5   with keys overridden (croze keys lists them)
"""

from __future__ import annotations

import argparse

from croze.cli.output import Output
from croze.cli.progress import progress
from croze.config import parse_words
from croze.loop.load import load_run


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the task file")
    parser.add_argument("words", nargs="*", metavar="key=value", help="overrides")
    parser.add_argument("-q", "--quiet", action="store_true", help="print only the end")


def run(arguments: argparse.Namespace, output: Output) -> None:
    words = parse_words(arguments.words)
    declared = load_run(arguments.file).override(words)
    from croze.loop.start import train

    with progress(output, quiet=arguments.quiet) as show:
        train(declared, on_event=show)
