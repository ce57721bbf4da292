"""The report's pictures as inline SVG: nothing from elsewhere, and the same bytes each time.

Text is drawn as outlines of the font that ships in matplotlib, so a page looks alike on every machine.
Colours are Okabe and Ito's, which people with colour-vision deficiency can tell apart; every mark is
labelled as well.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.report.answer import marks_at, point_at
from pipeline.report.placing import place_labels, spread
from pipeline.report.text import number

PALETTE = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C6D31", "#A50026", "#1B7837",
    "#4D4D9E", "#B35806", "#2D7F83", "#9E4784", "#6B6B00", "#5A6B7B",
)  # fmt: skip
BASELINE, INK, GRID, BAND = "#3B3F46", "#22262C", "#E3E6EA", "#D5DAE1"
# A mark that keeps less than this is drawn at the lower edge, with its number: it must not squash the others.
FLOOR_PCT = 60.0
WIDE, NARROW, SMALL = (8.4, 4.7), (4.3, 4.5), (4.9, 3.3)  # inches


def figures(group: dict[str, Any]) -> dict[str, Any]:
    """Return one target's SVG texts: {quality_speed: {wide, narrow} | None, speed: [str], size: str | None}.

    A picture without data is None; `left_out` says which recipes are not in the main one, and why.
    """
    marks, left_out = _marks(group)
    prefix = re.sub(r"[^a-z0-9]+", "-", f"{group['target']}-{group['runtime']}-{group['model']}".lower())
    main = None
    if any(not m["is_baseline"] for m in marks):
        main = {
            "wide": _quality_speed(group, marks, WIDE, f"{prefix}-wide"),
            "narrow": _quality_speed(group, marks, NARROW, f"{prefix}-narrow"),
        }
    loads = list(dict.fromkeys(w["workload"] for c in group["cells"] for w in c["speed"]["workloads"]))
    speed = [_speed_by_load(group, load, f"{prefix}-speed{i}") for i, load in enumerate(loads)]
    return {
        "quality_speed": main,
        "left_out": left_out,
        "speed": [svg for svg in speed if svg],
        "size": _size_bars(group, f"{prefix}-size"),
    }


def colours(group: dict[str, Any]) -> dict[str, str]:
    """Return recipe -> colour, the same one in every section of a page. The baseline is grey."""
    order = group["recipes"]
    return {
        c["recipe"]: BASELINE if c["is_baseline"] else PALETTE[order.index(c["recipe"]) % len(PALETTE)]
        for c in group["cells"]
    }


def _marks(group: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Return what can be drawn, {recipe, x, y (facts), bytes}, and what cannot, {recipe, why}."""
    marks: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    for cell in group["cells"]:
        kept = cell["quality"]["fidelity"]["perplexity_kept_pct"]
        point = point_at(cell, group["reference"])
        ratio = point["ratio"]["output_tok_s"] if point else None
        mark = {
            "recipe": cell["recipe"],
            "is_baseline": cell["is_baseline"],
            "failed": cell["canary"]["passed"] is False,
            "flagged": bool(marks_at(cell, group["reference"])),
            "legs": point["leg_ratios"] if point else [],
        }
        size = cell["size"]["weight_bytes"]["value"]
        mark["bytes"] = size if size is not None and 0 < size < 1e16 else None
        if cell["is_baseline"]:
            one = {"value": 1.0, "ci95": None}
            mark |= {"flagged": False, "legs": []}  # it stands at 1 by definition: no timing puts it there
            marks.append(mark | {"x": one, "y": {"value": 100.0, "ci95": None}})
        elif kept["value"] is None or ratio is None or ratio["value"] is None:
            speed_reason = ratio["not_measured"] if ratio else cell["speed"]["problem"] or "not timed at this load"
            why = kept["not_measured"] if kept["value"] is None else speed_reason
            left_out.append({"recipe": cell["recipe"], "why": why})
        elif not (_drawable(ratio) and _drawable(kept)):
            left_out.append({"recipe": cell["recipe"], "why": "its numbers fit no scale"})
        else:
            marks.append(mark | {"x": ratio, "y": kept})
    return _lift(marks), left_out


def _drawable(fact: dict[str, Any]) -> bool:
    """Tell whether a ratio or a percentage is of a size that an axis can hold; a broken result may not be."""
    return all(abs(v) < 1e6 for v in (fact["value"], *(fact["ci95"] or ())))


def _lift(marks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put marks below FLOOR_PCT under the lowest of the others; `off_scale` keeps the number to print."""
    usual = [m for m in marks if m["y"]["value"] >= FLOOR_PCT]
    if len(usual) < 3:  # the baseline and one more: nothing would be squashed
        return marks
    low = min(min(m["y"]["ci95"] or [m["y"]["value"]]) for m in usual)
    edge = {"value": low - 0.12 * max(100 - low, 1), "ci95": None}
    return [m if m["y"]["value"] >= FLOOR_PCT else m | {"y": edge, "off_scale": m["y"]["value"]} for m in marks]


def _quality_speed(group: dict[str, Any], marks: list[dict[str, Any]], size: tuple[float, float], salt: str) -> str:
    """Draw quality kept (y, %) against speed (x, ratio of output tok/s), marker area by weight bytes."""
    with _figure(size, salt) as (figure, axes, finish):
        _reference_lines(axes, group["noise_floor"])
        colour, largest = colours(group), max((m["bytes"] or 0 for m in marks), default=0)
        for i, mark in enumerate(marks):
            x, y, tint = mark["x"]["value"], mark["y"]["value"], colour[mark["recipe"]]
            axes.errorbar(
                x, y, xerr=_arms(mark["x"]), yerr=_arms(mark["y"]), fmt="none", ecolor=tint, elinewidth=1.4,
                capsize=3, zorder=3,
            )  # fmt: skip
            area = 40 + 360 * (mark["bytes"] or 0) / largest if largest else 120
            mark["radius_px"] = (area / 3.1416) ** 0.5 * figure.dpi / 72
            shape = "D" if mark["is_baseline"] else "X" if mark["failed"] else "o"
            shape = "v" if "off_scale" in mark else shape
            _legs(axes, [(leg, y) for leg in mark["legs"]], tint, str(i), (0, -5))
            axes.scatter([x], [y], s=area, marker=shape, alpha=0.9, zorder=4, **_paint(tint, mark["flagged"], str(i)))
        _limits(axes, marks, group["noise_floor"])
        load = group["reference"]
        narrow = size == NARROW
        axes.set_xlabel(
            f"Speed: output tokens/s over the baseline →\n({load['workload']}, concurrency {load['concurrency']})"
        )
        axes.set_ylabel("Quality: perplexity kept, % →" if narrow else "Quality kept: 100 ÷ perplexity ratio, % →")
        axes.xaxis.set_major_formatter(lambda v, _: f"{v:g}×")
        place_labels(figure, axes, [_label(m, colour[m["recipe"]]) for m in marks], fontsize=9.5)
        return finish(_describe(group, marks))


def _paint(tint: str, flagged: bool, key: str) -> dict[str, Any]:
    """Return the colours of a mark; that of a flagged timing is hollow. `key` tells it from the others of a picture."""
    if flagged:
        return {"facecolors": "white", "edgecolors": tint, "linewidths": 1.8, "gid": f"flagged-{key}"}
    return {"facecolors": tint, "edgecolors": "white", "linewidths": 1.2}


def _legs(axes: Any, at: list[tuple[float, float]], tint: str, key: str, shift: tuple[float, float]) -> None:
    """Draw single legs as small dots, `shift` points beside their mean and its interval; one leg is the mean itself."""
    from matplotlib.transforms import offset_copy

    if len(at) > 1 and all(abs(v) < 1e6 for xy in at for v in xy):
        beside = offset_copy(axes.transData, axes.figure, *shift, units="points")
        axes.scatter(
            *zip(*at, strict=True), s=9, color=tint, alpha=0.7, linewidths=0, zorder=3.5, gid=f"leg-{key}",
            transform=beside,
        )  # fmt: skip


def _label(mark: dict[str, Any], colour: str) -> dict[str, Any]:
    size = f"\n{mark['bytes'] / 1e6:,.0f} MB" if mark["bytes"] else "\nsize not measured"
    name = f"{mark['recipe']} (baseline)" if mark["is_baseline"] else mark["recipe"]
    if mark["failed"]:
        name += "\nfailed canary"
    if "off_scale" in mark:
        size = f"\n↓ at {number(mark['off_scale'], 'pct')}"
    return mark | {"text": name + size, "colour": colour}


def _describe(group: dict[str, Any], marks: list[dict[str, Any]]) -> str:
    """The picture in words, for a screen reader."""
    parts = []
    for mark in marks:
        kept = mark.get("off_scale", mark["y"]["value"])
        parts.append(f"{mark['recipe']}: speed {number(mark['x']['value'], 'speed')}, kept {number(kept, 'pct')}")
    return f"Quality kept against speed on {group['target']}. {'; '.join(parts)}."


def _reference_lines(axes: Any, noise: dict[str, Any] | None) -> None:
    """Mark the baseline, and shade the ratios that chance alone gives: one leg against another of the same server."""
    axes.axvline(1, color="#9AA1AB", linewidth=1, zorder=1)
    axes.axhline(100, color="#9AA1AB", linewidth=1, zorder=1)
    if noise and noise["band"][1] < 1e6:
        low, high = noise["band"]
        axes.axvspan(low, high, color=BAND, alpha=0.75, linewidth=0, zorder=0.5)
        text = f"noise of one leg {low:.2f}–{high:.2f}×"
    else:
        text = "noise: not measured"
    axes.annotate(
        text, (1, 0), xycoords=("data", "axes fraction"), xytext=(-5, 6), textcoords="offset points",
        rotation=90, ha="right", va="bottom", fontsize=8, color="#5B626C", gid="noise",
    )  # fmt: skip


def _limits(axes: Any, marks: list[dict[str, Any]], noise: dict[str, Any] | None) -> None:
    """Room for marks, intervals and labels around them."""
    for key, setter, extra in (
        ("x", axes.set_xlim, noise["band"] if noise and noise["band"][1] < 1e6 else None),
        ("y", axes.set_ylim, None),
    ):
        ends = [v for m in marks for v in (m[key]["value"], *(m[key]["ci95"] or ()))] + list(extra or ())
        low, high = min(ends), max(ends)
        room = (high - low) or 0.1 * abs(high) or 1
        setter(low - 0.16 * room, high + 0.16 * room)


def _speed_by_load(group: dict[str, Any], workload: str, salt: str) -> str | None:
    """Draw the ratio of output tok/s (y) by concurrency (x, one step each) for each recipe."""
    series = []
    for cell in group["cells"]:
        loads = [w for w in cell["speed"]["workloads"] if w["workload"] == workload]
        points = {p["concurrency"]: (p, bool(w["marks"] or p["marks"])) for w in loads for p in w["points"]}
        rows = [(c, p["ratio"]["output_tok_s"]) for c, (p, _) in points.items()]
        rows = [(c, f) for c, f in rows if isinstance(c, int) and f["value"] is not None and _drawable(f)]
        if rows:
            rows.sort(key=lambda r: r[0])
            of_legs = {c: (p["leg_ratios"], flagged) for c, (p, flagged) in points.items()}
            series.append((cell["recipe"], cell["speed"]["is_noise_floor"], rows, of_legs))
    levels = sorted({c for _, _, rows, _ in series for c, _ in rows})
    if not series:
        return None
    at, colour = {c: i for i, c in enumerate(levels)}, colours(group)
    with _figure(SMALL, salt) as (figure, axes, finish):
        axes.axhline(1, color="#9AA1AB", linewidth=1, zorder=1)
        ends: list[tuple[float, float, str, str]] = []
        dodge = 0.05
        for i, (recipe, is_noise, rows, of_legs) in enumerate(series):
            shift = (i - (len(series) - 1) / 2) * dodge
            xs, ys = [at[c] + shift for c, _ in rows], [f["value"] for _, f in rows]
            if is_noise:
                _noise_band(axes, [(at[c], f) for c, f in rows])
                ends.append((at[rows[-1][0]] + 0.33, ys[-1], "A/A noise", "#5B626C"))
                continue
            tint = colour[recipe]
            axes.plot(xs, ys, color=tint, linewidth=1.6, zorder=3)
            for x, (load, fact) in zip(xs, rows, strict=True):
                legs, flagged = of_legs[load]
                axes.errorbar(x, fact["value"], yerr=_arms(fact), fmt="none", ecolor=tint, elinewidth=1.3, capsize=2)
                _legs(axes, [(x, leg) for leg in legs], tint, f"{i}-{load}", (-5, 0))
                axes.scatter([x], [fact["value"]], s=30, zorder=4, **_paint(tint, flagged, f"{i}-{load}"))
            ends.append((xs[-1], ys[-1], recipe, colour[recipe]))
        axes.set_xticks(range(len(levels)), [str(c) for c in levels])
        axes.set_xlim(-0.35, len(levels) - 1 + 1.1)
        axes.set_xlabel("Concurrency (requests in flight)")
        axes.set_ylabel("Output tokens/s over baseline")
        axes.yaxis.set_major_formatter(lambda v, _: f"{v:g}×")
        axes.set_title(f"Speed by concurrency, {workload}", loc="left", fontsize=10, color=INK)
        axes.margins(y=0.12)
        spread(figure, axes, ends, x=len(levels) - 1 + 0.42, fontsize=9)
        return finish(f"Ratio of output tokens per second by concurrency on {group['target']}, {workload}.")


def _noise_band(axes: Any, rows: list[tuple[int, dict[str, Any]]]) -> None:
    """Shade the A/A interval of each concurrency as a step of its own: nothing is measured in between."""
    for x, fact in rows:
        if fact["ci95"]:
            low, high = fact["ci95"]
            axes.fill_between([x - 0.33, x + 0.33], low, high, color=BAND, alpha=0.8, linewidth=0, zorder=0.5)


def _size_bars(group: dict[str, Any], salt: str) -> str | None:
    """Draw the bytes of weights of each recipe, largest first; what is not served here is hatched."""
    rows = [c for c in group["cells"] if 0 < (c["size"]["weight_bytes"]["value"] or 0) < 1e16]
    if not rows:
        return None
    rows.sort(key=lambda c: c["size"]["weight_bytes"]["value"])
    colour = colours(group)
    with _figure((SMALL[0], max(2.2, 0.36 * len(rows) + 1.1)), salt) as (_, axes, finish):
        largest = rows[-1]["size"]["weight_bytes"]["value"] / 1e6
        for i, cell in enumerate(rows):
            mb, served = cell["size"]["weight_bytes"]["value"] / 1e6, cell["verdict"] != "refused"
            tint = colour[cell["recipe"]]
            axes.barh(
                i, mb, height=0.62, color=tint if served else "white", edgecolor=tint, linewidth=1.2,
                hatch=None if served else "////",
            )  # fmt: skip
            bits = cell["size"]["effective_bits_per_weight"]["value"]
            note = f"{mb:,.0f} MB" + (f", {bits:.1f} bits" if bits is not None else "")
            axes.text(
                mb + 0.015 * largest,
                i,
                note if served else f"{note}, not served",
                va="center",
                fontsize=8.5,
                color=INK,
            )
        axes.set_yticks(range(len(rows)), [c["recipe"] for c in rows])
        axes.set_xlim(0, largest * 1.42)
        axes.set_xlabel("Weights, MB (10⁶ bytes)")
        axes.set_title("Size of the artifact", loc="left", fontsize=10, color=INK)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0, labelsize=9.5)
        return finish(f"Size of each artifact in megabytes, model {group['model']}.")


def _arms(fact: dict[str, Any]) -> list[list[float]] | None:
    """Return matplotlib's [[below], [above]] of an interval; a value outside it has an arm of 0."""
    if not fact["ci95"]:
        return None
    low, high = fact["ci95"]
    return [[max(fact["value"] - low, 0)], [max(high - fact["value"], 0)]]


@contextmanager
def _figure(size: tuple[float, float], salt: str) -> Iterator[tuple[Any, Any, Callable[[str], str]]]:
    """Yield (figure, axes, finish): finish(description) is the SVG. matplotlib is imported here, late."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "path", "svg.hashsalt": salt, "font.family": "DejaVu Sans", "font.size": 9.5,
        "axes.edgecolor": "#9AA1AB", "axes.labelcolor": INK,
        "xtick.color": "#4A515B", "ytick.color": "#4A515B",
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID,
        "grid.linewidth": 0.8, "axes.axisbelow": True, "hatch.linewidth": 0.7, "figure.dpi": 100,
        "text.parse_math": False,
    }  # fmt: skip
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's own matplotlibrc must not change a report
        matplotlib.rcParams.update(style)
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()

        def finish(description: str) -> str:
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
            return _inline(buffer.getvalue(), salt, description)

        yield figure, axes, finish


def _inline(svg: str, salt: str, description: str) -> str:
    """Make matplotlib's SVG file a piece of a page: no prolog or metadata, ids of its own, a description."""
    from html import escape

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{salt}-\1"', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{salt}-", svg)
    end = svg.index(">")
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", svg[:end])
    label = f'<svg role="img" aria-label="{escape(description, quote=True)}"'
    return head.replace("<svg", label, 1) + svg[end:]
