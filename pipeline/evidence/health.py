"""Is the baseline sound? If not, the base model is broken, not the quantization."""

from __future__ import annotations

import math
from typing import Any

from scipy.stats import binomtest, norm

from pipeline.evidence.policy import Policy
from pipeline.evidence.verdicts import FAIL, INCONCLUSIVE, PASS
from pipeline.report.sources import Doc, is_number

BROKEN = "the base model is broken, not the quantization"


def health(evaluation: Doc, policy: Policy) -> dict[str, Any]:
    """Judge a baseline by its own eval.json.

    Returns:
        `{"verdict", "checks": {name: {"verdict", "reason"}}}`. PASS: every check is passed. FAIL: one is failed.
        INCONCLUSIVE: what it takes was not measured.
    """
    if evaluation.problem:
        return {"verdict": INCONCLUSIVE, "checks": {"eval.json": _check(None, f"not measured ({evaluation.problem})")}}
    checks = {"canary": _canary(evaluation), "perplexity": _perplexity(evaluation, policy.health.max_perplexity)}
    for name in evaluation.mapping("tasks"):
        checks[f"{name} above chance"] = above_chance(evaluation, name, policy.alpha)
    verdicts = [check["verdict"] for check in checks.values()]
    worst = FAIL if FAIL in verdicts else INCONCLUSIVE if INCONCLUSIVE in verdicts else PASS
    return {"verdict": worst, "checks": checks}


def reasons(found: dict[str, Any]) -> str:
    """Return what speaks against a baseline, as one text."""
    return "; ".join(f"{name}: {c['reason']}" for name, c in found["checks"].items() if c["verdict"] != PASS)


def _check(passed: bool | None, reason: str) -> dict[str, str]:
    return {"verdict": INCONCLUSIVE if passed is None else PASS if passed else FAIL, "reason": reason}


def _canary(evaluation: Doc) -> dict[str, str]:
    passed = evaluation.raw("canary", "passed")
    if not isinstance(passed, bool):
        return _check(None, "not measured")
    failures = [str(f.get("reason")) for f in evaluation.items("canary", "failures") if isinstance(f, dict)]
    return _check(passed, "passed" if passed else f"failed ({'; '.join(failures[:3])})")


def _perplexity(evaluation: Doc, limit: float) -> dict[str, str]:
    value = evaluation.raw("fidelity", "perplexity")
    if value is None:
        return _check(None, "not measured")
    if not is_number(value):
        return _check(False, f"is {value!r}, not a finite number")
    return _check(value <= limit, f"{value:.1f} on the held-out text, at most {limit:g} is sound")


def above_chance(evaluation: Doc, task: str, alpha: float) -> dict[str, str]:
    """Check that accuracy is above a guess with one-sided confidence 1 - alpha."""
    n, accuracy, chance = (evaluation.raw("tasks", task, key) for key in ("n", "accuracy", "chance"))
    if not (is_number(n) and is_number(accuracy)) or n < 1:
        return _check(None, "not measured")
    if not is_number(chance):
        if "chance" not in evaluation.mapping("tasks", task):
            return _check(None, "its chance level is not recorded")
        return _check(accuracy > 0, f"{accuracy:.1%} of {n}")  # a generated answer is not guessed
    if evaluation.raw("tasks", task, "binary") is not False:
        p = float(binomtest(round(accuracy * n), int(n), chance, alternative="greater").pvalue)
    else:
        spread = evaluation.raw("tasks", task, "stderr")
        gap = accuracy - chance
        p = float(norm.sf(gap / spread)) if is_number(spread) and spread > 0 else float(gap <= 0)
    said = f"{accuracy:.1%} of {n} items, a guess has {chance:.1%}"
    return _check(p <= alpha, said if p <= alpha and math.isfinite(p) else f"{said}: not above chance (p {p:.2f})")
