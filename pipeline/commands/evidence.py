"""power, gate: how much evidence an answer needs, and whether a release may go out."""

from __future__ import annotations

import argparse

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
