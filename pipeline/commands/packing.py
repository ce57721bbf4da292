"""wheelhouse and on-target: machines without a network, and machines that are lent for half an hour."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from pipeline.commands import PARAMS, Add
from pipeline.errors import InputError


def _wheelhouse(args: argparse.Namespace) -> int:
    from pipeline import wheelhouse

    if not re.fullmatch(r"3\.\d+", args.python):
        raise InputError(f"--python {args.python!r} is no minor version of Python; write for instance 3.12.")
    glibc = re.fullmatch(r"2\.(\d+)", args.glibc)
    if glibc is None:
        raise InputError(f"--glibc {args.glibc!r} is no version; write for instance 2.28 (`ldd --version` says it).")
    have = {}
    if args.have:
        if not args.have.is_file():
            raise InputError(f"There is no file {args.have}. On the other machine: `pip list --format=freeze > FILE`.")
        have = wheelhouse.read_have(args.have.read_text(encoding="utf-8"))
    machine = wheelhouse.Machine(args.python, int(glibc[1]))
    envs = list(dict.fromkeys(args.env))
    made = wheelhouse.pack(envs, machine, have, wheelhouse.parse_size(args.split), args.out)
    for name, entry in made["environments"].items():
        mine = sum(made["wheels"][wheel]["bytes"] for wheel in entry["wheels"])
        print(f"{name:14} {len(entry['wheels']):4} wheels, {mine / 1e6:7.1f} MB")
        for what, table in (("the host's", entry["from_host"]), ("left out", entry["left_out"])):
            print(f"{'':14} {len(table):4} {what}{': ' + ', '.join(table) if table else ''}")
    total = sum(wheel["bytes"] for wheel in made["wheels"].values())
    print(f"{args.out}: {total / 1e6:.1f} MB in {made['parts']} parts of at most {args.split}")
    print(f"On the other machine, in the repository: sh {args.out.name}/install.sh")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from pipeline import jsonio
    from pipeline.compare_checkpoints import compare, table

    found = compare(args.first, args.second)
    if args.out:
        jsonio.write_json(args.out, found)
    print(table(found))
    return 0


def _on_target(args: argparse.Namespace) -> int:
    from pipeline.on_target import Run, need_minutes
    from pipeline.params import load_params

    need_minutes(args.minutes)
    jobs, gpus = max(1, args.jobs), max(1, args.gpus)
    return Run(load_params(PARAMS), args.target, args.minutes, jobs, args.out, gpus, args.only)()


def _bring_home(args: argparse.Namespace) -> int:
    from pipeline.on_target_files import bring_home

    changed = bring_home(args.file)
    for path in changed:
        print(path)
    print(f"{len(changed)} files changed. `uv run dvc repro` makes the report of them.")
    return 0


def register(add: Add) -> None:
    """Add the commands of this module."""
    pack = add("wheelhouse", _wheelhouse, "pack environments with checksums for a machine without a network")
    pack.add_argument("env", nargs="+", help="names in stages/, or `core` for the pipeline itself")
    pack.add_argument("--have", type=Path, help="what the other machine has: `pip list --format=freeze` of it")
    pack.add_argument("--split", default="60M", help="largest part (default 60M; K, M, G are powers of 1000)")
    pack.add_argument("--python", default="3.12", help="the other machine's Python (default 3.12)")
    pack.add_argument("--glibc", default="2.28", help="its glibc, as `ldd --version` says (default 2.28)")
    pack.add_argument("--out", type=Path, default=Path(".quantpress/wheelhouse"))
    run = add("on-target", _on_target, "make and measure a target's cells on it, the most telling first")
    run.add_argument("target")
    run.add_argument("--minutes", type=float, help="start nothing that would not end within this time")
    run.add_argument("--jobs", type=int, default=4, help="untimed stages at a time on each GPU (default 4)")
    run.add_argument("--gpus", type=int, default=1, help="GPUs to use; each times one cell at a time (default 1)")
    run.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="these alone: 'tune@*' 'benchmark@llama*'")
    run.add_argument("--out", type=Path, help="pack the results there after every stage, to be brought home")
    home = add(
        "bring-home", _bring_home, "unpack a results.tar.gz of on-target; stages of other targets stay in the lock"
    )
    home.add_argument("file", type=Path)
    compare = add("compare-checkpoints", _compare, "how far two checkpoints of one recipe agree, tensor by tensor")
    compare.add_argument("first", type=Path)
    compare.add_argument("second", type=Path)
    compare.add_argument("--out", type=Path, help="write the comparison there as JSON")
