"""AIPerf's closed loop without its busy wait.

AIPerf 0.13.0 keeps `concurrency` requests in flight by asking for a free slot over and over, with nothing but a yield
between (aiperf/timing/strategies/request_rate.py, execute_phase): its timing process uses a whole core. On a host of
two cores that core is the server's or the client's, and the numbers show it; on a large one every load looks limited
by the client. AIPerf's own issuer can also wait for a slot, which costs nothing, so that is what is used here.
docs/speed.md has what was measured.
"""

from __future__ import annotations

from aiperf.plugin.enums import ArrivalPattern
from aiperf.timing.strategies.request_rate import RequestRateStrategy

# pipeline/speed/leg.py (load.PLUGIN_SAYS) looks for it in AIPerf's log: a plugin that was not loaded would go unseen.
SAYS = "quantpress: waits for a free slot"


class WaitingStrategy(RequestRateStrategy):
    """Sends the next request when a slot is free; every other arrival pattern is AIPerf's.

    For conversations of one turn, as all of this project's workloads are.
    """

    async def execute_phase(self) -> None:
        """Send requests until the phase has sent all of its own; the issuer says when."""
        if self._config.arrival_pattern != ArrivalPattern.CONCURRENCY_BURST:
            await super().execute_phase()
            return
        self.info(SAYS)
        while await self._credit_issuer.issue_credit(self._conversation_source.next().build_first_turn()):
            pass
