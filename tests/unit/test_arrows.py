"""The import arrows of design: stages -> pipeline -> light libraries, and never back or across."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {
    "torch",
    "transformers",
    "vllm",
    "datasets",
    "modelopt",
    "llmcompressor",
    "gptqmodel",
    "lm_eval",
    "aiperf",
}


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def _files(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*.py") if ".venv" not in p.parts)


@pytest.mark.parametrize("path", _files("pipeline"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_core_imports_no_backend_and_no_stage(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports(path)}
    assert not tops & HEAVY
    assert "stages" not in tops


@pytest.mark.parametrize("path", _files("stages"), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_stage_imports_no_other_stage(path: Path) -> None:
    mine = path.relative_to(ROOT).parts[1]
    assert {n.split(".")[1] for n in imports(path) if n.startswith("stages.")} <= {mine}


def test_the_detector_sees_an_import_inside_a_function(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("def f():\n    from torch import nn\n    import stages.client.evaluate\n", "utf-8")
    assert imports(tmp_path / "x.py") == {"torch", "stages.client.evaluate"}


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['pipeline', '--help']\n"
        "from pipeline.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(done.stderr.strip().splitlines()[-1]))
    assert not loaded & (HEAVY | {"pydantic", "yaml", "numpy", "scipy", "matplotlib", "jinja2"})


def test_no_file_is_past_400_lines() -> None:
    long = {str(p.relative_to(ROOT)): n for f in ("pipeline", "stages", "tests") for p in _files(f)
            if (n := len(p.read_text(encoding="utf-8").splitlines())) > 400}  # fmt: skip
    assert long == {}


def test_no_two_test_modules_share_a_name() -> None:
    """pytest imports a test by its bare name: two of one name stop `pytest` as a whole, and not each layer alone."""
    names = Counter(p.name for p in _files("tests") if p.name not in {"conftest.py", "__init__.py"})
    assert {name: n for name, n in names.items() if n > 1} == {}


def test_the_same_torch_in_every_cpu_environment() -> None:
    found = {}
    for lock in sorted((ROOT / "stages").glob("*/uv.lock")):
        text = lock.read_text(encoding="utf-8")
        if '\nname = "torch"\nversion = "' in text:
            found[lock.parent.name] = text.split('\nname = "torch"\nversion = "')[1].split('"')[0]
    assert found.pop("vllm_cuda") == "2.11.0"  # what vLLM pins; a GPU host's own torch comes before ours
    assert found.pop("autoawq") == "2.6.0"  # archived; it never ran with a newer one
    assert set(found.values()) == {"2.13.0"}, found
    assert "client" not in found
