"""support: what each runtime does with each format on each GPU, and how that is known."""

from __future__ import annotations

import argparse

from pipeline.commands import PARAMS, Add


def _support(args: argparse.Namespace) -> int:
    import json

    from pipeline import jsonio
    from pipeline.params import load_params
    from pipeline.support import show

    if args.write_docs:
        jsonio.write_text(show.DOCS, show.docs())
        print(f"{show.DOCS} is written.")
        return 0
    params = load_params(PARAMS)
    device = show.device_named(args.target, params.targets) if args.target else None
    found = show.entries(args.format, device, args.runtime, show.allowed_devices(params))
    if args.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        print(show.grid(found) if not (args.format or args.target) else show.details(found))
    return 0


def register(add: Add) -> None:
    """Add the commands of this module."""
    support = add("support", _support, "what each runtime does with each format on each GPU, and how that is known")
    support.add_argument("--format", help="a format, or a name such as awq-w4a16: every reason and source")
    support.add_argument("--target", help="a target of params.yaml, or cpu, sm89: every reason and source")
    support.add_argument("--runtime", help="vllm, trtllm-engine or trtllm-bundle")
    support.add_argument("--json", action="store_true", help="one object for each row and device")
    support.add_argument("--write-docs", action="store_true", help="write docs/support.md")
