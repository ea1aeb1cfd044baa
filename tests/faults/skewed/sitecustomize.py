"""Put first on PYTHONPATH: the wall clock of the process is wrong by $SKEW_S seconds before anything is imported.

`±N` makes it jump between N seconds behind and N ahead, and stay there for 3 s, longer than a lease of the tests.
No clock that only goes forward is touched.
"""

import os
import time

_skew = os.environ.get("SKEW_S", "0")
_now, _now_ns, _gettime = time.time, time.time_ns, time.clock_gettime


def _error_s() -> float:
    if _skew.startswith("±"):
        return float(_skew[1:]) * (1 if int(time.monotonic() / 3) % 2 else -1)
    return float(_skew)


time.time = lambda: _now() + _error_s()
time.time_ns = lambda: _now_ns() + int(_error_s() * 1e9)
time.clock_gettime = lambda clock: _gettime(clock) + (_error_s() if clock == time.CLOCK_REALTIME else 0)
