"""Whether two results may be compared: the same definitions, host, versions, workload and settings. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

# What of a host must be equal for timings. `machine` is a hash: another machine of the same kind is another host.
HOST_FIELDS = ("cpu", "cores", "memory_gib", "os", "machine")
WORKLOAD_FIELDS = ("prompt_tokens", "output_tokens", "mix", "streaming", "against", "order")


class Difference(NamedTuple):
    """One field that differs; `kind` is definition, host, version, workload or settings."""

    kind: str
    field: str
    old: Any
    new: Any

    def words(self) -> str:
        """Return it as text."""
        return f"{self.field}: {_short(self.old)} against {_short(self.new)}"


def _short(value: Any) -> str:
    text = "not recorded" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def speed_differences(old: dict[str, Any], new: dict[str, Any]) -> list[Difference]:
    """Return every field for which two bench.json must not be compared."""
    found = definition_differences(old, new) + host_differences(old, new) + version_differences(old, new)
    for name in sorted(set(old.get("workloads", {})) & set(new.get("workloads", {}))):
        one, two = old["workloads"][name], new["workloads"][name]
        found += [
            Difference("workload", f"workloads.{name}.{field}", one.get(field), two.get(field))
            for field in WORKLOAD_FIELDS
            if one.get(field) != two.get(field)
        ]
    names = [sorted(doc.get("workloads", {})) for doc in (old, new)]
    return found if set(names[0]) & set(names[1]) else [*found, Difference("workload", "workloads", *names)]


def definition_differences(old: dict[str, Any], new: dict[str, Any]) -> list[Difference]:
    """Return the metrics whose definition ids differ; results from before ids were written have their text's id."""
    one, two = _ids(old), _ids(new)
    return [
        Difference("definition", f"definitions.{name}", one.get(name), two.get(name))
        for name in sorted(one.keys() | two.keys())
        if one.get(name) != two.get(name)
    ]


def _ids(bench: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in (bench.get("definitions") or {}).items():
        found[name] = value.get("id") if isinstance(value, dict) else str(value).split(":", 1)[0]
    return found


def host_differences(old: dict[str, Any], new: dict[str, Any]) -> list[Difference]:
    """Return the facts of the host that differ."""
    one, two = old.get("host") or {}, new.get("host") or {}
    found = [
        Difference("host", f"host.{field}", one.get(field), two.get(field))
        for field in HOST_FIELDS
        if one.get(field) != two.get(field)
    ]
    names = [[g.get("name") if isinstance(g, dict) else g for g in h.get("gpus") or []] for h in (one, two)]
    return found if names[0] == names[1] else [*found, Difference("host", "host.gpus", *names)]


def version_differences(old: dict[str, Any], new: dict[str, Any]) -> list[Difference]:
    """Return the versions and settings of engine and client that differ; what an upgrade changes on purpose."""
    found = []
    for field in ("runtime", "version"):
        one, two = (_server(doc).get(field) for doc in (old, new))
        if one != two:
            found.append(Difference("version", f"server.{field}", one, two))
    env = str(_server(new).get("environment"))
    for name, kind in ((env, "version"), ("client", "version")):
        one, two = ((doc.get("locks") or {}).get(name) for doc in (old, new))
        if one != two:
            found.append(Difference(kind, f"locks.{name}", one, two))
    one, two = ((doc.get("client") or {}) for doc in (old, new))
    if one and two and one.get("tool") != two.get("tool"):
        found.append(Difference("version", "client.tool", one.get("tool"), two.get("tool")))
    if _server(old).get("threads") != _server(new).get("threads"):
        found.append(Difference("settings", "server.threads", _server(old).get("threads"), _server(new).get("threads")))
    return found


def _server(doc: dict[str, Any]) -> dict[str, Any]:
    server = doc.get("server") or {}
    inner = server.get("candidate")
    return inner if isinstance(inner, dict) else server
