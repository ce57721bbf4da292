"""Read the documents of a calibration or held-out set from where it is pinned."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import re
import zlib
from pathlib import Path

from pipeline import manifest
from pipeline.calibration import Document, paragraphs
from pipeline.errors import HostError, InputError
from pipeline.sources import Source
from pipeline.specs import CalibSet


def read_documents(spec: CalibSet) -> tuple[list[Document], dict[str, str]]:
    """Return the documents of every source in order, and `{source: revision}`.

    Raises:
        InputError: a source is missing, empty or of an unknown form.
    """
    documents: list[Document] = []
    revisions: dict[str, str] = {}
    for text in spec.sources:
        found, revision = READERS[Source.parse(text).kind](Source.parse(text), spec)
        if not found:
            raise InputError(f"Source '{text}' holds no text.")
        documents += found
        revisions[text] = revision
    return documents, revisions


def read_stdlib(source: Source, spec: CalibSet) -> tuple[list[Document], str]:
    """Read a module of Python that is documentation: `pydoc_data.topics` holds the language reference (PSF licence)."""
    module = importlib.import_module(source.name)
    topics: dict[str, str] = module.topics
    # Calibration and held-out sets may share this source, never a document of it: a hash of the title decides.
    mine = {k: v for k, v in sorted(topics.items()) if (zlib.crc32(k.encode()) % 4 == 0) == (spec.split == "held-out")}
    found = [Document(title=f"Python's {name}", text=paragraphs(text)) for name, text in mine.items()]
    return [d for d in found if len(d.text) > 200], f"python {platform.python_version()}"


def read_package(source: Source, spec: CalibSet) -> tuple[list[Document], str]:
    """Read text files of a locked dependency by glob."""
    dist = importlib.metadata.distribution(source.name)
    found = []
    for file in sorted(dist.files or [], key=str):
        if file.match(str(source.file)):
            text = Path(str(dist.locate_file(file))).read_text(encoding="utf-8")
            found.append(Document(title=f"the data set {file.stem.replace('_', ' ')}", text=paragraphs(text)))
    return found, f"{source.name}=={dist.version}"


def read_file(source: Source, spec: CalibSet) -> tuple[list[Document], str]:
    """Read a local text file (paragraph groups) or JSONL (one document a line, key `text_column`)."""
    path = Path(source.name)
    if not path.is_file():
        raise InputError(f"Calibration file {path} is missing.")
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix == ".jsonl":
        found = []
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    found.append(Document(title=f"{path.stem} {number}", text=json.loads(line)[spec.text_column]))
                except (json.JSONDecodeError, KeyError, TypeError) as error:
                    raise InputError(
                        f"{path} line {number}: no JSON with the key '{spec.text_column}' ({error})."
                    ) from None
    else:
        blocks = [b for b in re.split(r"\n\s*\n", "\n".join(lines)) if b.strip()]
        # Eight paragraphs make a document, so that one file has documents for both plain and chat rows.
        groups = ["\n\n".join(blocks[i : i + 8]) for i in range(0, len(blocks), 8)]
        found = [Document(title=f"{path.stem} {n}", text=text) for n, text in enumerate(groups, 1)]
    return found, f"sha256:{manifest.sha256(path)}"


def read_hf(source: Source, spec: CalibSet) -> tuple[list[Document], str]:
    """Read a hub data set at a pinned commit (split `train`, at most four documents a wanted sample)."""
    from datasets import load_dataset

    try:
        stream = load_dataset(source.name, revision=source.revision, split="train", streaming=True)
        rows = list(stream.take(4 * spec.samples))
    except Exception as error:
        raise HostError(f"The data set {source.name}@{str(source.revision)[:12]} cannot be read: {error}.") from None
    if rows and spec.text_column not in rows[0]:
        raise InputError(f"{source.name} has no column '{spec.text_column}'. Columns: {', '.join(rows[0])}.")
    found = [Document(title=f"{source.name} {i}", text=str(row[spec.text_column])) for i, row in enumerate(rows)]
    return found, str(source.revision)


READERS = {"stdlib": read_stdlib, "package": read_package, "file": read_file, "hf": read_hf}
