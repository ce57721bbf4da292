"""power, gate: how much evidence an answer needs, and whether a release may go out."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.commands import Add


def _power(args: argparse.Namespace) -> int:
    import json

    from pipeline.errors import InputError
    from pipeline.evidence import power

    power.check(args.flips, args.margin, args.damage, args.alpha, args.power)
    if args.items is not None and args.items < 1:
        raise InputError(f"--items is a number of items, at least 1, not {args.items}.")
    items = power.items_needed(args.flips, args.margin, args.damage, args.alpha, args.power)
    if items is None:
        raise InputError(
            f"More than {power.MOST_ITEMS:,} items: the damage is too near the margin. Take a wider margin."
        )
    have = args.items or items
    seen = power.smallest_damage(have, args.flips, args.alpha, args.power)
    answer = {
        "items": items,
        "flips": args.flips,
        "margin": args.margin,
        "damage": args.damage,
        "alpha_one_sided": args.alpha,
        "power": args.power,
        "of_items": have,
        "smallest_damage": round(seen, 6),
        "method": "paired binary items, non-inferiority, normal approximation",
    }
    if args.json:
        print(json.dumps(answer))
        return 0
    print(
        f"{items:,} items show at one-sided {args.alpha:.0%} and power {args.power:.0%} that the loss of accuracy is "
        f"below {100 * args.margin:g} pp,\nif {args.flips:.1%} of the items flip and the true loss is "
        f"{100 * args.damage:g} pp."
    )
    print(f"With {have:,} items the smallest loss told from none {args.power:.0%} of the time: {100 * seen:.2f} pp.")
    return 0


def _gate(args: argparse.Namespace) -> int:
    from pipeline import jsonio
    from pipeline.evidence.gate import gate
    from pipeline.evidence.summary import markdown

    record = gate(Path("."))
    if args.check:
        print(markdown(record), end="")
        return int(record["exit_code"])
    jsonio.write_json(args.out, record)
    for name, cell in record["cells"].items():
        print(f"{name}: {cell['verdict']}{' (decides)' if cell['ship'] else ''}")
    print(f"{args.out}: {record['verdict']}. `python -m pipeline gate --check` says why and ends with the exit code.")
    return 0


def register(add: Add) -> None:
    """Add the commands of this module."""
    power = add("power", _power, "how many items a verdict needs, before a run")
    power.add_argument("--flips", type=float, required=True, help="share of items that flip between the models: 0.05")
    power.add_argument("--margin", type=float, required=True, help="accepted loss of accuracy as a share: 0.01 is 1 pp")
    power.add_argument("--damage", type=float, default=0.0, help="the true loss to reckon with (default: none)")
    power.add_argument("--alpha", type=float, default=0.05, help="one-sided level (default: 0.05)")
    power.add_argument("--power", type=float, default=0.8, help="chance to get the answer (default: 0.8)")
    power.add_argument("--items", type=int, help="also: the smallest damage that this many items see")
    power.add_argument("--json", action="store_true", help="one JSON object; the answer is in `items`")
    gate = add("gate", _gate, "judge the results by policy.yaml and write artifacts/gate.json")
    gate.add_argument(
        "--check", action="store_true", help="write nothing, print Markdown; exit 0 PASS, 1 FAIL, 4 neither"
    )
    gate.add_argument("--out", type=Path, default=Path("artifacts/gate.json"), help="where the verdict is written")
