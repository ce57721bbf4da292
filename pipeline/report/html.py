"""Renders the report dict as one self-contained HTML page: no request leaves it."""

from __future__ import annotations

from typing import Any

from pipeline.report import text
from pipeline.report.answer import marks_at


def page(report: dict[str, Any]) -> str:
    """Return the page for a report dict (see collect.collect). Everything from data is escaped."""
    import jinja2
    from markupsafe import Markup

    from pipeline.choice.candidates import NOT_TIMED
    from pipeline.report.figures import colours, figures

    def fact(
        cell: dict[str, Any], path: str, kind: str, interval: bool = False, marks: tuple[str, ...] | list[str] = ()
    ) -> Markup:
        """Return a table cell; `data-fact` says which number of report.json it shows, `marks` stand below it."""
        found = text.lookup(cell, path)
        shown = text.show(found, kind)
        style = "num" if found["value"] is not None else "none few" if shown.startswith("n too") else "none why"
        body = Markup('<td class="{}" data-fact="{}|{}">{}').format(style, cell["cell"], path, shown)
        if interval and found["value"] is not None:
            body += Markup('<span class="ci">{}</span>').format(text.span(found["ci95"], kind))
        marked = map(Markup('<span class="ci mark wrap">{}</span>').format, marks)
        return body + Markup("").join(marked) + Markup("</td>")

    def reference_path(cell: dict[str, Any], reference: dict[str, Any] | None) -> str | None:
        """Return the path of the cell's benchmark point at the reference load, if it was timed there."""
        for i, load in enumerate(cell["speed"]["workloads"]):
            for j, point in enumerate(load["points"]):
                if reference and (load["workload"], point["concurrency"]) == tuple(reference.values()):
                    return f"speed/workloads/{i}/points/{j}"
        return None

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pipeline.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        fact=fact, show=text.show, missing=text.missing, number=text.number, colours=colours,
        reference_path=reference_path, marks_at=marks_at, named=named, words=words, minute=minute,
        host_line=host_line, run_tasks=run_tasks, other_tasks=other_tasks, NOT_TIMED=NOT_TIMED,
        absent_cells=absent_cells, planned_rows=planned_rows,
    )  # fmt: skip
    environment.filters["code"] = code
    drawn = [_safe(figures(group)) for group in report["targets"]]
    return environment.get_template("report.html.j2").render(report=report, drawn=drawn)


def code(value: str) -> str:
    """Return text as markup, what stands between backticks as code; everything is escaped."""
    from markupsafe import Markup, escape

    parts = value.split("`")
    if len(parts) % 2 == 0:  # one has no partner, so they are no quotes
        return escape(value)
    pieces = [Markup("<code>{}</code>").format(p) if i % 2 else escape(p) for i, p in enumerate(parts)]
    return Markup("").join(pieces)


def absent_cells(group: dict[str, Any], part: str) -> list[str]:
    """Return a line for each reason why cells of a group have no quality or speed, with their recipes."""
    found: dict[str, list[str]] = {}
    for cell in group["cells"]:
        if reason := cell[part]["problem"]:
            refused = cell["status"].startswith("not served")
            said = "not served, see At a glance" if refused else text.missing(reason)
            found.setdefault(said, []).append(cell["recipe"])
    return [f"{text.and_list(recipes)}: {said}." for said, recipes in found.items()]


def planned_rows(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return planned cells as rows {target, model, runtime, says, recipes, status, first}: those alike share one.

    `first`: the first row of its target, where the status that its cells share is told.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    status: dict[str, str] = {}
    for cell in cells:
        says = cell["verdict"] + (f": {cell['reason']}" if cell["reason"] else "")
        found.setdefault((cell["target"], cell["model"], cell["runtime"], says), []).append(cell["recipe"])
        status[cell["target"]] = status.get(cell["target"]) or (cell["status"] if cell["verdict"] != "refused" else "")
    order = list(status)
    rows: list[dict[str, Any]] = []
    for key, recipes in sorted(found.items(), key=lambda item: order.index(item[0][0])):
        target, model, runtime, says = key
        rows.append({"target": target, "model": model, "runtime": runtime, "says": says, "recipes": recipes,
                     "status": status[target], "first": all(row["target"] != target for row in rows)})  # fmt: skip
    return rows


def named(value: Any) -> list[tuple[str, str]]:
    """Return a mapping from a results file as (name, text) rows; anything else as one row without a name."""
    if isinstance(value, dict):
        return [(str(k).replace("_", " "), words(v)) for k, v in value.items() if v is not None]
    return [("", words(value))]


def words(value: Any) -> str:
    """Return a value of a results file as text: lists joined, nested mappings as 'name: value'."""
    if value is None:
        return "not recorded"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{k}: {words(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, list):
        return ", ".join(words(v) for v in value) or "none"
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def minute(time: str) -> str:
    """Return an ISO 8601 time to the minute: '2026-11-30T12:00:05Z' -> '2026-11-30 12:00 UTC'."""
    if len(time) >= 20 and time[10] == "T" and time.endswith(("Z", "+00:00")):
        return f"{time[:10]} {time[11:16]} UTC"
    return time


def host_line(host: Any) -> str:
    """Return a host in a few words: 'cpu name, 2 cores, 7.7 GiB, Linux'; anything else as it is."""
    if not isinstance(host, dict):
        return words(host)
    units = {"cpu": "{}", "gpu": "{}", "cores": "{} cores", "memory_gib": "{} GiB of memory", "os": "{}"}
    parts = [form.format(words(host[key])) for key, form in units.items() if host.get(key) is not None]
    if isinstance(host.get("gpus"), list):
        parts += [words(g.get("name")) if isinstance(g, dict) else words(g) for g in host["gpus"]] or ["no GPU"]
    return ", ".join(parts) or words(host)


def run_tasks(group: dict[str, Any]) -> list[str]:
    """Return the tasks that at least one cell has an accuracy for, in the order of params.yaml."""
    tasks = [(name, task) for cell in group["cells"] for name, task in cell["quality"]["tasks"].items()]
    return list(dict.fromkeys(name for name, task in tasks if task["accuracy"]["value"] is not None))


def other_tasks(group: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (task, reason) of each task that no cell has an accuracy for; cells without a file aside."""
    shown, rows = run_tasks(group), {}
    for cell in group["cells"]:
        for name, task in cell["quality"]["tasks"].items():
            if name not in shown and not cell["quality"]["problem"]:
                rows[name] = task["accuracy"]["not_measured"]
    return list(rows.items())


def _safe(drawn: dict[str, Any]) -> dict[str, Any]:
    """Mark the SVG texts as markup: figures.py made them, and escapes what it puts into attributes."""
    from markupsafe import Markup

    main = drawn["quality_speed"]
    return {
        "left_out": drawn["left_out"],
        "quality_speed": main and {k: Markup(v) for k, v in main.items()},
        "speed": [Markup(v) for v in drawn["speed"]],
        "size": drawn["size"] and Markup(drawn["size"]),
    }
