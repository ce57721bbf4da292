"""The command line. A group of commands is one module of pipeline/commands, listed in GROUPS."""

from __future__ import annotations

import argparse
import sys

from pipeline.commands import (
    Call,
    choice,
    evidence,
    packing,
    planning,
    proving,
    running,
    showing,
    sizing,
    support,
    trtllm,
)
from pipeline.errors import QuantpressError

GROUPS = (planning, support, sizing, proving, evidence, choice, trtllm, showing, running, packing)


def parser() -> argparse.ArgumentParser:
    """Return the argument parser; each command sets `call`."""
    top = argparse.ArgumentParser(prog="python -m pipeline", description="quantpress: plan, prove, measure, report.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, call: Call, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(call=call)
        return command

    for group in GROUPS:
        group.register(add)
    return top


def main(argv: list[str] | None = None) -> None:
    """Run a command; exit: 0 done, 1 the work failed, 2 wrong input, 3 this host cannot do it, 4 inconclusive."""
    args = parser().parse_args(argv)
    try:
        code = args.call(args)
    except QuantpressError as error:
        print(f"quantpress: error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("quantpress: error: stopped by the user.", file=sys.stderr)
        code = 1
    except BrokenPipeError:
        code = 1
    except OSError as error:
        print(f"quantpress: error: {error}.", file=sys.stderr)
        code = 1
    sys.exit(code)
