"""Puts labels where they hide nothing: no mark, no interval, no other label."""

from __future__ import annotations

from typing import Any

# Directions tried in this order: right of a mark reads best, then above and below it.
_DIRECTIONS = ((1, 0), (1, 1), (1, -1), (0, 1), (0, -1), (-1, 0), (-1, 1), (-1, -1))
_DISTANCES_PX = (4, 12, 24, 40, 60, 85, 115)
_MARGIN_PX = 2  # free space kept around a label


def place_labels(figure: Any, axes: Any, labels: list[dict[str, Any]], fontsize: float) -> None:
    """Write each label at the free place nearest to its mark, with a thin line to the mark where that is far.

    Args:
        figure: a figure with an Agg canvas; it is laid out here, once, so that pixels can be measured.
        axes: axes whose limits are final.
        labels: text, colour, radius_px, and x and y as facts (value and ci95).
        fontsize: points.
    """
    figure.canvas.draw()
    figure.set_layout_engine("none")
    renderer = figure.canvas.get_renderer()
    taken = [box for label in labels for box in _obstacles(axes, label)]
    taken += [_corners(t.get_window_extent(renderer)) for t in axes.texts]
    frame = _corners(axes.get_window_extent(renderer))
    for label in sorted(labels, key=lambda m: (-m["x"]["value"], m["y"]["value"], m["text"])):
        text = axes.annotate(
            label["text"], (label["x"]["value"], label["y"]["value"]), xytext=(0, 0),
            textcoords="offset pixels", ha="center", va="center", fontsize=fontsize,
            color=_darker(label["colour"]), linespacing=1.15, fontweight="bold", zorder=6,
            annotation_clip=False,
        )  # fmt: skip
        box = _corners(text.get_window_extent(renderer))
        best = min(_places(label, box), key=lambda place: _cost(place, box, taken, frame))
        # In points, not pixels: an SVG has 72 to the inch, whatever the canvas that measured the text has.
        text.set_position((best[0] * 72 / figure.dpi, best[1] * 72 / figure.dpi))
        text.anncoords = "offset points"
        text.set_path_effects(_halo())
        taken.append(_moved(box, best))
        if best[2] > _DISTANCES_PX[1]:
            _leader(axes, label, best, box, figure.dpi)


def _places(label: dict[str, Any], box: tuple[float, ...]) -> list[tuple[float, float, float]]:
    """Return candidate offsets (dx, dy, distance), pixels from the mark's centre to the text's centre."""
    half_w, half_h = (box[2] - box[0]) / 2, (box[3] - box[1]) / 2
    places = []
    for distance in _DISTANCES_PX:
        for dx, dy in _DIRECTIONS:
            reach = label["radius_px"] + distance
            diagonal = 0.7 if dx and dy else 1.0
            places.append((dx * (reach * diagonal + half_w), dy * (reach * diagonal + half_h), float(distance)))
    return places


def _cost(place: tuple[float, float, float], box: tuple[float, ...], taken: list[Any], frame: Any) -> float:
    moved = _moved(box, place)
    area = (box[2] - box[0]) * (box[3] - box[1])
    outside = area - _shared(moved, frame)
    padded = (moved[0] - _MARGIN_PX, moved[1] - _MARGIN_PX, moved[2] + _MARGIN_PX, moved[3] + _MARGIN_PX)
    hidden = [shared for other in taken if (shared := _shared(padded, other)) > 0]
    # Any overlap at all is worse than the farthest place; within that, less of it and nearer is better.
    return sum(hidden) * 10 + len(hidden) * 1500 + outside * 20 + place[2] * 8


def _obstacles(axes: Any, label: dict[str, Any]) -> list[tuple[float, ...]]:
    """Return the pixel boxes of a mark and of the arms of its intervals."""
    to_px = axes.transData.transform
    x, y, r = label["x"], label["y"], label["radius_px"]
    cx, cy = to_px((x["value"], y["value"]))
    boxes: list[tuple[float, ...]] = [(cx - r, cy - r, cx + r, cy + r)]
    if x["ci95"]:
        (left, _), (right, _) = to_px((x["ci95"][0], y["value"])), to_px((x["ci95"][1], y["value"]))
        boxes.append((left, cy - 4, right, cy + 4))
    if y["ci95"]:
        (_, low), (_, high) = to_px((x["value"], y["ci95"][0])), to_px((x["value"], y["ci95"][1]))
        boxes.append((cx - 4, low, cx + 4, high))
    return boxes


def _leader(axes: Any, label: dict[str, Any], place: Any, box: Any, dpi: float) -> None:
    """Draw a thin line from the mark to the near edge of its label."""
    half_w, half_h = (box[2] - box[0]) / 2, (box[3] - box[1]) / 2
    end = (place[0] - max(-half_w, min(half_w, place[0])), place[1] - max(-half_h, min(half_h, place[1])))
    axes.annotate(
        "", (label["x"]["value"], label["y"]["value"]), xytext=(end[0] * 72 / dpi, end[1] * 72 / dpi),
        textcoords="offset points",
        arrowprops={"arrowstyle": "-", "color": label["colour"], "linewidth": 0.8},
    )  # fmt: skip


def spread(figure: Any, axes: Any, ends: list[tuple[float, float, str, str]], x: float, fontsize: float) -> None:
    """Label line ends (x, y, text, colour) in a column at `x`, moved up and down until none overlap."""
    if not ends:
        return
    figure.canvas.draw()
    low, high = axes.get_ylim()
    per_px = (high - low) / axes.get_window_extent(figure.canvas.get_renderer()).height
    step = fontsize * 1.3 * figure.dpi / 72 * per_px
    ends = sorted(ends, key=lambda e: (e[1], e[2]))
    heights = [e[1] for e in ends]
    for _ in range(200):
        for i in range(len(heights) - 1):
            push = step - (heights[i + 1] - heights[i])
            if push > 1e-12:
                heights[i], heights[i + 1] = heights[i] - push / 2, heights[i + 1] + push / 2
    for (from_x, from_y, text, colour), height in zip(ends, heights, strict=True):
        axes.plot([from_x, x - 0.03], [from_y, height], color=colour, linewidth=0.7, alpha=0.6, zorder=1)
        label = axes.text(x, height, text, color=_darker(colour), fontsize=fontsize, va="center")
        label.set(fontweight="bold", path_effects=_halo())
    axes.set_ylim(min(low, heights[0] - step), max(high, heights[-1] + step))


def _halo() -> list[Any]:
    """Return the effect that keeps text readable where it crosses a line."""
    from matplotlib import patheffects

    return [patheffects.withStroke(linewidth=3, foreground="white", alpha=0.85)]


def _corners(box: Any) -> tuple[float, float, float, float]:
    return (box.x0, box.y0, box.x1, box.y1)


def _moved(box: tuple[float, ...], place: tuple[float, ...]) -> tuple[float, float, float, float]:
    return (box[0] + place[0], box[1] + place[1], box[2] + place[0], box[3] + place[1])


def _shared(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Area that two boxes share, px^2."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _darker(colour: str) -> str:
    """Return a hex colour dark enough for small text on white."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{int(p * 0.72):02x}" for p in parts)
