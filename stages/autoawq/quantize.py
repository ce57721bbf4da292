"""Quantize one checkpoint with autoawq: `python -m pipeline run autoawq quantize --model M --recipe R`."""

from pipeline.making import Backend, make
from pipeline.program import run_main


def _backend() -> Backend:
    from stages.autoawq.backend import quantize

    return quantize


if __name__ == "__main__":
    run_main(lambda: make("autoawq", _backend, ("autoawq",)))
