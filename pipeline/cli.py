"""The command line: plan, check, doctor, lint, package, verify, report, run, probe.

Imports stay inside the commands, so that `--help` answers within a quarter of a second.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import InputError, QuantpressError, WorkError, unknown

PARAMS = Path("params.yaml")


def _plan(args: argparse.Namespace) -> int:
    from pipeline import jsonio, plan
    from pipeline.specs import load_params

    params = load_params(PARAMS)
    made = plan.make_plan(params, plan.known_configs(Path("."), params))
    if args.check:
        plan.check_fresh(made)
        print("pipeline/plan.yaml is fresh.")
        return 0
    text = plan.dump(made)
    if not plan.PLAN.exists() or plan.PLAN.read_text(encoding="utf-8") != text:
        jsonio.write_text(plan.PLAN, text)
    print(plan.table(made))
    return 0


def _check(args: argparse.Namespace) -> int:
    from pipeline import jsonio, plan
    from pipeline.specs import load_params

    params = load_params(PARAMS)
    configs = plan.known_configs(Path("."), params)
    made = plan.make_plan(params, configs)
    plan.check_fresh(made)
    if made["refusals"]:
        said = "; ".join(f"{item['what']}: {item['reason']}" for item in made["refusals"])
        raise InputError(f"The matrix asks for what cannot be made: {said}. Correct the recipe or leave it out.")
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


def _lint(args: argparse.Namespace) -> int:
    from pipeline import jsonio
    from pipeline.lint import lint
    from pipeline.specs import load_params

    params = load_params(PARAMS)
    if args.recipe not in params.recipes:
        raise unknown("recipe", args.recipe, params.recipes, "params.yaml")
    if args.model not in params.models:
        raise unknown("model", args.model, params.models, "params.yaml")
    recipe = params.recipes[args.recipe]
    result = lint(
        args.checkpoint,
        Path("artifacts/models") / args.model,
        recipe.format,
        recipe.group_size,
        recipe.algorithm,
    )
    if args.out:
        jsonio.write_json(args.out, result)
    for finding in result["findings"]:
        print(f"{finding['severity']}: {finding['rule']}: {finding['subject']}: {finding['message']}")
    if not result["passed"]:
        errors = sum(f["severity"] == "error" for f in result["findings"])
        raise WorkError(f"{args.checkpoint} has {errors} lint errors; it must not be served.")
    layers = result["layers"]
    print(f"{args.checkpoint}: whole. {layers['quantized']} linear layers quantized, {layers['ignored']} left alone.")
    return 0


def _package(args: argparse.Namespace) -> int:
    from pipeline.package import Cell, package
    from pipeline.specs import load_params

    cell = Cell(args.model, args.recipe, args.runtime, args.target)
    made = package(cell, load_params(PARAMS))
    print(
        f"{cell.deploy}: {made['support']['verdict']} on {cell.target}, checkpoint {made['checkpoint']['digest'][:12]}"
    )
    return 0


def _verify(args: argparse.Namespace) -> int:
    from pipeline.manifest import verify

    found = verify(args.package, args.root)
    print(f"{args.package}: whole, {len(found['checkpoint']['files'])} checkpoint files match their sha256.")
    return 0


def _report(args: argparse.Namespace) -> int:
    from pipeline.report import write_report

    page = write_report(Path("."), Path("artifacts/report"))
    print(f"report: {page}")
    if args.open:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
    return 0


def _run(args: argparse.Namespace) -> int:
    from pipeline.runstage import run_stage

    return run_stage(args.env, args.program, args.arguments)


def _probe(args: argparse.Namespace) -> int:
    from pipeline import host, jsonio

    jsonio.write_json(args.out, host.fingerprint())
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the argument parser; each command sets `call`."""
    top = argparse.ArgumentParser(prog="python -m pipeline", description="quantpress: plan, prove, measure, report.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, call: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(call=call)
        return command

    plan = add("plan", _plan, "write pipeline/plan.yaml from params.yaml and print cells and refusals")
    plan.add_argument("--check", action="store_true", help="change nothing; fail if the plan is stale")
    check = add("check", _check, "check params.yaml and the plan; a recipe that cannot be made is an error")
    check.add_argument("--out", type=Path, help="write a line there when everything agrees")
    add("doctor", _doctor, "what this host can run, what is missing, disk and memory needed for the plan")
    lint = add("lint", _lint, "prove a checkpoint whole without a GPU")
    lint.add_argument("checkpoint", type=Path)
    lint.add_argument("--model", required=True)
    lint.add_argument("--recipe", required=True)
    lint.add_argument("--out", type=Path)
    package = add("package", _package, "make what is deployed for one cell")
    for name in ("model", "recipe", "runtime", "target"):
        package.add_argument(f"--{name}", required=True)
    verify = add("verify", _verify, "check a package and its checkpoint against the manifest")
    verify.add_argument("package", type=Path)
    verify.add_argument("--root", type=Path, help="the folder that holds artifacts/ (default: from the package's path)")
    report = add("report", _report, "write artifacts/report from the results")
    report.add_argument("--open", action="store_true", help="show it in the browser")
    run = add("run", _run, "run a stage program in its locked environment")
    run.add_argument("env")
    run.add_argument("program")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    probe = add("probe", _probe, "write this host's fingerprint")
    probe.add_argument("--out", type=Path, required=True)
    return top


def main(argv: list[str] | None = None) -> None:
    """Run a command and exit with 0 done, 1 the work failed, 2 the input is wrong, 3 this host cannot do it."""
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
