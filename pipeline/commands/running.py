"""run and probe: what DVC calls."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.commands import PARAMS, Add


def _run(args: argparse.Namespace) -> int:
    from pipeline.runstage import run_stage

    return run_stage(args.env, args.program, args.arguments)


def _probe(args: argparse.Namespace) -> int:
    from pipeline import host, jsonio

    found = None
    if args.target:
        from pipeline.making import need_target
        from pipeline.params import load_params

        params = load_params(PARAMS)
        need_target(params, args.target)
        found = host.kind(params.targets[args.target])
    jsonio.write_json(args.out, found or host.fingerprint())
    return 0


def register(add: Add) -> None:
    """Add the commands of this module."""
    run = add("run", _run, "run a stage program in its locked environment")
    run.add_argument("env")
    run.add_argument("program")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    probe = add("probe", _probe, "write this host's fingerprint")
    probe.add_argument("--out", type=Path, required=True)
    probe.add_argument("--target", help="write what all machines of this target share; an error on another machine")
