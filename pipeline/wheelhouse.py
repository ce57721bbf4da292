"""Pack locked environments for a machine without a network: wheels, checksums, an install script.

Many GPU clusters reach no package index. The lock says which wheels an environment is made of; this module takes those
that fit the other machine's Python and glibc, leaves out what it has already, and cuts the rest into parts small enough
to travel. Nothing is resolved anew: every version is the lock's, and pip checks every download against its hash.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import platform
import re
import shlex
import shutil
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from pipeline import jsonio
from pipeline.errors import HostError, InputError, WorkError, unknown
from pipeline.manifest import sha256
from pipeline.runstage import child_env, environments, installation_digest

CORE = "core"
TEMPLATE = Path(__file__).with_name("wheelhouse_install.sh")
SCHEMA = "quantpress.wheelhouse/1"
PIP = "26.2"
# glibc 2.5 is what manylinux1 means, the oldest that any wheel names (PEP 513, PEP 600).
OLDEST_GLIBC = 5
LEGACY = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}


class Pinned(NamedTuple):
    """One package of a lock: canonical name, exact version, the sha256 of every file that may stand for it."""

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def line(self) -> str:
        """The requirement as pip reads it, with its hashes."""
        return " ".join([f"{self.name}=={self.version}", *(f"--hash=sha256:{h}" for h in self.hashes)])


class Division(NamedTuple):
    """What travels, what the host has (name -> how it differs from the lock), what stays behind (name -> reason)."""

    pack: list[Pinned]
    from_host: dict[str, str]
    left_out: dict[str, str]


class Machine(NamedTuple):
    """The x86-64 Linux that installs: its Python (`3.12`) and its glibc's minor version (`28` for 2.28)."""

    python: str
    glibc: int

    def markers(self) -> dict[str, str]:
        """Return the environment for PEP 508 markers; pip would take the one of the Python that runs it."""
        return {
            "implementation_name": "cpython", "implementation_version": f"{self.python}.0", "os_name": "posix",
            "platform_machine": "x86_64", "platform_python_implementation": "CPython", "platform_system": "Linux",
            "python_full_version": f"{self.python}.0", "python_version": self.python, "sys_platform": "linux",
            "platform_release": "", "platform_version": "", "extra": "",
        }  # fmt: skip

    def pip_options(self) -> list[str]:
        """Return pip's options for this machine; pip matches each platform tag exactly, so all of them are named."""
        tags = [f"manylinux_2_{minor}_x86_64" for minor in range(self.glibc, OLDEST_GLIBC - 1, -1)]
        tags += [f"{name}_x86_64" for minor, name in LEGACY.items() if minor <= self.glibc] + ["linux_x86_64"]
        chosen = [f"--platform={tag}" for tag in tags]
        return [*chosen, f"--python-version={self.python}", "--implementation=cp", "--only-binary=:all:"]


def folder_of(env: str) -> Path:
    """Return the project folder of an environment; `core` is the repository itself.

    Raises:
        InputError: no such environment.
    """
    if env == CORE:
        return Path(".")
    if env not in environments():
        raise unknown("environment", env, [CORE, *environments()], "stages/")
    return Path("stages") / env


def read_export(text: str, machine: Machine) -> list[Pinned]:
    """Read what `uv export` prints and keep what the machine's markers let through."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        spec, *hashes = line.split("--hash=")
        if not spec.strip() or spec.lstrip().startswith(("#", "-")):
            continue
        wanted = Requirement(spec.strip())
        if wanted.marker and not wanted.marker.evaluate(machine.markers()):
            continue
        version = str(next(iter(wanted.specifier)).version)
        digests = tuple(sorted(h.strip().removeprefix("sha256:") for h in hashes))
        found.append(Pinned(canonicalize_name(wanted.name), version, digests))
    return found


def read_have(text: str) -> dict[str, str | None]:
    """Read `pip freeze` or `pip list --format=freeze`; a bare name is a package of unknown version.

    Raises:
        InputError: a line is neither.
    """
    found: dict[str, str | None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line or line.startswith("-"):
            continue
        match = re.fullmatch(r"([A-Za-z0-9][\w.-]*)(?:==(\S+)| @ \S+)?", line)
        if match is None:
            raise InputError(
                f"Line {number} of the --have file is '{line[:60]}', not name==version. "
                "Write it on the other machine with `pip list --format=freeze`."
            )
        found[canonicalize_name(match[1])] = match[2]
    return found


def divide(pinned: list[Pinned], have: dict[str, str | None], options: dict[str, Any]) -> Division:
    """Divide an environment's packages; `options` is `[tool.quantpress]` of its pyproject.toml.

    The host's package counts when it has the lock's version (a local part such as +cu130 apart), when its version is
    not known, or when `host-wins` names it: a GPU machine's torch fits its driver, and is the one that travels worst.
    """
    leave_out, wins = dict(options.get("leave-out", {})), list(options.get("host-wins", []))
    pack, from_host, left_out = [], {}, {}
    for package in pinned:
        reason = next((why for name, why in leave_out.items() if fnmatch.fnmatchcase(package.name, name)), None)
        if reason:
            left_out[package.name] = f"{package.version}: {reason}"
        elif package.name in have and _host_serves(package, have[package.name], wins):
            theirs = have[package.name] or "unknown version"
            from_host[package.name] = f"{theirs} on the host, {package.version} in the lock"
        else:
            pack.append(package)
    return Division(pack, from_host, left_out)


def _host_serves(package: Pinned, theirs: str | None, wins: list[str]) -> bool:
    if theirs is None or any(fnmatch.fnmatchcase(package.name, name) for name in wins):
        return True
    return Version(theirs).public == Version(package.version).public


def export(env: str, machine: Machine) -> list[Pinned]:
    """Return the packages of an environment's lock for a machine.

    Raises:
        InputError: the lock is for another Python.
        WorkError: uv could not read it.
    """
    folder = folder_of(env)
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = str(project.get("requires-python", ""))
    if wanted and not Requirement(f"python{wanted}").specifier.contains(f"{machine.python}.0"):
        raise InputError(f"{folder}/pyproject.toml is for Python {wanted}; the wheelhouse is for {machine.python}.")
    command = ["export", "--frozen", "--no-dev", "--no-emit-project", "--no-header", "--no-annotate"]
    return read_export(_run([_uv(), *command, "--project", str(folder)], f"uv export of {env}"), machine)


def fetch(packages: list[Pinned], machine: Machine, out: Path) -> None:
    """Download the wheel of each package into `out`; what exists only as source is built here, by that Python.

    Raises:
        WorkError: a download or build failed, a hash differs, or what was built here is for a newer glibc.
    """
    out.mkdir(parents=True, exist_ok=True)
    source_only = _source_only(packages)
    drop_damaged([p for p in packages if p.name not in source_only], out)
    have = {wheel_key(p.name) for p in out.glob("*.whl")}
    missing = [p for p in packages if (p.name, p.version) not in have]
    wheels = [p for p in missing if p.name not in source_only]
    common = ["--no-deps", "--require-hashes", "--quiet", "--disable-pip-version-check"]
    for command, options, chosen in (
        ("download", [*common, *machine.pip_options(), "--dest", str(out)], wheels),
        ("wheel", [*common, "--wheel-dir", str(out)], [p for p in missing if p.name in source_only]),
    ):
        if not chosen:
            continue
        wanted = out / "requirements.tmp"
        wanted.write_text("\n".join(p.line for p in chosen) + "\n", encoding="utf-8")
        try:
            _run([*_pip(machine), command, *options, "-r", str(wanted)], f"pip {command}")
        finally:
            wanted.unlink(missing_ok=True)
    newer = glibc_here() > machine.glibc
    for path in out.glob("*.whl"):
        name, version = wheel_key(path.name)
        if newer and name in source_only and not path.name.endswith("-none-any.whl"):
            path.unlink()
            raise WorkError(
                f"{name} {version} has no wheel and was compiled for this machine's glibc 2.{glibc_here()}; the other "
                f"has 2.{machine.glibc}. Put it under leave-out of the environment's [tool.quantpress], or pack it "
                "on an older system."
            )


def drop_damaged(packages: list[Pinned], out: Path) -> None:
    """Delete wheels of an earlier call whose bytes are not the lock's: a download cut off, or a changed file."""
    hashes = {_key(p): p.hashes for p in packages}
    for path in out.glob("*.whl"):
        allowed = hashes.get(wheel_key(path.name))
        if allowed is not None and sha256(path) not in allowed:
            path.unlink()


def glibc_here() -> int:
    """Return the minor version of this machine's glibc, or a number above any where it has none."""
    name, version = platform.libc_ver()
    return int(version.split(".")[1]) if name == "glibc" and version.startswith("2.") else 1000


def wheel_key(filename: str) -> tuple[str, str]:
    """Return the canonical name and version that a wheel's file name states."""
    name, version, _, _ = parse_wheel_filename(filename)
    return str(name), str(version)


def _source_only(packages: list[Pinned]) -> set[str]:
    """Return the packages that no lock has a wheel of."""
    wanted = {(p.name, p.version) for p in packages}
    wheels: dict[str, bool] = {}
    for lock in [Path("uv.lock"), *Path("stages").glob("*/uv.lock")]:
        for entry in tomllib.loads(lock.read_text(encoding="utf-8"))["package"]:
            if (entry["name"], entry.get("version")) in wanted:
                wheels[entry["name"]] = wheels.get(entry["name"], False) or bool(entry.get("wheels"))
    return {name for name, has in wheels.items() if not has}


def pack(envs: list[str], machine: Machine, have: dict[str, str | None], split_bytes: int, out: Path) -> dict[str, Any]:
    """Write the wheelhouse of some environments into `out` and return its description (wheelhouse.json).

    `out` gets wheelhouse.tar.NNN of at most `split_bytes`, SHA256SUMS, install.sh and wheelhouse.json. Wheels stay in
    `out`/../wheels-<python>-glibc-<version>, so that a second call downloads nothing twice.
    """
    record: dict[str, Any] = {"schema": SCHEMA, **machine._asdict(), "environments": {}}
    cache = out.parent / f"wheels-{machine.python}-glibc-2.{machine.glibc}"
    divisions = {env: divide(export(env, machine), have, _options(env)) for env in envs}
    for division in divisions.values():
        fetch(division.pack, machine, cache)
    wheels = {wheel_key(p.name): p for p in cache.glob("*.whl")}
    shutil.rmtree(out, ignore_errors=True)
    chosen: dict[str, Path] = {}
    for env, division in divisions.items():
        mine = [wheels[_key(p)] for p in division.pack]
        chosen |= {path.name: path for path in mine}
        record["environments"][env] = {
            "folder": folder_of(env).as_posix(),
            "digest": installation_digest(folder_of(env)),
            "wheels": sorted(path.name for path in mine),
            "from_host": division.from_host,
            "left_out": division.left_out,
        }
    record["wheels"] = {name: {"sha256": sha256(p), "bytes": p.stat().st_size} for name, p in sorted(chosen.items())}
    out.mkdir(parents=True, exist_ok=True)
    jsonio.write_json(out / "wheelhouse.json", record)
    whole = out / "wheelhouse.tar"
    with tarfile.open(whole, "w") as tar:
        for name, path in sorted(chosen.items()):
            tar.add(path, f"wheels/{name}")
    parts = split(whole, split_bytes)
    whole.unlink()
    jsonio.write_text(out / "install.sh", install_script(record))
    (out / "install.sh").chmod(0o755)
    files = [*parts, out / "install.sh", out / "wheelhouse.json"]
    jsonio.write_text(out / "SHA256SUMS", "".join(f"{sha256(p)}  {p.name}\n" for p in files))
    return record | {"parts": len(parts)}


def _key(package: Pinned) -> tuple[str, str]:
    return package.name, str(Version(package.version))


def _options(env: str) -> dict[str, Any]:
    """Return `[tool.quantpress]` of an environment's pyproject.toml."""
    read = tomllib.loads((folder_of(env) / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(read.get("tool", {}).get("quantpress", {}))


def split(whole: Path, part_bytes: int) -> list[Path]:
    """Cut a file into `<name>.000`, `<name>.001`, ... of at most `part_bytes`."""
    parts = []
    with whole.open("rb") as file:
        for number, block in enumerate(_blocks(file, part_bytes)):
            parts.append(whole.with_name(f"{whole.name}.{number:03}"))
            parts[-1].write_bytes(block)
    return parts


def _blocks(file: Any, size: int) -> Iterator[bytes]:
    while block := file.read(size):
        yield block


def install_script(record: dict[str, Any]) -> str:
    """Return install.sh: the template with one line per environment; it needs sh, sha256sum, tar and a Python."""
    calls = []
    for env, entry in record["environments"].items():
        note = {key: entry[key] for key in ("from_host", "left_out")} | {"wheelhouse": record_digest(record)}
        shared = "yes" if entry["from_host"] else "no"
        fixed = json.dumps(note, sort_keys=True)
        words = [env, entry["folder"], entry["digest"], shared, shlex.quote(fixed), *entry["wheels"]]
        calls.append(f'environment {" ".join(words)} & jobs="$jobs $!"')
    text = TEMPLATE.read_text(encoding="utf-8")
    return text.replace("@PYTHON@", record["python"]).replace("@ENVIRONMENTS@", "\n".join(calls))


def record_digest(record: dict[str, Any]) -> str:
    """Return a digest of what a wheelhouse installs, for the note that it leaves in each environment."""
    return hashlib.sha256(json.dumps(record["wheels"], sort_keys=True).encode()).hexdigest()


def parse_size(text: str) -> int:
    """Read a size such as 60M (10^6 bytes) or 500K.

    Raises:
        InputError: another form, or nothing.
    """
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper().removesuffix("B"))
    size = int(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[match[2]] if match else 0
    if size <= 0:
        raise InputError(f"--split {text!r} is no size; write for instance 60M (60,000,000 bytes).")
    return size


def _uv() -> str:
    uv = shutil.which("uv")
    if uv is None:
        raise HostError("`uv` is not on PATH; it reads the locks. Run `pip install uv`.")
    return uv


def _pip(machine: Machine) -> list[str]:
    """Return the command of a pip that runs on the other machine's Python version, so that what it builds fits."""
    return [_uv(), "tool", "run", "--python", machine.python, f"pip@{PIP}"]


def _run(command: list[str], what: str) -> str:
    # A constraint file of this machine says what suits this machine, not the one that installs.
    env = child_env(PIP_CONSTRAINT="")
    done = subprocess.run(command, capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()][-3:]
        raise WorkError(f"{what} failed: {' '.join(said)[:600]}")
    return done.stdout
