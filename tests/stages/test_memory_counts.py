"""The shapes that pipeline/memory predicts are those of transformers' own models, built without data."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pipeline.memory.arch import load_arch
from pipeline.memory.tensors import parameters
from pipeline.runstage import child_env, env_python

pytestmark = pytest.mark.stages
CONFIGS = Path(__file__).parents[1] / "unit/configs"
# On the meta device a 671B model takes no memory. DeepSeek-V3's router bias is a buffer there, a weight in its files.
PROGRAM = """
import json, pathlib, sys, torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
found = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    raw = json.loads(path.read_text())
    raw = raw.get("text_config", raw)
    raw.pop("quantization_config", None)
    config = CONFIG_MAPPING[raw.pop("model_type")](**raw)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    extra = sum(b.numel() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    found[path.stem] = sum(p.numel() for p in model.parameters()) + extra
print(json.dumps(found))
"""


def test_parameters_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    command = [env_python("source"), "-c", PROGRAM, str(CONFIGS)]
    done = subprocess.run(command, env=child_env(), capture_output=True, text=True, check=True)
    built = json.loads(done.stdout.splitlines()[-1])
    archs = {path.stem: load_arch(path) for path in CONFIGS.glob("*.json")}
    said = {name: parameters(arch) for name, arch in archs.items() if arch.weights_modelled}
    assert len(said) >= 20
    assert {name: built[name] for name in said} == said
