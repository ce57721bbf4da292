"""Quantize one checkpoint with modelopt: `python -m pipeline run modelopt quantize --model M --recipe R`."""

from pipeline.making import Backend, make
from pipeline.program import run_main


def _backend() -> Backend:
    from stages.modelopt.backend import quantize

    return quantize


if __name__ == "__main__":
    run_main(lambda: make("modelopt", _backend, ("nvidia-modelopt",)))
