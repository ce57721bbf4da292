"""Results of a git revision, or of the working tree, read without checking anything out."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, WorkError

RESULTS = "artifacts/results"


class Revision:
    """One state of the repository; `name` None is the working tree."""

    def __init__(self, root: Path, name: str | None) -> None:
        """Resolve a revision.

        Raises:
            InputError: git knows no such revision.
        """
        self.root, self.name = root, name
        self.commit: str | None = None
        if name is not None:
            self.commit = git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
            if self.commit is None:
                raise InputError(f"git knows no revision '{name}'. `git tag` and `git log --oneline` list some.")

    def __str__(self) -> str:
        return "the working tree" if self.name is None else f"{self.name} ({(self.commit or '')[:10]})"

    def cells(self) -> list[str]:
        """Return the cells that have results here."""
        if self.commit is None:
            return sorted(p.name for p in (self.root / RESULTS).glob("*.*.*.*") if p.is_dir())
        listed = git(self.root, "ls-tree", "--name-only", self.commit, f"{RESULTS}/") or ""
        names = [line.rsplit("/", 1)[-1] for line in listed.splitlines()]
        return sorted(name for name in names if name.count(".") == 3)

    def read(self, path: str) -> dict[str, Any] | None:
        """Return a JSON file of the repository as it was, or None where it was not.

        Raises:
            WorkError: it is there and is no JSON object.
        """
        if self.commit is None:
            file = self.root / path
            text = file.read_text(encoding="utf-8") if file.is_file() else None
        else:
            text = git(self.root, "show", f"{self.commit}:{path}")
        if text is None:
            return None
        try:
            data = json.loads(text)
        except ValueError as error:
            raise WorkError(f"{path} of {self} is not valid JSON ({error}).") from None
        return data if isinstance(data, dict) else None


def git(root: Path, *arguments: str) -> str | None:
    """Return what a git command prints, or None when it fails."""
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    return done.stdout.strip() if done.returncode == 0 else None


def tags(root: Path) -> list[str]:
    """Return the tags that hold results, oldest first."""
    listed = git(root, "tag", "--sort=creatordate", "--merged", "HEAD") or ""
    found = []
    for tag in listed.splitlines():
        if git(root, "ls-tree", "--name-only", tag, f"{RESULTS}/"):
            found.append(tag)
    return found
