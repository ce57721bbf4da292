"""Quantize one checkpoint with gptqmodel: `python -m pipeline run gptqmodel quantize --model M --recipe R`."""

from pipeline.making import Backend, make
from pipeline.program import run_main


def _backend() -> Backend:
    from stages.gptqmodel.backend import quantize

    return quantize


if __name__ == "__main__":
    run_main(lambda: make("gptqmodel", _backend, ("gptqmodel",)))
