"""Manifests: sha256 and size of every file, written last, so that a manifest means a whole artifact."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline import jsonio
from pipeline.errors import InputError, WorkError

NAME = "manifest.json"


def sha256(path: Path) -> str:
    """Return the hex sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def describe(folder: Path) -> dict[str, dict[str, Any]]:
    """Return `{relative path: {sha256, bytes}}` of every file under `folder`, sorted, without its manifest."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / NAME)
    # hashlib lets other threads run, and a large checkpoint has many shards.
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(sha256, files))
    return {
        p.relative_to(folder).as_posix(): {"sha256": digest, "bytes": p.stat().st_size}
        for p, digest in zip(files, digests, strict=True)
    }


def digest(files: dict[str, dict[str, Any]]) -> str:
    """Return one digest of a described folder: it changes when any name, size or byte changes."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def differences(folder: Path, files: dict[str, dict[str, Any]]) -> list[str]:
    """Compare `folder` with `files`; return one sentence for each missing, extra, truncated or changed file."""
    found = []
    # Only what can still be equal is read.
    same = [n for n, want in files.items() if (p := folder / n).is_file() and p.stat().st_size == want["bytes"]]
    with ThreadPoolExecutor() as pool:
        digests = dict(zip(same, pool.map(lambda name: sha256(folder / name), same), strict=True))
    for name, want in files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing")
        elif path.stat().st_size != want["bytes"]:
            found.append(f"{path} has {path.stat().st_size} bytes, the manifest says {want['bytes']}")
        elif digests[name] != want["sha256"]:
            found.append(f"{path} has other bytes than the manifest's sha256 {want['sha256'][:12]}...")
    have = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p != folder / NAME}
    found += [f"{folder / name} is not in the manifest" for name in sorted(have - set(files))]
    return found


def verify(package: Path, root: Path | None = None) -> dict[str, Any]:
    """Check a package and the checkpoint that it refers to; return its manifest.

    `root` is the folder that the checkpoint's path starts from; without one it is the folder above `artifacts/` in the
    package's own path, so that a copied tree verifies anywhere.

    Raises:
        InputError: no manifest, so not a whole package.
        WorkError: a file is missing, extra or different; the message names each one.
    """
    if (package / "deploy" / NAME).is_file():
        package = package / "deploy"
    path = package / NAME
    if not path.is_file():
        raise InputError(
            f"{package} has no {NAME}: it is no package, or its making was cut off. Run `uv run dvc repro`."
        )
    manifest = jsonio.read_json(path)
    if not isinstance(manifest, dict) or not _is_files(manifest.get("files")) or not _is_checkpoint(manifest):
        raise InputError(f"{path} is no package manifest. Make the package again: `uv run dvc repro`.")
    root = root or next((p.parent for p in package.resolve().parents if p.name == "artifacts"), Path("."))
    wrong = differences(package, manifest["files"])
    checkpoint = root / manifest["checkpoint"]["path"]
    if not checkpoint.is_dir():
        wrong.append(f"the checkpoint {checkpoint} is missing (pull it, or run `uv run dvc repro`)")
    else:
        wrong += differences(checkpoint, manifest["checkpoint"]["files"])
    if wrong:
        said = "; ".join(wrong[:10]).replace(f"{root}/", "")
        raise WorkError(f"{package} is not what its manifest says: {said}. Make it again: `uv run dvc repro`.")
    return dict(manifest)


def _is_files(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(v, dict) and {"sha256", "bytes"} <= set(v) for v in value.values()
    )


def _is_checkpoint(manifest: dict[str, Any]) -> bool:
    found = manifest.get("checkpoint")
    return isinstance(found, dict) and isinstance(found.get("path"), str) and _is_files(found.get("files"))
