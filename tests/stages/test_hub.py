"""The hf: source against a hub on loopback: the real client, a pinned commit, resume, tokens, no pickles."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.stages
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secretsecretsecret"


class Hub:
    """A hub with one repository; `cut_after` makes it drop the connection once, that many bytes into the weights."""

    def __init__(self, folder: Path, cut_after: int | None = None) -> None:
        self.folder, self.cut_after = folder, cut_after
        self.ranges: list[str] = []
        self.tokens: set[str | None] = set()
        self.paths: list[str] = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, request: http.server.BaseHTTPRequestHandler, body: bool) -> None:
        path = request.path.partition("?")[0]
        self.paths.append(path)
        self.tokens.add(request.headers.get("Authorization"))
        if "/tree/" in path:
            tree = [
                {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40}
                for p in sorted(self.folder.iterdir())
            ]
            self._send(request, 200, json.dumps(tree).encode(), {}, body)
            return
        if path.startswith("/api/models/"):
            files = [{"rfilename": p.name, "size": p.stat().st_size} for p in sorted(self.folder.iterdir())]
            self._send(
                request, 200, json.dumps({"id": "org/name", "sha": COMMIT, "siblings": files}).encode(), {}, body
            )
            return
        file = self.folder / path.rsplit("/", 1)[-1]
        if not file.is_file() or COMMIT not in path:
            self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            return
        data = file.read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = 0
        if wanted := request.headers.get("Range"):
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            if body:
                self.ranges.append(wanted)
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = self.cut_after if body and file.suffix == ".safetensors" and not start else None
        self._send(request, 206 if start else 200, data[start:], headers, body, cut)

    def _send(
        self,
        request: http.server.BaseHTTPRequestHandler,
        code: int,
        data: bytes,
        headers: dict[str, str],
        body: bool,
        cut: int | None = None,
    ) -> None:
        request.send_response(code)
        for key, value in (headers | {"Content-Length": str(len(data))}).items():
            request.send_header(key, value)
        request.end_headers()
        if body:
            request.wfile.write(data[:cut])
            request.wfile.flush()
        if cut is not None:
            request.close_connection = True
            request.connection.close()


@pytest.fixture
def repository(workspace, fetched, tmp_path: Path) -> Path:  # type: ignore[no-untyped-def]
    """A repository with a cut-down real model, a pickle and a script beside it."""
    from tests.stages.test_backends import cut

    folder = tmp_path / "repository"
    cut(fetched, folder, layers=1)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04never read")
    (folder / "modeling_x.py").write_text("raise SystemExit('remote code ran')\n")
    return folder


@pytest.fixture
def hub_model(workspace) -> Iterator[str]:  # type: ignore[no-untyped-def]
    """A model `hub` in params.yaml at the commit."""
    path = workspace.path / "params.yaml"
    text = path.read_text()
    raw = yaml.safe_load(text)
    raw["models"]["hub"] = {"source": f"hf:org/name@{COMMIT}", "instruct": False}
    path.write_text(yaml.safe_dump(raw))
    yield "hub"
    path.write_text(text)


def _fetch(workspace, hub: Hub, monkeypatch: pytest.MonkeyPatch, **env: str):  # type: ignore[no-untyped-def]
    for key, value in {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", **env}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return workspace.run("pipeline", "run", "source", "fetch", "--model", "hub", check=False)


def test_a_pinned_commit_is_fetched_without_pickles_or_code(
    workspace, repository: Path, hub_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    hub = Hub(repository)
    done = _fetch(workspace, hub, monkeypatch, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    folder = workspace.path / "artifacts/models/hub"
    assert (folder / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
    assert not list(folder.glob("*.bin")) + list(folder.glob("*.py"))
    record = json.loads((workspace.path / "artifacts/results/hub/model.json").read_text())
    assert record["revision"] == COMMIT
    assert record["trust_remote_code"] is False
    assert f"Bearer {TOKEN}" in hub.tokens
    for path in [*(workspace.path / "artifacts").rglob("*"), *(workspace.path / ".quantpress").rglob("*")]:
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path


def test_a_broken_download_resumes(
    workspace, repository: Path, hub_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    hub = Hub(repository, cut_after=12_000_000)
    done = _fetch(workspace, hub, monkeypatch)
    if done.returncode != 0:
        assert "Run it again; it resumes." in done.stderr
        done = _fetch(workspace, hub, monkeypatch)
    assert done.returncode == 0, done.stderr
    assert hub.ranges
    assert not any(wanted.startswith("bytes=0-") for wanted in hub.ranges)
    folder = workspace.path / "artifacts/models/hub"
    assert (folder / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()


def test_a_repository_of_pickles_is_refused_before_anything_is_read(
    workspace, repository: Path, hub_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    (repository / "model.safetensors").unlink()
    hub = Hub(repository)
    done = _fetch(workspace, hub, monkeypatch)
    assert done.returncode == 2
    assert "has no safetensors file" in done.stderr
    assert all(path.startswith("/api/") for path in hub.paths)
