"""plan, check, doctor: what a run will do, before it does it."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.commands import PARAMS, Add
from pipeline.errors import InputError


def _plan(args: argparse.Namespace) -> int:
    from pipeline import jsonio, plan
    from pipeline.memory.cells import compact
    from pipeline.params import load_params
    from pipeline.tuning.propose import proposed

    params = load_params(PARAMS)
    configs = plan.known_configs(Path("."), params)
    made = plan.make_plan(params, configs)
    serving = compact(params, configs, made["cells"])
    if args.check:
        plan.check_fresh(made)
        print("pipeline/plan.yaml is fresh.")
        return 0
    text = plan.dump(made)
    if not plan.PLAN.exists() or plan.PLAN.read_text(encoding="utf-8") != text:
        jsonio.write_text(plan.PLAN, text)
    print(plan.table(made))
    for part in (serving, proposed(Path("."), [cell["cell"] for cell in made["cells"]])):
        if part:
            print(f"\n{part}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from pipeline import jsonio, plan
    from pipeline.evidence.policy import PATH, load_policy
    from pipeline.memory.cells import compact
    from pipeline.params import load_params

    params = load_params(PARAMS)
    configs = plan.known_configs(Path("."), params)
    made = plan.make_plan(params, configs)
    plan.check_fresh(made)
    compact(params, configs, made["cells"])  # a serving option of the user's that cannot work ends the run here
    wanted = [item for item in made["refusals"] if item["measure"]]
    if wanted:
        said = "; ".join(f"{item['what']}: {item['reason']}" for item in wanted)
        raise InputError(f"The matrix asks for what cannot be made: {said}. Correct the recipe or leave it out.")
    # What the gate would refuse after everything was measured is refused here.
    load_policy(PATH, params, [cell["cell"] for cell in made["cells"]])
    unchecked = sorted(set(params.models) - set(configs))
    for model in unchecked:
        print(f"not checked: {model} is not fetched yet, so group sizes are checked when it is.")
    print(
        f"params.yaml and pipeline/plan.yaml agree: {len(made['cells'])} cells, {len(made['measure'])} measured here."
    )
    if args.out and not args.out.exists():
        jsonio.write_text(args.out, "params.yaml and pipeline/plan.yaml agree\n")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from pipeline.doctor import doctor

    return doctor(PARAMS)


def register(add: Add) -> None:
    """Add the commands of this module."""
    plan = add("plan", _plan, "write pipeline/plan.yaml from params.yaml and print cells and refusals")
    plan.add_argument("--check", action="store_true", help="change nothing; fail if the plan is stale")
    check = add("check", _check, "check params.yaml and the plan; a recipe that cannot be made is an error")
    check.add_argument("--out", type=Path, help="write a line there when everything agrees")
    add("doctor", _doctor, "what this host can run, what is missing, disk and memory needed for the plan")
