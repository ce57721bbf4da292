"""The support matrix: what the files may hold, what a lookup says, what is printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.cli import main
from pipeline.errors import InputError
from pipeline.formats import FORMATS
from pipeline.params import load_params
from pipeline.specs import Target
from pipeline.support import runtimes, show, verdict
from pipeline.support.table import DEVICES, VERDICTS, Table, tables

ROOT = Path(__file__).parents[2]
KV = ("kv-bf16", "kv-fp8", "kv-int8", "kv-nvfp4")


def gpu(sm: int) -> Target:
    return Target(device="cuda", gpu="x", sm=sm, memory_gib=80)


CPU = Target(device="cpu")


def test_the_runtimes_and_formats_of_the_project_are_there() -> None:
    assert runtimes() == ["trtllm-bundle", "trtllm-engine", "vllm"]
    for table in tables().values():
        assert {row.format for row in table.rows} == {*FORMATS, *KV}


def test_every_target_of_the_project_has_a_column() -> None:
    targets = load_params(ROOT / "params.yaml").targets
    assert {show.device_named(name, targets) for name in targets} == set(DEVICES)


@pytest.mark.parametrize("runtime", ["vllm", "trtllm-engine", "trtllm-bundle"])
def test_every_entry_cites_a_source_and_says_why(runtime: str) -> None:
    table = tables()[runtime]
    used = set()
    for row in table.rows:
        for device in DEVICES:
            entry = table.entry(row, device)
            assert entry.reason, (row.name, device)
            assert entry.sources, (row.name, device)
            assert entry.verdict in VERDICTS
            if entry.verdict == "fallback":
                assert re.search(r"stored in .+, computed in .+", entry.reason), entry
            used |= set(entry.sources)
    assert used == set(table.sources.values()), set(table.sources.values()) - used


@pytest.mark.parametrize("runtime", ["vllm", "trtllm-engine", "trtllm-bundle"])
def test_no_two_rows_answer_the_same_question(runtime: str) -> None:
    seen: dict[tuple[str, str, str], str] = {}
    for row in tables()[runtime].rows:
        for method in row.methods or ["rtn", "gptq", "awq"]:
            for layout in row.layouts or ["any"]:
                key = (row.format, method, layout)
                assert key not in seen, (key, seen.get(key), row.name)
                seen[key] = row.name


# From the runtimes' sources and documentation, each read again for this test.
KNOWN = [
    ("fp8-tensor", "vllm", gpu(80), "modelopt", "max", "fallback"),
    ("fp8-tensor", "vllm", gpu(89), "modelopt", "max", "native"),
    ("int8-w8a8", "vllm", gpu(100), "compressed-tensors", "rtn", "refused"),
    ("int8-w8a8", "vllm", gpu(90), "modelopt", "smoothquant", "refused"),
    ("int4-w4a16", "vllm", gpu(90), "modelopt", "awq", "refused"),
    ("int4-w4a16", "trtllm-bundle", gpu(90), "modelopt", "awq", "native"),
    ("int4-w4a16", "trtllm-bundle", gpu(90), "modelopt", "gptq", "unknown"),
    ("int4-w4a16", "trtllm-bundle", gpu(90), "gptq", "gptq", "refused"),
    ("int8-w8a8", "trtllm-bundle", gpu(90), "compressed-tensors", "rtn", "refused"),
    ("int8-w8a8", "trtllm-engine", gpu(80), "modelopt-trtllm", "smoothquant", "native"),
    ("nvfp4", "vllm", gpu(90), "modelopt", "max", "fallback"),
    ("nvfp4", "trtllm-engine", gpu(90), "modelopt-trtllm", "max", "refused"),
    ("nvfp4", "trtllm-bundle", gpu(90), "modelopt", "max", "fallback"),
    ("nvfp4", "vllm", gpu(120), "compressed-tensors", "max", "native"),
    ("fp8-channel-token", "trtllm-engine", gpu(100), "modelopt-trtllm", "rtn", "refused"),
    ("int8-w8a16", "vllm", CPU, "compressed-tensors", "rtn", "refused"),
    ("kv-fp8", "vllm", gpu(80), None, None, "unknown"),
    ("kv-int8", "trtllm-bundle", gpu(90), None, None, "refused"),
    ("bf16", "trtllm-engine", CPU, "hf", "none", "refused"),
]


@pytest.mark.parametrize("case", KNOWN, ids=lambda c: f"{c[0]}.{c[1]}.{c[2].sm or 'cpu'}.{c[3]}.{c[4]}")
def test_what_is_known(case: tuple[str, str, Target, str | None, str | None, str]) -> None:
    fmt, runtime, target, layout, method, wanted = case
    assert verdict(fmt, runtime, target, layout=layout, method=method).verdict == wanted


def test_a_group_size_that_no_kernel_takes_is_refused() -> None:
    found = verdict("int4-w4a8", "vllm", gpu(90), layout="compressed-tensors", group_size=64)
    assert found.verdict == "refused"
    assert "group size 128, not 64" in found.reason
    assert verdict("int4-w4a8", "vllm", gpu(90), layout="compressed-tensors", group_size=128).verdict == "native"


def test_a_version_outside_the_range_is_unknown() -> None:
    assert verdict("nvfp4", "trtllm-engine", gpu(100), version="1.2.1").verdict == "native"
    gone = verdict("nvfp4", "trtllm-engine", gpu(100), version="1.3.0rc21")
    assert gone.verdict == "unknown"
    assert "1.3.0rc21" in gone.reason
    assert verdict("nvfp4", "trtllm-engine", gpu(100), version="1.3.0rc20").verdict == "native"
    assert verdict("fp8-channel-token", "trtllm-engine", gpu(90), version="0.14").verdict == "unknown"


@given(
    st.sampled_from([*FORMATS, *KV, "no-such-format"]),
    st.sampled_from(["vllm", "trtllm-engine", "trtllm-bundle"]),
    st.sampled_from([75, 80, 86, 89, 90, 100, 103, 110, 120]),
    st.sampled_from([None, "hf", "gptq", "modelopt"]),
)
def test_a_lookup_always_answers(fmt: str, runtime: str, sm: int, layout: str | None) -> None:
    """What the files do not say is unknown with a reason, never an exception and never support."""
    found = verdict(fmt, runtime, gpu(sm), layout=layout)
    assert found.verdict in VERDICTS
    assert found.reason
    if str(sm) not in DEVICES:
        assert found.verdict == "unknown"


FAULTS = {
    "a device that is none": ({"95": ["native", "x"]}, "device 95 is none of"),
    "a device twice": ({"80, 86": ["native", "x"], "86": ["native", "x"]}, "device 86 stands twice"),
    "a verdict that is none": ({"80": ["maybe", "x"]}, "is not \\[verdict, reason\\]"),
    "an entry without a reason": ({"80": ["native"]}, "is not \\[verdict, reason\\]"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_file_is_named(name: str) -> None:
    devices, message = FAULTS[name]
    raw = {"runtime": "x", "planned_version": {"cuda": "1"}, "sources": {"s": "t"}}
    row = {"format": "bf16", "name": "BF16", "sources": ["s"], "devices": devices}
    with pytest.raises(ValidationError, match=message):
        Table.model_validate(raw | {"rows": [row]})


def test_the_page_of_the_docs_is_fresh() -> None:
    committed = (ROOT / show.DOCS).read_text(encoding="utf-8")
    assert committed == show.docs(), "run `uv run python -m pipeline support --write-docs`"


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["support", *arguments])
    out = capsys.readouterr()
    return out.out if ended.value.code == 0 else f"{ended.value.code}: {out.err}"


def test_the_command_prints_the_matrix(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    whole = _run(capsys)
    for piece in ("trtllm-engine", "SM120", "AWQ W4A16", "KV cache NVFP4", "fallback", "refused, with a reason"):
        assert piece in whole
    column = _run(capsys, "--target", "a100-80g", "--runtime", "vllm")
    assert "SM80: fallback: stored in FP8, computed in bf16" in column
    assert "source: vLLM" in column
    assert "SM90:" not in column
    facts = json.loads(_run(capsys, "--format", "w4a8-awq", "--target", "sm89", "--json"))
    assert {(f["runtime"], f["device"]) for f in facts} == {(name, "89") for name in runtimes()}
    assert {f["name"] for f in facts} == {"W4A8-AWQ"}


@pytest.mark.parametrize("arguments, said", [
    (("--format", "fp7"), "no format 'fp7'"),
    (("--target", "h20"), "Did you mean 'h200'"),
    (("--runtime", "vlm"), "Did you mean 'vllm'"),
])  # fmt: skip
def test_an_unknown_name_is_answered_with_the_nearest(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = _run(capsys, *arguments)
    assert text.startswith("2: ")
    assert said in text
    assert len(text.splitlines()) == 1


def test_what_params_allows_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    raw["allow_unknown"] = ["int8-w8a16.vllm.b200"]
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(raw), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert "unknown, allowed by params.yaml" in _run(capsys, "--format", "int8-w8a16", "--target", "b200")
    assert "?!" in _run(capsys)


def test_the_matrix_needs_no_params_to_be_read() -> None:
    with pytest.raises(InputError, match="no target"):
        show.device_named("h20", {})
