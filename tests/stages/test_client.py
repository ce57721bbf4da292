"""The real load generator against a stub server: what is sent, what is recorded, how long a leg takes on its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.runstage import env_python

pytestmark = pytest.mark.stages
ROOT = Path(__file__).parents[2]
# Runs in the client's environment, where AIPerf is, from the repository's root.
PROGRAM = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from pipeline.speed import load, results
from pipeline.speed.leg import Plan, run_leg
from pipeline.speed.workloads import Workload

spec, url, tokenizer, folder, streaming = json.loads(sys.argv[1])
workload = Workload.model_validate(spec)
config = load.aiperf_config
load.aiperf_config = lambda p, u, m, f, s, t, c: config(p, u, m, f, s, tokenizer, c)
server = SimpleNamespace(url=url, pid=None, log="stub", cell=SimpleNamespace(name="stub"),
                         target=SimpleNamespace(device="cpu"), check_alive=lambda when: None)
pool = [[i * 7 % 1000 for i in range(300)], [i * 11 % 1000 for i in range(300)]]
leg = run_leg(Plan(workload, workload.points, pool, "m", streaming, "seed"), server, Path(folder))
timed = results.Timed()
timed.add("w", workload, workload.points, [("A", leg), ("B", leg)])
print(json.dumps({"w": timed.workloads["w"], "rows": {k: len(v) for k, v in leg.rows.items()}, "beside": leg.beside}))
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: Any) -> Path:
    """A tokenizer of ten words: AIPerf loads one, whatever it is sent."""
    folder = tmp_path_factory.mktemp("tokenizer")
    code = (
        "import sys; from tokenizers import Tokenizer; from tokenizers.models import WordLevel; "
        "from transformers import PreTrainedTokenizerFast as T; "
        "t = Tokenizer(WordLevel({'[UNK]': 0, 'a': 1}, unk_token='[UNK]')); "
        "T(tokenizer_object=t, unk_token='[UNK]').save_pretrained(sys.argv[1])"
    )
    subprocess.run([env_python("client"), "-c", code, str(folder)], check=True, capture_output=True)
    return Path(folder)


@pytest.fixture
def stub() -> Any:
    """The address of a running stub server."""
    from pipeline.serving import free_port

    port = free_port()
    server = subprocess.Popen([sys.executable, str(ROOT / "tests/unit/stub_server.py"), str(port)])
    time.sleep(0.5)
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


def run(spec: dict[str, Any], url: str, tokenizer: Path, folder: Path, streaming: bool = True) -> dict[str, Any]:
    """Run one leg and return what it printed."""
    text = json.dumps([spec, url, str(tokenizer), str(folder), streaming])
    done = subprocess.run([env_python("client"), "-c", PROGRAM, text], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_closed_open_and_mixed_loads_are_sent_and_recorded(stub: str, tokenizer: Path, tmp_path: Path) -> None:
    mix = [
        {"prompt_tokens": 20, "output_tokens": 4, "share": 0.5},
        {"prompt_tokens": 60, "output_tokens": 9, "share": 0.5},
    ]
    points = [{"concurrency": 4, "requests": 40, "warmup": 4}, {"rate": 20, "duration_s": 2, "warmup": 2}]
    found = run({"mix": mix, "points": points}, stub, tokenizer, tmp_path / "leg")
    assert found["rows"] == {"c4": 40, "r20": 40}
    closed, opened = found["w"]["points"]
    assert closed["loop"] == "closed" and opened["loop"] == "open"
    for point in (closed, opened):
        assert point["candidate"]["errors"] == 0
        assert point["candidate"]["output_tokens_ok"]
        assert 20 <= point["candidate"]["ttft_ms"]["p50"] < 80
        assert 2 <= point["candidate"]["tpot_ms"]["p50"] < 12
    assert opened["candidate"]["request_s"] == pytest.approx(20, rel=0.5)
    assert found["w"]["prefix_cache_hit_rate"] == 0.0
    assert (tmp_path / "leg/server_metrics.before.prom").is_file()
    assert not (tmp_path / "leg/inputs.json").exists()
    # AIPerf's own telemetry stays off: it would wait 2 s at the end of every leg.
    assert not list((tmp_path / "leg").glob("server_metrics_export*"))


def test_answers_that_are_not_streamed_are_timed_end_to_end(stub: str, tokenizer: Path, tmp_path: Path) -> None:
    spec = {"prompt_tokens": 16, "output_tokens": 8, "points": [{"concurrency": 2, "requests": 12, "warmup": 2}]}
    found = run(spec, stub, tokenizer, tmp_path / "leg", streaming=False)
    (point,) = found["w"]["points"]
    assert point["candidate"]["e2e_ms"]["p50"] >= 36
    assert point["candidate"]["ttft_ms"]["not_measured"]["mean"] == "answers were not streamed"
    assert point["candidate"]["output_tok_s"] > 0


def test_a_closed_loop_waits_without_using_a_core(stub: str, tokenizer: Path, tmp_path: Path) -> None:
    """AIPerf's own loop used 80 to 100% of a core here, whatever the load; what is seen is its share, no speed."""
    spec = {"prompt_tokens": 16, "output_tokens": 60, "points": [{"concurrency": 2, "requests": 40, "warmup": 2}]}
    found = run(spec, stub, tokenizer, tmp_path / "leg")
    (load,) = found["beside"]["client"].values()
    assert load["busiest_pct"] < 50, load
    assert load["bound"] is False


def test_a_leg_without_the_plugin_is_refused(stub: str, tokenizer: Path, tmp_path: Path) -> None:
    spec = {"prompt_tokens": 16, "output_tokens": 4, "points": [{"concurrency": 2, "requests": 4, "warmup": 2}]}
    text = json.dumps([spec, stub, str(tokenizer), str(tmp_path / "leg"), True])
    program = PROGRAM.replace("leg = run_leg", "load.PLUGIN = Path('nowhere')\nleg = run_leg")
    done = subprocess.run([env_python("client"), "-c", program, text], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "AIPerf ran 2 closed loops and 0 of them with this project's plugin (nowhere)" in done.stderr
