"""recommend, compare: which cell to ship per GPU and objective, and what changed between two revisions."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.commands import Add

AIMS = ("throughput", "latency", "cost", "memory")


def _recommend(args: argparse.Namespace) -> int:
    import json

    from pipeline.choice.answers import answers, scaling
    from pipeline.choice.words import overview, text
    from pipeline.params import load_params, load_yaml

    root = Path(".")
    found = answers(root, args.target, args.slo, args.aim, args.model)
    rows = scaling(root, load_params(root / "params.yaml"), load_yaml(root / "pipeline/plan.yaml", "the plan"))
    rows = [row for row in rows if args.target in (None, row["target"])]
    if args.json:
        print(json.dumps({"schema": "quantpress.recommendation/1", "answers": found, "scaling": rows}, indent=1))
        return 0
    full = args.target is not None and args.slo is not None
    print("\n\n".join(map(text, found)) if full else overview(found))
    for row in rows:
        said = f"{row['efficiency']:.0%}" if row["efficiency"] is not None else f"not measured ({row['not_measured']})"
        where = " ".join(str(row[k]) for k in ("cell", "workload", "load") if k in row)
        print(f"scaling efficiency on {row['target']} ({row['gpus']} GPUs) {where}: {said}")
    if not full:
        print("\nThe table and the Pareto set: add --target and --slo; everything as JSON: --json.")
    return 0


def _compare(args: argparse.Namespace) -> int:
    import json

    from pipeline.choice.compare import compare, text

    found = compare(Path("."), args.old, args.new, args.upgrade, args.cell)
    print(json.dumps(found, indent=1) if args.json else text(found))
    return int(found["exit_code"])


def register(add: Add) -> None:
    """Add the commands of this module."""
    recommend = add("recommend", _recommend, "which cell to ship per GPU and objective, why, and what would change it")
    recommend.add_argument("--target", help="one target of params.yaml (default: all)")
    recommend.add_argument("--slo", help="one objective of params.yaml (default: all)")
    recommend.add_argument("--model", help="one model of params.yaml (default: all)")
    recommend.add_argument("--aim", choices=AIMS, default="throughput", help="what to rank by (default: throughput)")
    recommend.add_argument("--json", action="store_true", help="everything as one JSON object")
    compare = add("compare", _compare, "what changed between the results of two git revisions")
    compare.add_argument("old", metavar="REV_A", help="a git revision: a tag, a branch, a commit")
    compare.add_argument("new", metavar="REV_B", nargs="?", help="another one (default: the working tree)")
    compare.add_argument("--cell", help="one cell (default: all that both have)")
    compare.add_argument(
        "--upgrade", action="store_true", help="judge another engine version like a new precision: old is the baseline"
    )
    compare.add_argument("--json", action="store_true", help="one JSON object")
