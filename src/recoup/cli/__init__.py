"""The command line. Each command is a file; this one holds the group and what happens to errors."""

from __future__ import annotations

import io
import os
import sys
import threading

import click

import recoup
from recoup.cli.curve import curve
from recoup.cli.demo import demo
from recoup.cli.dtr import dtr
from recoup.cli.max_batch import max_batch
from recoup.cli.methods import methods
from recoup.cli.profile import profile
from recoup.cli.run import run
from recoup.cli.show import show
from recoup.cli.solve import solve
from recoup.errors import RecoupError

_EPILOG = """\b
Try it on a built-in network:
  recoup solve mobilenet:64 --budget 0.5
  recoup show vgg16:64
  recoup curve mobilenet:64 --budgets 0.3:1.0:0.1
  recoup max-batch vgg19 --budget 16GB

\b
Train one (needs PyTorch):
  recoup demo
  recoup run resnet50:32 --budget 0.5
"""


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG)
@click.version_option(recoup.__version__, prog_name="recoup")
def cli() -> None:
    """Plan a training step inside a memory budget.

    recoup runs some operators again instead of keeping their results, chooses which ones so that the step stays as fast
    as possible, and says how close to optimal the choice is.
    """


for command in (demo, run, profile, solve, show, curve, max_batch, methods, dtr):
    cli.add_command(command)


def main() -> None:
    """Entry point: errors a user can mend end in one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        cli()
    except SystemExit as done:
        if threading.active_count() == 1:
            raise
        sys.stdout.flush()  # a solver did not stop in time; do not wait for it
        sys.stderr.flush()
        os._exit(done.code if isinstance(done.code, int) else 0)
    except RecoupError as problem:
        click.echo(f"error: {problem}", err=True)
        sys.exit(2)
    except BrokenPipeError:
        os._exit(1)
    except OSError as problem:
        print(f"error: {problem}", file=sys.stderr)
        os._exit(2)
