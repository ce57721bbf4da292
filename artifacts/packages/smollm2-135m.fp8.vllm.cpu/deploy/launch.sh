#!/bin/sh
# Serve smollm2-135m.fp8.vllm.cpu. Run from the root of the repository.
exec env HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 uv run --project stages/vllm_cpu --locked python -m vllm.entrypoints.openai.api_server --model artifacts/checkpoints/smollm2-135m.fp8 --config artifacts/packages/smollm2-135m.fp8.vllm.cpu/deploy/serve.yaml --host 127.0.0.1 --port 8000 "$@"
