"""Files of a run on a target: what is there already, and what is packed to be brought home."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline import jsonio, manifest
from pipeline.errors import InputError, WorkError
from pipeline.on_target_order import FILE
from pipeline.plan import facts_path
from pipeline.runstage import STATE

# Where results lie, and stages of the lock that belong to no target.
PLACES = (("artifacts", "results"), ("artifacts", "packages"))
GENERAL = ("fetch", "calibrate")
# Raw files that a reader of results does not need, by the end of their names.
LOGS = ("*.log", "*.serve.yaml")
BULKY = (".npz", "inputs.json", ".parquet", "server_metrics_export.jsonl", ".raw.jsonl")


def keep(out: Path, target: str, models: Iterable[str] = (), with_raw: bool = True) -> None:
    """Pack a target's results into `out`: results.tar.gz is what git keeps, raw.tar.gz the logs and raw exports.

    Without `with_raw` only the small one: what can be done while something is timed.
    `models` were made on the target, so that their facts come home too; any other model's are those of its first fetch.
    """
    out.mkdir(parents=True, exist_ok=True)
    results = [*Path("artifacts/results").glob(f"*.{target}"), *Path("artifacts/packages").glob(f"*.{target}")]
    results += [p for m in models for p in (Path(facts_path(m)), *Path("calib_data").glob(f"*.{m}")) if p.exists()]
    results += [p for p in (Path(FILE).with_name("dvc.lock"), STATE / "times.jsonl") if p.exists()]
    raw = [p for p in Path("artifacts/raw").glob(f"*.{target}/**/*") if p.is_file() and not p.name.endswith(BULKY)]
    raw += [p for p in (STATE / "logs").glob("*.log")]
    # A stage that failed or was ended leaves its servers' logs where it worked: they say why.
    raw += [p for end in LOGS for p in (STATE / "scratch").glob(f"*.{target}/**/{end}") if p.is_file()]
    packs = {"results": results, "raw": raw}
    for name in packs if with_raw else ("results",):
        part = out / f".{name}.part"
        with tarfile.open(part, "w:gz", compresslevel=1) as tar:
            for path in sorted(set(packs[name])):
                tar.add(path)
        part.replace(out / f"{name}.tar.gz")


def bring_home(file: Path) -> list[str]:
    """Unpack a results.tar.gz into the current repository and return the paths that changed.

    The lock is merged, not replaced: stages of other targets stay as they are here, so that results of two hosts can be
    brought home in any order.

    Raises:
        InputError: no such file, no archive of results, or a path in it that results do not have.
    """
    if not file.is_file():
        raise InputError(f"There is no file {file}. `python -m pipeline on-target TARGET --out DIR` leaves it in DIR.")
    lock = Path(FILE).with_name("dvc.lock").as_posix()
    try:
        with tarfile.open(file) as tar:
            members = [m for m in tar.getmembers() if not m.isdir()]
            for member in members:
                if not member.isfile() or not _is_result(member.name, lock):
                    raise InputError(
                        f"{file} holds {member.name}, which is no result of a target; nothing was unpacked."
                    )
            found = {m.name: source.read() for m in members if (source := tar.extractfile(m))}
    except (tarfile.TarError, EOFError, OSError) as error:
        raise InputError(f"{file} is no whole archive of results: {error}. Copy it again.") from None
    if not found:
        raise InputError(f"{file} is empty: nothing was measured.")
    if lock in found:
        targets = {path.parts[2].rpartition(".")[2] for path in map(Path, found) if path.parts[:2] in PLACES}
        found[lock] = merged_lock(Path(lock), found[lock], targets)
    changed = [name for name, data in found.items() if not Path(name).is_file() or Path(name).read_bytes() != data]
    for name in changed:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        part = Path(name).with_name(f".{Path(name).name}.part")
        part.write_bytes(found[name])
        part.replace(name)
    return sorted(changed)


def merged_lock(here: Path, theirs: bytes, targets: Collection[str]) -> bytes:
    """Return this repository's dvc.lock with the archive's stages of `targets`, and its fetches and calibrations."""
    if not here.is_file():
        return theirs
    from dvc.utils import serialize  # it takes a second, and DVC's own writer keeps the file as DVC would write it

    own, new = (serialize.parse_yaml(text, here) for text in (here.read_text(encoding="utf-8"), theirs.decode()))
    for name, entry in new["stages"].items():
        kind, _, what = name.partition("@")
        if kind in GENERAL or what in targets or what.rpartition(".")[2] in targets:
            own["stages"][name] = entry
    return str(serialize.dumps_yaml(own)).encode()


def _is_result(name: str, lock: str) -> bool:
    path = Path(name)
    inside = not path.is_absolute() and ".." not in path.parts
    return inside and (
        name in (lock, (STATE / "times.jsonl").as_posix()) or path.parts[:2] in PLACES or path.parts[0] == "calib_data"
    )


def is_there(stage: str) -> bool:
    """Say whether what a fetch or calibrate stage makes is here, whatever made it.

    A model is, when it has the bytes that its facts name. A calibration set is, when it is in the tree: another
    Python's own texts would freeze it differently.
    """
    kind, _, name = stage.rpartition(":")[2].partition("@")
    if kind == "calibrate":
        return (Path("calib_data") / name / "tokens.json").exists()
    facts, folder = Path(facts_path(name)), Path("artifacts/models") / name
    return facts.exists() and folder.is_dir() and not manifest.differences(folder, jsonio.read_json(facts)["files"])


@contextmanager
def kept_facts(models: Iterable[str]) -> Iterator[None]:
    """Put the committed facts of models back after they were fetched again, when the bytes are the same.

    They also name the versions of the libraries that fetched, which differ here, and every stage's digest of its input
    would with them.

    Raises:
        WorkError: a model came out with other bytes than the committed ones.
    """
    before = {path: path.read_text(encoding="utf-8") for m in models if (path := Path(facts_path(m))).exists()}
    try:
        yield
    finally:
        # A fetch that failed has removed them.
        gone = {path: text for path, text in before.items() if not path.exists()}
        for path, text in gone.items():
            jsonio.write_text(path, text)
    for path, text in before.items():
        if path in gone:
            continue
        now, then = jsonio.read_json(path), json.loads(text)
        if now["files"] != then["files"]:
            other = [name for name in then["files"] if now["files"].get(name) != then["files"][name]]
            raise WorkError(f"{path.parent.name} was fetched here with other bytes than {path} says: {other[:5]}.")
        jsonio.write_text(path, text)
