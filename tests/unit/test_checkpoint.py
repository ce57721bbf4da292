"""Tests of the safetensors reader: it reads what the real library writes; damage ends in one sentence."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packers import CONFIG, bf16, editing_json, make_source, save, shard

from pipeline.checkpoint import INDEX, Checkpoint, is_tied, linear_layers, read_header, to_float
from pipeline.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A source checkpoint."""
    return make_source(tmp_path / "source")


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    """Write a safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2,), offsets: tuple[int, int] = (0, 8)) -> dict[str, Any]:
    """One header entry."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_the_real_library_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.normal(size=(3, 5)).astype(np.float32),
        "b": rng.normal(size=7).astype(np.float16),
        "c": rng.integers(-128, 127, (2, 3), np.int8),
        "d": rng.integers(0, 255, 3).astype(np.uint8),
        "e": rng.integers(-9, 9, (1, 4), np.int32),
        "f": np.array(4.0, np.float32),
        "g": np.zeros((0, 4), np.float32),
        "h": np.array([5, 6], np.int64),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    made = Checkpoint.open(tmp_path)
    assert made.tensors.keys() == tensors.keys()
    assert made.weight_bytes == sum(t.nbytes for t in tensors.values())
    for name, want in tensors.items():
        found = made.read(name)
        assert found.dtype == want.dtype and found.shape == want.shape
        np.testing.assert_array_equal(found, want)
    with pytest.raises(ValueError, match="read-only"):
        made.read("a")[0, 0] = 1


def test_bf16_and_f8_values(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8)
    exact = np.array([1.0, -2.5, 0.0, float("inf"), 2.0**-120], np.float32)
    save(tmp_path / "model.safetensors", {"x": bf16(exact), "y": ("F8_E4M3", codes)})
    (tmp_path / "config.json").write_text("{}")
    made = Checkpoint.open(tmp_path)
    np.testing.assert_array_equal(made.read("x"), exact)
    found = made.read("y")
    assert found.dtype == np.float32
    # arXiv:2209.05433, table 1: largest 448, smallest normal 2^-6, smallest 2^-9, NaN at 0x7f and 0xff
    spots = {0x00: 0.0, 0x01: 2**-9, 0x07: 7 * 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x39: 1.125, 0x7E: 448.0}
    for code, want in spots.items():
        assert found[code] == want and found[code | 128] == -want
    assert np.flatnonzero(np.isnan(found)).tolist() == [0x7F, 0xFF]
    assert to_float(np.array(0x38, np.uint8), "F8_E4M3").shape == ()


BROKEN = {
    "too short": (b"\x01\x02", "too short"),
    "length past the end": (struct.pack("<Q", 1 << 40) + b"{}", "header is"),
    "huge length": (b"\xff" * 8 + b"{}", "header is"),
    "not json": (struct.pack("<Q", 2) + b"{]", "not JSON"),
    "not utf-8": (struct.pack("<Q", 2) + b"\xff\xfe", "not JSON"),
    "deep nesting": (struct.pack("<Q", 200_000) + b"[" * 200_000, "not JSON"),
    "a list": (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
    "trailing bytes": (struct.pack("<Q", 2) + b"{}xx", "after its last tensor"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(tmp_path: Path, name: str) -> None:
    content, words = BROKEN[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        read_header(path)
    assert "model.safetensors" in str(caught.value)


BROKEN_TENSORS: dict[str, tuple[Any, str]] = {
    "unknown dtype": ({"t": entry("F7")}, "unknown dtype"),
    "dtype no string": ({"t": entry() | {"dtype": [1]}}, "unknown dtype"),
    "negative dimension": ({"t": entry(shape=(-2,))}, "impossible shape"),
    "fractional dimension": ({"t": entry() | {"shape": [2.0]}}, "impossible shape"),
    "bool dimension": ({"t": entry() | {"shape": [True, 2]}}, "impossible shape"),
    "overflowing shape": ({"t": entry(shape=(1 << 62, 4, 0), offsets=(0, 0))}, "impossible shape"),
    "too many dimensions": ({"t": entry(shape=(1,) * 70)}, "impossible shape"),
    "range backwards": ({"t": entry(offsets=(8, 0))}, "impossible byte range"),
    "size is not shape": ({"t": entry(shape=(3,))}, "12 bytes"),
    "past the end": ({"t": entry(offsets=(8, 16))}, "truncated"),
    "hole": ({"s": entry(shape=(0,), offsets=(0, 0)), "t": entry(shape=(1,), offsets=(4, 8))}, "hole"),
    "overlap": ({"s": entry(), "t": entry(shape=(1,), offsets=(4, 8))}, "overlaps"),
    "no entry": ({"t": 3}, "something else"),
    "missing key": ({"t": {"dtype": "F32"}}, "something else"),
    "named twice": (b'{"t":' + json.dumps(entry()).encode() + b',"t":3}', "twice"),
}


@pytest.mark.parametrize("name", BROKEN_TENSORS)
def test_broken_tensors_are_named(tmp_path: Path, name: str) -> None:
    header, words = BROKEN_TENSORS[name]
    path = write(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(InputError, match=words) as caught:
        read_header(path)
    assert "'t'" in str(caught.value) and "model.safetensors" in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.safetensors cannot be read"):
        read_header(tmp_path / "gone.safetensors")


@settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_bytes_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """Flipped, cut, inserted or repeated bytes: a result or an InputError, nothing else, without a hang."""
    header = {"__metadata__": {"format": "pt"}, "a": entry(), "b": entry("BF16", (2, 2), (8, 16))}
    whole = bytearray(write(tmp_path / "good.safetensors", header, bytes(16)).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert", "tail"])):
            case "set":
                whole[at] = data.draw(st.integers(0, 255))
            case "cut":
                del whole[at : at + data.draw(st.integers(1, 8))]
            case "insert":
                whole[at:at] = data.draw(st.binary(min_size=1, max_size=4) | st.sampled_from([b"9" * 50, b"[", b"e9"]))
            case "tail":
                del whole[at:]
        if not whole:
            break
    path = tmp_path / "bad.safetensors"
    path.write_bytes(whole)
    try:
        tensors = read_header(path)
    except InputError as error:
        assert "bad.safetensors" in str(error)
        return
    made = Checkpoint(tmp_path, {}, tensors)
    for name, info in tensors.items():
        assert made.raw(name).shape == info.shape


@given(raw=st.binary(max_size=300))
@settings(max_examples=200, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_headers_are_read_or_refused(tmp_path: Path, raw: bytes) -> None:
    path = write(tmp_path / "random.safetensors", raw)
    try:
        read_header(path)
    except InputError as error:
        assert "random.safetensors" in str(error)


def test_shards_read_as_one(folder: Path) -> None:
    before = Checkpoint.open(folder)
    norm = before.read("model.norm.weight").copy()
    shard(folder)
    after = Checkpoint.open(folder)
    assert after.tensors.keys() == before.tensors.keys() and after.weight_bytes == before.weight_bytes
    assert after.index_bytes == after.weight_bytes
    np.testing.assert_array_equal(after.read("model.norm.weight"), norm)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match=r"00002-of-00002.* is missing"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ghost.weight": "model-00001-of-00002.safetensors"}, "ghost.weight.*not in"),
        ({"model.norm.weight": "model-00001-of-00002.safetensors"}, "model.norm.weight"),
        ({"model.norm.weight": "../x.safetensors"}, "no weight_map"),
        ({"model.norm.weight": 3}, "no weight_map"),
    ],
)
def test_index_and_shards_must_agree(folder: Path, change: dict[str, Any], words: str) -> None:
    shard(folder)
    with editing_json(folder / INDEX) as index:
        moved = index["weight_map"].get("model.norm.weight")
        index["weight_map"] |= change
        if moved == change.get("model.norm.weight"):
            index["weight_map"]["model.norm.weight"] = "model-00002-of-00002.safetensors"
    with pytest.raises(InputError, match=words):
        Checkpoint.open(folder)


def test_a_tensor_in_two_shards(folder: Path) -> None:
    shard(folder)
    save(folder / "model-00003-of-00003.safetensors", {"model.norm.weight": bf16(np.ones(128))})
    with pytest.raises(InputError, match=r"'model\.norm\.weight' in .* and again in"):
        Checkpoint.open(folder)


def test_several_files_need_an_index(folder: Path) -> None:
    save(folder / "other.safetensors", {"x": bf16(np.ones(1))})
    with pytest.raises(InputError, match=r"no model\.safetensors\.index\.json"):
        Checkpoint.open(folder)


def test_pickles_alone_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"safetensors only, and has only pytorch_model\.bin"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("content", [None, "{", "[]", "\udcff"])
def test_config_must_be_an_object(folder: Path, content: str | None) -> None:
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=r"config\.json"):
        Checkpoint.open(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint folder"):
        Checkpoint.open(tmp_path / "nowhere")


def test_linear_layers(tmp_path: Path) -> None:
    tied = Checkpoint.open(make_source(tmp_path / "tied", bias=True))
    loose = Checkpoint.open(make_source(tmp_path / "loose", tied=False))
    names = linear_layers(tied.config, tied.tensors)
    assert len(names) == 15 and names[-1] == "lm_head" and "model.embed_tokens" not in names
    assert sorted(names) == sorted(linear_layers(loose.config, loose.tensors))
    assert is_tied(CONFIG, tied.tensors) and not is_tied(loose.config, loose.tensors)
    assert is_tied({}, tied.tensors) and not is_tied({}, loose.tensors)
    assert is_tied({"text_config": {"tie_word_embeddings": True}}, loose.tensors)
