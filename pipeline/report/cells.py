"""Joins everything known about one cell (model x recipe x runtime x target) into one dict of facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.evidence.beside import beside
from pipeline.evidence.repeat import read_bench
from pipeline.report.apart import apart_from_ratios, gpu_marks, load_marks
from pipeline.report.engine import engine
from pipeline.report.sources import (
    Doc,
    Fact,
    absent,
    interval,
    is_number,
    measured,
    percentile,
    plain,
    read_doc,
)
from pipeline.report.verdicts import cell_verdict
from pipeline.shapes import SPEED_ONLY, is_random

# eval/1 is read during the change to eval/2: what it lacks is "not measured".
EVAL_SCHEMAS = ("quantpress.eval/2", "quantpress.eval/1")
LATENCIES = ("ttft_ms", "tpot_ms", "inter_chunk_ms", "e2e_ms")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
RATIOS = ("output_tok_s", "ttft_ms", "tpot_ms", "e2e_ms")
NOT_QUANTIZED = "this is the baseline: the source checkpoint as it is, nothing was quantized"
# What a format stores, and what a kernel that implements it natively multiplies.
FORMATS = {
    "bf16": ("BF16", "BF16 × BF16"),
    "fp8-tensor": ("FP8 (E4M3), one scale per tensor", "FP8 × FP8, static activation scales"),
    "fp8-channel-token": ("FP8 (E4M3), one scale per channel", "FP8 × FP8, one activation scale per token"),
    "int8-w8a8": ("INT8, one scale per channel", "INT8 × INT8"),
    "int4-w4a16": ("INT4, groups of {group}", "16-bit activations, weights unpacked from INT4"),
    "fp8-block": ("FP8 (E4M3), one scale for 128×128 weights", "FP8 × FP8, one activation scale per token and 128"),
    "int8-w8a16": ("INT8, one scale per channel", "16-bit activations, weights unpacked from INT8"),
    "int4-w4a8": ("INT4, groups of {group}", "FP8 activations, weights unpacked from INT4"),
    "nvfp4": ("FP4 (E2M1), an FP8 scale for 16 weights", "FP4 × FP4"),
    "mxfp4": ("FP4 (E2M1), a power-of-two scale for 32 weights", "FP4 × FP4"),
    "mxfp8": ("FP8 (E4M3), a power-of-two scale for 32 weights", "FP8 × FP8"),
}


def build_cell(root: Path, plan: dict[str, Any], params: Doc) -> tuple[dict[str, Any], list[Doc]]:
    """Return the report's dict for one plan entry and the documents it was read from.

    Args:
        root: the repository.
        plan: one entry of `cells` in plan.yaml.
        params: params.yaml as read.
    """
    checkpoint = plan.get("checkpoint") or f"{plan['model']}.{plan['recipe']}"
    at_cell, at_checkpoint = f"artifacts/results/{plan['cell']}", f"artifacts/results/{checkpoint}"
    quantize = read_doc(root, f"{at_checkpoint}/quantize.json", "quantpress.quantize/1")
    lint = read_doc(root, f"{at_checkpoint}/lint.json", "quantpress.lint/1")
    evaluation, bench = _served_docs(root, at_cell, plan)
    speed_only = is_random(str(params.mapping("models", plan["model"]).get("source")))
    if speed_only:
        evaluation = Doc(evaluation.path, None, SPEED_ONLY)
    model = read_doc(root, f"artifacts/results/{plan['model']}/model.json", "quantpress.model/1")
    is_baseline = plan["recipe"] == params.raw("baseline") or bench.raw("is_baseline") is True
    if is_baseline and not (root / quantize.path).exists():
        quantize = Doc(quantize.path, None, NOT_QUANTIZED)
    cell = dict(plan)
    cell |= {
        "checkpoint": checkpoint,
        "is_baseline": is_baseline,
        "made": _made(plan, params, quantize),
        "size": _size(quantize, model, lint, is_baseline),
        "lint": _lint(lint),
        "package": _package(root, plan["cell"]),
        "canary": _canary(evaluation),
        "quality": _quality(evaluation, params, is_baseline),
        "speed": _speed(bench),
        "gate": cell_verdict(root, plan["cell"], evaluation),
        "server": _server(evaluation, bench),
    }
    cell["status"] = f"measured ({SPEED_ONLY})" if speed_only and bench.data else _status(plan, evaluation, bench)
    return cell, [quantize, lint, evaluation, bench]


def _served_docs(root: Path, where: str, plan: dict[str, Any]) -> tuple[Doc, Doc]:
    """Read eval.json and bench.json; where the plan says why there is none, that is the reason given."""
    docs = []
    for name in ("eval", "bench"):
        path = f"{where}/{name}.json"
        doc = read_bench(root, Path(where).name) if name == "bench" else read_doc(root, path, *EVAL_SCHEMAS)
        if name == "bench" and not (root / path).exists() and (found := beside(root, Path(where).name)):
            doc = found[0]
        elif doc.problem and not (root / doc.path).exists() and (reason := _planned_reason(root, plan, name)):
            doc = Doc(doc.path, None, reason)
        manifest = f"artifacts/packages/{plan.get('cell')}/deploy/manifest.json"
        now = read_doc(root, manifest, None).raw("checkpoint", "digest")
        then = doc.raw("package_digest")
        if now and then and now != then:
            stale = (
                f"stale: {doc.path} was measured on checkpoint {str(then)[:12]}, the package now has {str(now)[:12]}"
            )
            doc = Doc(doc.path, None, f"{stale}; run `uv run dvc repro --glob '*@{plan['cell']}'`")
        if False in (doc.raw("server", "genuine"), doc.raw("server", "candidate", "genuine")):
            doc = Doc(doc.path, None, "a stand-in for TensorRT-LLM answered, so its numbers are not shown")
        docs.append(doc)
    return docs[0], docs[1]


def _planned_reason(root: Path, plan: dict[str, Any], name: str) -> str | None:
    if plan["verdict"] == "refused":
        return f"not served on {plan['target']}: {plan['reason']}"
    if not plan["measured_here"]:
        others = any((root / "artifacts/results").glob(f"*.{plan['target']}/[be][ev]*.json"))
        so_far = f"not {'timed' if name == 'bench' else 'evaluated'} on {plan['target']} so far"
        return so_far if others else f"this run did not include target {plan['target']}"
    return None


def _status(plan: dict[str, Any], evaluation: Doc, bench: Doc) -> str:
    found = [doc.data is not None for doc in (evaluation, bench)]
    if all(found):
        return "measured"
    if any(found):
        return "partly measured"
    if plan["verdict"] == "refused":
        return f"not served on {plan['target']} ({plan['reason']})"
    if not plan["measured_here"]:
        return f"not measured ({evaluation.problem if evaluation.problem == bench.problem else bench.problem})"
    return f"not measured ({evaluation.problem}; {bench.problem})"


def _made(plan: dict[str, Any], params: Doc, quantize: Doc) -> dict[str, Any]:
    """How the checkpoint was made. params.yaml stands in for what was asked, never for what was measured."""
    spec = quantize.mapping("spec") or params.mapping("recipes", plan["recipe"])
    group = spec.get("group_size")
    stored, computed = FORMATS.get(str(spec.get("format")), (plain(spec.get("format") or "not known"), "not known"))
    stored = stored.replace("{group}", plain(group))
    if spec.get("kv_cache", "bf16") != "bf16":
        stored += f"; KV cache {str(spec['kv_cache']).upper()} with calibrated scales"
    if plan["verdict"] == "refused":
        computed = f"nothing: not served on {plan['target']}"
    elif plan["verdict"] != "native":
        computed = f"{plan['verdict']}: {plan['reason']}" if plan["reason"] else str(plan["verdict"])
    made: dict[str, Any] = {
        key: plain(spec[key]) if key in spec else None for key in ("format", "algorithm", "note", "served_by")
    }
    backend = quantize.raw("backend") or plan.get("backend") or spec.get("backend")
    made |= {"backend": backend, "group_size": group}
    made |= {"stored": stored, "computed": computed, "problem": quantize.problem}
    for key in ("wall_s", "peak_memory_gib", "quantized_layers"):
        made[key] = quantize.fact(key)
    for key in ("calib", "seed", "versions", "env_lock_sha256", "git_commit", "host"):
        made[key] = quantize.raw(key)
    return made | {
        "left_alone": list(map(plain, quantize.items("left_alone"))),
        "options": spec.get("options"),
    }


def _size(quantize: Doc, model: Doc, lint: Doc, is_baseline: bool) -> dict[str, Fact]:
    """Bytes of the weights (as stored), of the source, and their ratio. The baseline is the source itself."""
    weight, source = quantize.fact("weight_bytes"), quantize.fact("source_weight_bytes")
    bits = quantize.fact("effective_bits_per_weight")
    if source["value"] is None:
        source = model.fact("weight_bytes", why=source["not_measured"])
    if weight["value"] is None and (seen := lint.fact("weight_bytes"))["value"] is not None:
        weight = seen
    if weight["value"] is None and is_baseline:
        weight = model.fact("weight_bytes", why=weight["not_measured"])
    count = model.raw("parameters")
    if bits["value"] is None and is_baseline and weight["value"] and is_number(count) and count > 0:
        bits = measured(8 * weight["value"] / count)
    smaller = absent(weight["not_measured"] or source["not_measured"] or "the artifact has no bytes")
    if weight["value"] and source["value"]:
        smaller = measured(source["value"] / weight["value"])
    return {
        "weight_bytes": weight,
        "source_weight_bytes": source,
        "times_smaller": smaller,
        "effective_bits_per_weight": bits,
    }


def _lint(lint: Doc) -> dict[str, Any]:
    findings = [f for f in lint.items("findings") if isinstance(f, dict)]
    counts = {s: sum(f.get("severity") == s for f in findings) for s in ("error", "warning")}
    if lint.problem or not isinstance(lint.raw("passed"), bool):
        passed, state = None, f"not measured ({lint.problem or f'{lint.path} has no passed'})"
    else:
        passed = bool(lint.raw("passed"))
        state = "passed" if passed else "failed"
    keys = ("severity", "rule", "subject", "message")
    return {
        "passed": passed,
        "state": state,
        "errors": counts["error"],
        "warnings": counts["warning"],
        "findings": [{key: plain(f.get(key, "")) for key in keys} for f in findings],
        "layers_quantized": lint.fact("layers", "quantized"),
        "layers_ignored": lint.fact("layers", "ignored"),
        "predicted_weight_bytes": lint.fact("predicted_weight_bytes"),
    }


def _package(root: Path, cell: str) -> dict[str, Any]:
    """State of the package; `launch` is the command that starts it, `launch_runs` what that command runs."""
    folder = f"artifacts/packages/{cell}"
    found: dict[str, Any] = {
        "path": folder,
        "exists": (root / folder).is_dir(),
        "launch": None,
        "launch_runs": None,
    }
    if not found["exists"]:
        return found | {"problem": f"{folder} is missing"}
    script = f"{folder}/deploy/launch.sh"
    if (root / script).is_file():
        lines = (root / script).read_text(encoding="utf-8", errors="replace").splitlines()
        commands = [line for line in lines if line.strip() and not line.startswith("#")]
        found |= {"launch": f"sh {script}", "launch_runs": plain("\n".join(commands), 2000)}
    return found | {"problem": read_doc(root, f"{folder}/deploy/manifest.json", None).problem}


def _canary(evaluation: Doc) -> dict[str, Any]:
    canary, passed = evaluation.mapping("canary"), evaluation.raw("canary", "passed")
    known = isinstance(passed, bool)
    failures = [f for f in evaluation.items("canary", "failures") if isinstance(f, dict)]
    state = {True: "passed", False: "failed"}[passed] if known else None
    return {
        "passed": passed if known else None,
        "state": state or f"not measured ({evaluation.problem or f'{evaluation.path} has no canary.passed'})",
        "prompts": evaluation.fact("canary", "prompts"),
        "known_asked": evaluation.fact("canary", "known", "asked"),
        "known_right": evaluation.fact("canary", "known", "right"),
        "failures": [{key: plain(f.get(key, "")) for key in ("id", "reason", "text")} for f in failures],
        "problem": None if canary else evaluation.problem,
    }


def _quality(evaluation: Doc, params: Doc, is_baseline: bool) -> dict[str, Any]:
    why = "this is the baseline: there is nothing to compare it with" if is_baseline else None
    named = [str(t) for t in params.items("evaluation", "tasks")]
    not_run = {str(k): plain(v) for k, v in evaluation.mapping("not_run").items()}
    ids = list(dict.fromkeys([*named, *map(str, evaluation.mapping("tasks")), *not_run]))
    tasks = {task: _task(evaluation, task, not_run.get(task), why) for task in ids}
    fidelity: dict[str, Any] = {
        key: evaluation.fact("fidelity", key) for key in ("tokens", "windows", "top_k", "perplexity")
    }
    for key in ("top1_agreement_pct", "kl_mean", "kl_median", "kl_p99", "kl_max", "baseline_perplexity"):
        fidelity[key] = evaluation.fact("fidelity", key, ci=f"{key}_ci95", why=why)
    ratio = evaluation.fact("fidelity", "perplexity_ratio", ci="perplexity_ratio_ci95", why=why)
    fidelity |= {"perplexity_ratio": ratio, "perplexity_kept_pct": _kept(ratio)}
    fidelity["kl_kind"] = plain(evaluation.raw("fidelity", "kl_kind") or "kind of KL not stated")
    return {"problem": evaluation.problem, "tasks": tasks, "fidelity": fidelity}


def _task(evaluation: Doc, task: str, not_run: str | None, why: str | None) -> dict[str, Any]:
    if not_run and not evaluation.mapping("tasks", task):
        why = not_run
    facts: dict[str, Any] = {k: evaluation.fact("tasks", task, k, why=not_run) for k in ("n", "accuracy")}
    facts["accuracy_stderr"] = evaluation.fact("tasks", task, "stderr", why=not_run)
    for key in ("baseline_accuracy", "flips_right_to_wrong", "flips_wrong_to_right", "recovery_pct"):
        facts[key] = evaluation.fact("tasks", task, key, why=why)
    facts["delta_pp"] = evaluation.fact("tasks", task, "delta_pp", ci="delta_pp_ci95", why=why)
    return facts


def _kept(ratio: Fact) -> Fact:
    """Perplexity kept, %: 100 / ratio; 100 is the baseline, lower is damage. The interval flips."""
    if ratio["value"] is None:
        return absent(ratio["not_measured"])
    if ratio["value"] <= 0:
        return absent(f"the perplexity ratio is {ratio['value']}, which cannot be")
    low, high = ratio["ci95"] or (0, 0)
    return measured(100 / ratio["value"], [100 / high, 100 / low] if low > 0 else None)


def _speed(bench: Doc) -> dict[str, Any]:
    workloads = []
    apart = apart_from_ratios(bench)
    for name, load in bench.mapping("workloads").items():
        if name in apart["names"]:
            continue
        points = load.get("points") if isinstance(load, dict) else None
        rows = [_point(bench, p) for p in points if isinstance(p, dict)] if isinstance(points, list) else []
        lengths = {k: load.get(k) if isinstance(load, dict) else None for k in ("prompt_tokens", "output_tokens")}
        marks = gpu_marks(Doc(bench.path, load if isinstance(load, dict) else {}))
        workloads.append({"workload": str(name), **lengths, "marks": marks, "points": rows})
    problem = bench.problem or (None if workloads or apart["names"] else f"{bench.path} has no workloads")
    return {
        "problem": problem,
        "is_noise_floor": bench.raw("is_baseline") is True,
        "beside": bench.raw("beside"),
        "order": bench.raw("order"),
        "client": bench.raw("client"),
        "workloads": workloads,
        "streaming": apart["streaming"],
        "soak": apart["soak"],
        "left_out": [
            {"workload": name, "load": item.get("name"), "reason": plain(item.get("reason", ""))}
            for name, load in bench.mapping("workloads").items()
            for item in Doc(bench.path, load if isinstance(load, dict) else {}).items("left_out")
            if isinstance(item, dict)
        ],
    }


def _point(bench: Doc, point: dict[str, Any]) -> dict[str, Any]:
    doc = Doc(bench.path, point)
    row: dict[str, Any] = {
        k: point[k] if is_number(point.get(k)) else None for k in ("concurrency", "requests", "warmup")
    }
    rate = point.get("rate")
    row["rate"] = rate if is_number(rate) else None
    row["load"] = f"{rate:g}/s, open loop" if is_number(rate) else str(row["concurrency"] or "not recorded")
    row["marks"] = load_marks(doc)
    row["repeats"] = doc.mapping("repeats", "output_tok_s") or None
    row["elsewhere"] = doc.items("elsewhere")
    row["leg_ratios"] = leg_ratios(doc)
    row["legs"] = len(doc.items("candidate", "repeats", "output_tok_s"))
    for side in ("candidate", "baseline"):
        row[side] = {k: doc.fact(side, k) for k in ("output_tok_s", "request_s", "errors")}
        row[side]["output_tokens_ok"] = doc.raw(side, "output_tokens_ok")
        for name in LATENCIES:
            stats: dict[str, Any] = {k: percentile(doc, side, name, k) for k in STATISTICS}
            row[side][name] = stats | {"n": doc.fact(side, name, "n")}
    row["ratio"] = {key: _ratio(doc, key) for key in RATIOS}
    sides = [row[s] for s in ("candidate", "baseline")]
    row["clean"] = all(s["errors"]["value"] == 0 and s["output_tokens_ok"] is True for s in sides)
    return row


def leg_ratios(point: Doc) -> list[float]:
    """Return output tokens/s of each of the candidate's legs over the mean of the baseline's; empty where not known."""
    mean = point.raw("baseline", "output_tok_s")
    rates = point.items("candidate", "repeats", "output_tok_s")
    return [x / mean for x in rates if is_number(x)] if is_number(mean) and mean > 0 else []


def _ratio(doc: Doc, key: str) -> Fact:
    fact = doc.fact("ratio", key)
    if fact["value"] is not None:
        fact["ci95"] = interval(doc.raw("ratio_ci95", key))
    return fact


def _no_backend(doc: Doc) -> str:
    return doc.problem or "the server's log names none"


def _server(evaluation: Doc, bench: Doc) -> dict[str, Any]:
    """What served the cell: evaluate's server, else benchmark's; and both commands."""
    doc, keys = (evaluation, ("server",)) if evaluation.mapping("server") else (bench, ("server", "candidate"))
    kernels = [plain(k) for k in doc.items(*keys, "kernels")]
    both = (evaluation, bench)
    reason = doc.problem or "the server's log names no kernel for linear layers"
    startup = doc.raw(*keys, "startup_s")
    commands = {"evaluate": evaluation.raw("server", "command")}
    commands |= {f"benchmark, {s}": bench.raw("server", s, "command") for s in ("candidate", "baseline")}
    return {
        "runtime": doc.raw(*keys, "runtime"),
        "engine": engine(doc, *keys),
        "attention_backend": doc.raw(*keys, "attention_backend") or f"not measured ({_no_backend(doc)})",
        "kernels": kernels,
        "kernels_not_measured": None if kernels else reason,
        "startup_s": measured(startup) if is_number(startup) else absent(reason),
        "kv_cache_tokens": doc.fact(*keys, "kv_cache_tokens"),
        "commands": {k: v for k, v in commands.items() if isinstance(v, str)},
        "measured_at": {d.path: d.raw("finished_at") or d.raw("measured_at") for d in both if d.data},
        "host": {d.path: d.raw("host") for d in both if d.data},
        "versions": {d.path: d.raw("versions") for d in both if d.data},
        "git_commit": {d.path: d.raw("git_commit") for d in both if d.data},
        "remote_code": evaluation.raw("remote_code"),
    }
