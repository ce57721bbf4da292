"""How often the verdicts are wrong, and how often planted damage is found: judged from simulations and recorded.json.

    python -m tests.calibration.rates        # prints the rates, writes docs/verdict-calibration.{json,png}

The verdicts are those of the gate: a one-sided level of 5%, a promised power of 80%.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm, t

from pipeline.evidence.items import score_z, smooth_flips
from pipeline.evidence.power import ALPHA, POWER, both_tails, smallest_damage
from pipeline.evidence.resample import Estimate, ratio_of_sums
from pipeline.evidence.verdicts import CONTINUITY, of_items, of_mean

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
MARGINS = (0.001, 0.01, 0.02, 0.03)
SIMULATED = 20_000
DRAWS = 400


def recorded() -> dict[str, Any]:
    """Return the recorded runs of the real checkpoint."""
    return dict(json.loads((HERE / "recorded.json").read_text(encoding="utf-8")))


def flips(base: str, other: str) -> tuple[int, int]:
    """Return how many items were lost and won."""
    pairs = list(zip(base, other, strict=True))
    return sum(p == ("1", "0") for p in pairs), sum(p == ("0", "1") for p in pairs)


def simulated(items: int, share: float, damage: float, margin: float, seed: int = 0) -> dict[str, float]:
    """Return the rates of PASS and FAIL over comparisons with this share of flips and this true damage (0..1)."""
    rng = np.random.default_rng(seed)
    rows = rng.multinomial(items, [(share + damage) / 2, (share - damage) / 2, 1 - share], size=SIMULATED)
    kinds, counts = np.unique(rows, axis=0, return_counts=True)
    below = np.array([score_z(items, int(b), int(c), margin) for b, c, _ in kinds])
    passed = norm.cdf(below) <= ALPHA
    return {"fail": fail_rate(items, rows, margin), "pass": float(counts[passed].sum() / counts.sum())}


def fail_rate(items: int, rows: np.ndarray, margin: float) -> float:
    """Return the share of `[comparisons][lost, won, same]` whose verdict is FAIL; Comparison.p_fail, quickly."""
    kinds, counts = np.unique(rows, axis=0, return_counts=True)
    z = np.array([score_z(items, int(b), int(c), margin, CONTINUITY) for b, c, _ in kinds])
    return float(counts[norm.sf(z) <= ALPHA].sum() / counts.sum())


def false_rates() -> list[dict[str, Any]]:
    """Simulate comparisons without damage, and with damage of exactly the margin, where errors are most frequent."""
    rows = []
    for items in (100, 200, 400, 1000, 3000):
        for share in (0.02, 0.05, 0.10):
            for margin in MARGINS:
                none = simulated(items, share, 0.0, margin)
                row = {"items": items, "flips": share, "margin": margin, "none": none}
                if margin <= share:
                    row["at_margin"] = simulated(items, share, margin, margin, seed=1)
                rows.append(row)
    return rows


def real_aa(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Judge each run of the same function against the first, by items and by windows."""
    base = record["aa"][0]
    rows = []
    for run in record["aa"][1:]:
        worse, better = flips(base["correct"], run["correct"])
        n = len(base["correct"])
        fails = [m for m in MARGINS if of_items(n, worse, better, m).p_fail <= ALPHA]
        kl, gap, _ = (np.array(x) for x in zip(*run["windows"], strict=True))
        ratio = of_mean(_mean(gap), math.log(1.001), "windows")
        assert ratio is not None
        rows.append({
            "name": run["name"], "items": n, "worse": worse, "better": better,
            "fails": fails,
            "kl_mean": float(kl.mean()), "log_perplexity_ratio": float(gap.mean()),
            "perplexity_fails": ratio.p_fail <= ALPHA,
        })  # fmt: skip
    return rows


def _mean(values: np.ndarray) -> Estimate:
    return ratio_of_sums(values, np.ones_like(values))


def found_rates(record: dict[str, Any]) -> list[dict[str, Any]]:
    """For each planted damage and sample size: its size over the promised one, and how often FAIL came out.

    The recorded items are the population; a sample draws from them with replacement, so that the true damage and the
    share of flips are known.
    """
    rng = np.random.default_rng(2)
    base = next(r for r in record["damage"] if r["kind"] == "none")["correct"]
    rows = []
    for run in record["damage"]:
        worse, better = flips(base, run["correct"])
        n = len(base)
        damage, share = (worse - better) / n, (worse + better) / n
        if run["kind"] == "none":
            continue
        for items in (50, 100, 200, 400, 800, 1600):
            draws = rng.multinomial(items, [worse / n, better / n, 1 - share], size=DRAWS)
            for margin in (0.01, 0.03):
                seen = smallest_damage(items, smooth_flips(n, worse, better))
                promised = min(margin + seen + CONTINUITY / items, 1.0)
                rows.append({
                    "kind": run["kind"], "name": run["name"], "items": items, "margin": margin, "damage": damage,
                    "flips": share, "promised": promised, "fail": fail_rate(items, draws, margin),
                })  # fmt: skip
    return rows


def whole(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Judge each planted damage as the gate would: all recorded items at 3 pp, and the windows' perplexity at 1.05."""
    base = next(r for r in record["damage"] if r["kind"] == "none")
    rows = []
    for run in record["damage"]:
        worse, better = flips(base["correct"], run["correct"])
        task = of_items(len(base["correct"]), worse, better, 0.03)
        kl, gap, same = (np.array(x) for x in zip(*run["windows"], strict=True))
        ratio = of_mean(_mean(gap), math.log(1.05), "windows")
        assert ratio is not None
        rows.append({
            "kind": run["kind"], "name": run["name"], "items": task.items,
            "damage_pp": 100 * task.damage, "flips_pct": 100 * (worse + better) / task.items,
            "fails_from_pp": 100 * task.fails_from, "task_fails": task.p_fail <= ALPHA,
            "task_passes": task.p_pass <= ALPHA, "perplexity_ratio": float(np.exp(gap.mean())),
            "perplexity_fails": ratio.p_fail <= ALPHA, "perplexity_passes": ratio.p_pass <= ALPHA,
            "kl_mean": float(kl.mean()), "top1_agreement_pct": float(same.mean()),
        })  # fmt: skip
    return rows


def window_rates(damage_in_se: float, windows: int, seed: int = 3) -> float:
    """Return how often a mean over windows fails whose true damage lies so many errors over the margin."""
    rng = np.random.default_rng(seed)
    values = rng.normal(damage_in_se, math.sqrt(windows), size=(SIMULATED, windows))
    z = values.mean(axis=1) / (values.std(axis=1, ddof=1) / math.sqrt(windows))
    return float((t.sf(z, windows - 1) <= ALPHA).mean())


def summary() -> dict[str, Any]:
    """Return everything that the page and the test need."""
    record = recorded()
    false = false_rates()
    return {
        "alpha": ALPHA,
        "power": POWER,
        "simulated_per_row": SIMULATED,
        "draws_per_row": DRAWS,
        "false": false,
        "worst_false_fail_without_damage": max(r["none"]["fail"] for r in false),
        "worst_false_fail_at_the_margin": max(r["at_margin"]["fail"] for r in false if "at_margin" in r),
        "worst_false_pass_at_the_margin": max(r["at_margin"]["pass"] for r in false if "at_margin" in r),
        "windows_at_the_margin_fail": {str(n): window_rates(0.0, n) for n in (8, 16, 64)},
        "real_aa": real_aa(record),
        "found": found_rates(record),
        "whole": whole(record),
        "template": record["template"],
        "model": record["model"],
        "versions": record["versions"],
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the two pictures: how often FAIL is wrong, and how often planted damage is found against its size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    left, right = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")[1]
    marks = {0.02: "o", 0.05: "s", 0.10: "^"}
    for share, mark in marks.items():
        rows = [r for r in found["false"] if r["flips"] == share]
        for key, colour, label in (("none", "#0072b2", "no damage"), ("at_margin", "#d55e00", "damage of the margin")):
            points = [(r["items"], 100 * r[key]["fail"]) for r in rows if key in r]
            text = f"{label}, {share:.0%} flips"
            left.plot(*zip(*points, strict=True), mark, color=colour, ms=5, alpha=0.75, ls="", label=text)
    left.axhline(100 * ALPHA, color="#444", lw=1, ls="--")
    left.text(3700, 5.1, "nominal 5%", fontsize=9, color="#444", ha="right")
    left.set(xscale="log", xlabel="items compared", ylabel="FAIL, % of comparisons", ylim=(-0.3, 8),
             title="FAIL where it is false, simulated")  # fmt: skip
    real = found["real_aa"]
    wrong = sum(bool(r["fails"]) or r["perplexity_fails"] for r in real)
    left.text(0.98, 0.95, f"real checkpoint against itself: {wrong} of {len(real)} FAIL", transform=left.transAxes,
              ha="right", va="top", fontsize=9)  # fmt: skip
    left.set_xticks([100, 200, 400, 1000, 3000], ["100", "200", "400", "1,000", "3,000"])
    left.minorticks_off()
    left.legend(fontsize=7.5, ncols=2, loc="upper right", bbox_to_anchor=(1, 0.9))
    colours = {"noise": "#0072b2", "zeroed": "#d55e00", "scale": "#009e73"}
    for kind, colour in colours.items():
        rows = [r for r in found["found"] if r["kind"] == kind and r["damage"] > r["margin"]]
        x = [(r["damage"] - r["margin"]) / (r["promised"] - r["margin"]) for r in rows]
        right.plot(x, [100 * r["fail"] for r in rows], "o", ms=4, alpha=0.6, color=colour, label=kind)
    grid = np.linspace(0, 3, 200)
    right.plot(grid, 100 * norm.cdf(grid * both_tails() - norm.isf(ALPHA)), color="#444", lw=1, label="as promised")
    right.axhline(80, color="#444", lw=1, ls="--")
    right.axvline(1, color="#444", lw=1, ls="--")
    right.set(xlim=(0, 3), ylim=(-2, 103), ylabel="FAIL, % of samples", title="Planted damage that is found",
              xlabel="damage beyond the margin, over the size that is promised to be found")  # fmt: skip
    right.legend(fontsize=8.5, loc="lower right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    plt.savefig(path, dpi=110)


def main() -> None:
    """Print the rates and write the plot and its numbers."""
    found = summary()
    DOCS.joinpath("verdict-calibration.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found, DOCS / "verdict-calibration.png")
    for key in ("worst_false_fail_without_damage", "worst_false_fail_at_the_margin", "worst_false_pass_at_the_margin"):
        print(f"{key}: {found[key]:.3f}")
    print(found["windows_at_the_margin_fail"])
    for row in found["real_aa"]:
        print(row)
    for row in found["whole"]:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    beyond = [r for r in found["found"] if r["damage"] >= r["promised"]]
    print(f"{len(beyond)} planted cases beyond the promised size, lowest rate {min(r['fail'] for r in beyond):.3f}")
    print(found["template"])


if __name__ == "__main__":
    main()
