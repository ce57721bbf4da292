"""Quantize one checkpoint with llmcompressor: `python -m pipeline run llmcompressor quantize --model M --recipe R`."""

from pipeline.making import Backend, make
from pipeline.program import run_main


def _backend() -> Backend:
    from stages.llmcompressor.backend import quantize

    return quantize


if __name__ == "__main__":
    run_main(lambda: make("llmcompressor", _backend, ("llmcompressor", "datasets")))
