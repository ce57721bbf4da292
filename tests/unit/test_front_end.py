"""How busy the process that answers requests is, and which one it is."""

from __future__ import annotations

import subprocess
import sys

from pipeline.speed import watch


def test_a_busy_front_end_is_marked_as_the_limit() -> None:
    found = watch.front_end_load([(0.0, 3.0), (1.0, 3.9), (2.0, 4.9)])
    assert found == {"busy_pct": 95.0, "bound": True, "why": "the process that answers requests used 95% of a core"}
    assert watch.front_end_load([(0.0, 3.0), (2.0, 4.0)])["bound"] is False
    assert watch.front_end_load([(0.0, 3.0)])["bound"] is None


def test_the_front_end_is_the_process_of_the_tree_that_listens_on_the_port() -> None:
    """A shell above, two servers below it: of those that listen, the one on the asked port."""
    serve = "import http.server, sys; s = http.server.HTTPServer(('127.0.0.1', 0), None); " \
            "sys.stdout.write(f'{s.server_port}\\n'); sys.stdout.flush(); s.serve_forever()"  # fmt: skip
    both = f'{sys.executable} -c "$0" & {sys.executable} -c "$0" & wait'
    with subprocess.Popen(["sh", "-c", both, serve], stdout=subprocess.PIPE, text=True) as shell:
        try:
            assert shell.stdout
            ports = [int(shell.stdout.readline()) for _ in range(2)]
            found = [watch.listener(shell.pid, port) for port in ports]
            assert {p.pid for p in found if p} == {p.pid for p in watch.tree(shell.pid)[1:]}
            assert watch.listener(shell.pid, 1) is None
        finally:
            for process in reversed(watch.tree(shell.pid)):
                process.kill()
