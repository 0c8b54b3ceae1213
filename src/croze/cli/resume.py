"""Go on with a run that was stopped or died, as if it had never stopped.

croze resume runs/calc-7f3a     from its newest whole checkpoint; a finished run is only told
"""

from __future__ import annotations

import argparse

from croze.cli.output import Output
from croze.cli.progress import progress
from croze.loop.load import find_run_folder


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, or the beginning of its name under runs/")
    parser.add_argument(
        "--changed",
        action="store_true",
        help="go on although the task file, or its tasks, are not what they were",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print only the end")


def run(arguments: argparse.Namespace, output: Output) -> None:
    folder = find_run_folder(arguments.run)
    from croze.loop.start import resume

    with progress(output, quiet=arguments.quiet) as show:
        resume(folder, changed=arguments.changed, on_event=show)
