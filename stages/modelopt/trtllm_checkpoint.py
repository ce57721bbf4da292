"""Make a TensorRT-LLM checkpoint: `python -m pipeline run modelopt trtllm_checkpoint --model M ... --tp 1 --pp 1`."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

from pipeline import host, jsonio
from pipeline.checkpoint import Checkpoint
from pipeline.errors import InputError, WorkError
from pipeline.making import arguments, load_calibration, peak_memory_gib
from pipeline.params import load_params
from pipeline.producers import for_backend
from pipeline.program import lock_sha256, run_main, versions
from pipeline.runstage import need_disk
from pipeline.trtllm.export import group_of, mend_folder, plan_export
from pipeline.trtllm.proof import prove
from pipeline.trtllm.ranks import Split


def main() -> None:
    """Export one checkpoint, prove it, and only then put it in its place."""
    args = arguments("model", "recipe", "tp", "pp")
    if not (args.tp.isdigit() and args.pp.isdigit()):
        raise InputError(f"--tp {args.tp} --pp {args.pp}: whole numbers are needed.")
    params = load_params()
    plan = plan_export(params, args.model, args.recipe, Split(int(args.tp), int(args.pp)))
    recipe = plan.recipe
    calib_ids, calib = load_calibration(recipe, args.model)
    scratch = Path(".quantpress/scratch") / plan.id
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    before = Checkpoint.open(plan.source)
    need_disk(2 * before.weight_bytes, f"Exporting {plan.id}")
    asked = for_backend(recipe, "modelopt") if recipe.backend != "none" else recipe.model_dump()
    print(f"export {plan.id}: {recipe.format} for {plan.split.world_size} ranks", flush=True)
    start = time.monotonic()
    from stages.modelopt.trtllm_backend import export

    allowed = {"trust_remote_code": params.models[args.model].trust_remote_code}
    export(plan.source, scratch, asked | allowed, calib_ids, (plan.split.tp, plan.split.pp), plan.decoder)
    mend_folder(scratch, plan.source, recipe.format, group_of(recipe))
    wall_s = time.monotonic() - start
    proof = prove(scratch, plan.source, recipe.format, group_of(recipe), recipe.kv_cache, recipe.algorithm)
    results = Path("artifacts/results") / plan.id
    jsonio.write_json(results / "lint.json", proof | {"checkpoint": plan.folder.name})
    if not proof["passed"]:
        errors = [f["message"] for f in proof["findings"] if f["severity"] == "error"]
        raise WorkError(f"The export of {plan.id} is not sound: {errors[0]} {results}/lint.json has all {len(errors)}.")
    record = {
        "schema": "quantpress.quantize/1",
        "model": args.model,
        "recipe": args.recipe,
        "spec": {key: value for key, value in asked.items() if value is not None},
        "backend": "modelopt",
        "made_by": "modelopt",
        "layout": "modelopt-trtllm",
        "ranks": plan.split._asdict(),
        "wall_s": round(wall_s, 1),
        "peak_memory_gib": round(peak_memory_gib(), 2),
        "weight_bytes": proof["weight_bytes"],
        "source_weight_bytes": before.weight_bytes,
        "effective_bits_per_weight": round(8 * proof["weight_bytes"] / before.parameters, 3),
        "quantized_layers": proof["layers"]["quantized"],
        "left_alone": ["lm_head"],
        "calib": calib,
        "seed": 0,
        "versions": versions("nvidia-modelopt", "torch", "transformers"),
        "env_lock_sha256": lock_sha256("modelopt"),
        "git_commit": host.git_commit(),
        "host": host.fingerprint(),
    }
    shutil.rmtree(plan.folder, ignore_errors=True)
    plan.folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(scratch, plan.folder)
    jsonio.write_json(results / "quantize.json", record)
    print(json.dumps({k: record[k] for k in ("wall_s", "weight_bytes", "effective_bits_per_weight")}), flush=True)


if __name__ == "__main__":
    run_main(main)
