"""The plain-words answer of one target: facts picked by simple rules that are printed beside them.

The rules claim nothing beyond the intervals: 'the intervals overlap' is said, 'no different' is not.
"""

from __future__ import annotations

from typing import Any

from pipeline.evidence.verdicts import FAIL
from pipeline.report.text import and_list, missing, number, show, span
from pipeline.report.verdicts import verdict_line

# The start of a cell's status where something of it was measured on its target.
HAS_RESULTS = ("measured", "partly measured")
RULES = (
    "Fastest: the highest ratio of output tokens per second over the baseline, at the load that is named. "
    "Closest to the baseline: the highest perplexity kept. Smallest: the fewest bytes of weights. "
    "An artifact that failed the coherence canary, lint or the policy, or was not measured, is never named, "
    "and a timing with request errors or wrong output lengths is not used."
)


def reference_point(cells: list[dict[str, Any]], preferred: list[str]) -> dict[str, Any] | None:
    """Return the {workload, concurrency} that pictures and answers use, or None if nothing was timed.

    It is the first workload of `preferred` (params.yaml: benchmark) that was timed, at the largest
    concurrency that the most cells have in common.
    """
    counts: dict[tuple[str, int], int] = {}
    for cell in cells:
        for load in cell["speed"]["workloads"]:
            for point in load["points"]:
                if point["ratio"]["output_tok_s"]["value"] is not None:
                    key = (load["workload"], point["concurrency"] or 0)
                    counts[key] = counts.get(key, 0) + 1
    if not counts:
        return None
    order = {name: i for i, name in enumerate(preferred)}
    first = min((w for w, _ in counts), key=lambda w: (order.get(w, len(order)), w))
    best = max((k for k in counts if k[0] == first), key=lambda k: (counts[k], k[1]))
    return {"workload": best[0], "concurrency": best[1]}


def point_at(cell: dict[str, Any], reference: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the cell's benchmark point at `reference`, or None if it has none."""
    if reference is None:
        return None
    for load in cell["speed"]["workloads"]:
        for point in load["points"]:
            if (load["workload"], point["concurrency"]) == (reference["workload"], reference["concurrency"]):
                return dict(point)
    return None


def marks_at(cell: dict[str, Any], reference: dict[str, Any] | None) -> list[str]:
    """Return the marks of the cell's benchmark point at `reference`, those of its workload included."""
    point = point_at(cell, reference)
    loads = [load for load in cell["speed"]["workloads"] if reference and load["workload"] == reference["workload"]]
    return [*(mark for load in loads for mark in load["marks"]), *point["marks"]] if point else []


def noise_floor(cells: list[dict[str, Any]], reference: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return how far one leg repeats at `reference`, or None where nothing was timed twice.

    {pct: by how much two single legs of one server differ in 95% of cases, band: the ratios that this makes
    possible between equals, legs, runs: of the baseline that it is taken from, aa: the baseline timed against itself,
    a fact or None}. Of several cells' the largest: each adds its own legs.
    """
    points = [(cell, point) for cell in cells if (point := point_at(cell, reference))]
    found = [point["repeats"] for _, point in points if point["repeats"]]
    if not found:
        return None
    most = max(found, key=lambda repeats: float(repeats["noise_pct"]))
    high = 1 + most["noise_pct"] / 100
    against_itself = (p["ratio"]["output_tok_s"] for c, p in points if c["speed"]["is_noise_floor"])
    return {"pct": most["noise_pct"], "band": [1 / high, high], "legs": most["legs"], "runs": most["runs"],
            "aa": next((dict(fact) for fact in against_itself if fact["value"] is not None), None)}  # fmt: skip


def answer(group: dict[str, Any]) -> list[dict[str, str]]:
    """Return the lines of the answer box, in the order in which a release manager asks.

    Each is {topic, lead, text}: `lead` is the answer itself, `text` the evidence for it.
    """
    lines = [*verdict_line(group), _fastest(group), *_marked(group), _closest(group), _smallest(group), _noise(group)]
    return [*lines, *_missing(group)]


def _candidates(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Cells that may be named as best, whatever was measured on them."""
    return [
        c
        for c in group["cells"]
        if not c["is_baseline"]
        and c["canary"]["passed"] is not False
        and c["lint"]["passed"] is not False
        and c["gate"]["verdict"] != FAIL
    ]


def _fastest(group: dict[str, Any]) -> dict[str, str]:
    timed = []
    for cell in _candidates(group):
        point = point_at(cell, group["reference"])
        if point and point["clean"] and point["ratio"]["output_tok_s"]["value"] is not None:
            timed.append((cell["recipe"], point["ratio"]["output_tok_s"], point["candidate"]["output_tok_s"]))
    if not timed:
        text = "No quantized artifact has a usable timing on this target, so no speed is claimed."
        return _line("Fastest", "not known", text)
    timed.sort(key=lambda t: -t[1]["value"])
    recipe, ratio, tok_s = timed[0]
    lead = f"{recipe}, {show(ratio, 'speed')} the baseline's output tokens per second"
    text = f"95% CI {span(ratio['ci95'], 'speed')}"
    if tok_s["value"] is not None:
        text += f", {number(tok_s['value'], 'tok_s')} tok/s"
    text += f" at concurrency {group['reference']['concurrency']}. {_against_one(ratio)}"
    if len(timed) > 1:
        name, second, _ = timed[1]
        text += f" Next is {name}, {show(second, 'speed', True)}; {_overlap(ratio, second)}."
    return _line("Fastest", lead, text)


def _marked(group: dict[str, Any]) -> list[dict[str, str]]:
    """Say which of the timings that the answer compares carry a mark, and which."""
    parts = []
    for cell in group["cells"]:
        marks = marks_at(cell, group["reference"])
        parts += [f"{cell['recipe']} ({'; '.join(marks)})"] if marks else []
    return [_line("Marks", "these timings are flagged", f"{'. '.join(parts)}.")] if parts else []


def _against_one(ratio: dict[str, Any]) -> str:
    if not ratio["ci95"]:
        return "There is no interval, so nothing says how far this repeats."
    if ratio["ci95"][0] > 1:
        return "The whole interval lies above 1; it holds how far legs of this target repeat."
    return "The interval does not lie above 1, so no gain is shown."


def _overlap(a: dict[str, Any], b: dict[str, Any]) -> str:
    if not a["ci95"] or not b["ci95"]:
        return "without both intervals the order of the two is not settled"
    apart = a["ci95"][0] > b["ci95"][1] or b["ci95"][0] > a["ci95"][1]
    return "the two intervals do not overlap" if apart else "the two intervals overlap"


def _closest(group: dict[str, Any]) -> dict[str, str]:
    kept = [c for c in _candidates(group) if c["quality"]["fidelity"]["perplexity_kept_pct"]["value"] is not None]
    if not kept:
        text = "No quantized artifact has a fidelity measurement on this target, so no quality is claimed."
        return _line("Closest to the baseline", "not known", text)
    kept.sort(key=lambda c: -c["quality"]["fidelity"]["perplexity_kept_pct"]["value"])
    best = kept[0]
    fidelity = best["quality"]["fidelity"]
    lead = f"{best['recipe']}, {show(fidelity['perplexity_kept_pct'], 'pct')} of perplexity kept"
    text = f"95% CI {span(fidelity['perplexity_kept_pct']['ci95'], 'pct')}"
    if fidelity["top1_agreement_pct"]["value"] is not None:
        text += f", same first choice of token {show(fidelity['top1_agreement_pct'], 'pct')} of the time"
    text += f". {_task_words(best)}"
    if len(kept) > 1:
        second = kept[1]["quality"]["fidelity"]["perplexity_kept_pct"]
        relation = _overlap(fidelity["perplexity_kept_pct"], second)
        text += f" Next is {kept[1]['recipe']}, {show(second, 'pct', True)}; {relation}."
    return _line("Closest to the baseline", lead, text)


def _task_words(cell: dict[str, Any]) -> str:
    words = []
    for name, task in cell["quality"]["tasks"].items():
        delta = task["delta_pp"]
        if delta["value"] is None:
            continue
        if delta["ci95"]:
            holds = "the interval includes zero" if _holds_zero(delta) else "the interval excludes zero"
            words.append(f"{name} accuracy changed by {show(delta, 'pp', True)} ({holds})")
        else:
            words.append(f"{name} accuracy changed by {show(delta, 'pp')} (no interval)")
    return f"{'; '.join(words)}." if words else "No task accuracy was compared."


def _holds_zero(delta: dict[str, Any]) -> bool:
    return bool(delta["ci95"][0] <= 0 <= delta["ci95"][1])


def _smallest(group: dict[str, Any]) -> dict[str, str]:
    sized = [
        c
        for c in _candidates(group)
        if c["size"]["weight_bytes"]["value"] is not None and c["status"].split(" (")[0] in HAS_RESULTS
    ]
    if not sized:
        return _line("Smallest", "not known", "No artifact that was measured here has a recorded size.")
    low = min(c["size"]["weight_bytes"]["value"] for c in sized)
    names = [c["recipe"] for c in sized if c["size"]["weight_bytes"]["value"] == low]
    text = ""
    smaller = next(c for c in sized if c["recipe"] == names[0])["size"]["times_smaller"]
    if smaller["value"] is not None:
        text = f"{show(smaller, 'smaller')} smaller than the source."
    return _line("Smallest", f"{and_list(names)}, {number(low, 'mb')} of weights", text)


def _noise(group: dict[str, Any]) -> dict[str, str]:
    noise = group["noise_floor"]
    if noise is None:
        lead = missing("nothing was timed twice at this load")
        return _line("Noise floor", lead, "Nothing says which speed differences are chance, so no interval is given.")
    text = f"Two single legs of one server differ by less in 95% of cases ({noise['legs']} legs of the baseline in "
    text += (
        f"{noise['runs']} run{'s' if noise['runs'] > 1 else ''}). Every interval of a speed on this target holds it."
    )
    if noise["aa"]:
        text += f" The baseline timed against itself: {show(noise['aa'], 'speed', True)}."
    return _line("Noise floor", f"{noise['pct']:.1f}%", text)


def _line(topic: str, lead: str, text: str) -> dict[str, str]:
    return {"topic": topic, "lead": lead, "text": text}


def _missing(group: dict[str, Any]) -> list[dict[str, str]]:
    lines = []
    cells = group["cells"]
    groups = (
        ("Not served here", [c["recipe"] for c in cells if c["verdict"] == "refused"], "Reasons below."),
        ("Failed the canary", [c["recipe"] for c in cells if c["canary"]["passed"] is False], "Do not ship."),
        ("Failed lint", [c["recipe"] for c in cells if c["lint"]["passed"] is False], "Do not ship."),
        (
            "Evidence missing",
            [c["recipe"] for c in cells if not c["status"].startswith("measured") and c["verdict"] != "refused"],
            "Quality or speed was not measured; reasons below.",
        ),
    )
    for topic, names, then in groups:
        if names:
            lines.append(_line(topic, and_list(names), then))
    return lines
