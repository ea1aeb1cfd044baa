"""Whether another process of this container can read a device's memory, found out by letting one try.

python -m prelay_kv.cuda.probe    is that process: it opens what a line on its input names, and says what it read there

It may crash or hang where the driver does, and its parent goes on. It imports no torch, so it starts at once.
"""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import CudaError
from .paths import PINNED, Facts, Path, ProbeResult, choose
from .runtime import Cudart

#: The child. -P: no module of the folder where it happens to run.
COMMAND = (sys.executable, "-P", "-m", "prelay_kv.cuda.probe")
#: How long the child may take, in seconds. A driver looks at all cards of the machine, a second or two for each that
#: was asleep, while all workers load their models. Too short a time would send KV the long way for good.
LIMIT_S = 60.0

#: Bytes of the allocation that is tried. Smaller ones share an allocation, and a handle means all of that.
_NBYTES = 2 << 20
_PATTERN_NBYTES = 64


@dataclass(frozen=True, slots=True)
class _Request:
    """What the child opens: `nbytes` at the beginning of an allocation, on the device that it sees by this name."""

    library: str
    uuid: str
    handle: str
    nbytes: int


def choose_path(asked: str, runtime: Cudart, device: int) -> Path:
    """The path for the KV on `device`; unless "pinned" is asked for, what the machine can do is tried.

    ValueError as from `choose`; CudaError when the device cannot be used at all.
    """
    return choose(asked, Facts() if asked == PINNED else gather(runtime, device))


def gather(runtime: Cudart, device: int) -> Facts:
    """What speaks for and against sharing the memory of `device`. A slice of a card is not tried."""
    if runtime.device_uuid(device).startswith("MIG-"):
        return Facts(mig=True)
    others = [other for other in range(runtime.device_count()) if other != device]
    apart = tuple(other for other in others if not runtime.can_access_peer(other, device))
    return Facts(without_peer_access=apart, probe=run_probe(runtime, device))


def run_probe(
    runtime: Cudart, device: int, *, command: Sequence[str] = COMMAND, timeout_s: float = LIMIT_S
) -> ProbeResult:
    """Let a child process read a little memory of `device`, which becomes this thread's current one.

    1. Fill memory with what nobody can guess, and make a handle of it.
    2. Let the child open that. It has ended when this goes on, killed if it took longer than `timeout_s`.
    3. Free the memory, whatever happened: now nobody has it mapped.

    CudaError when this process cannot even do its own part of 1 and 3.
    """
    with ExitStack() as undo:
        runtime.set_device(device)
        pointer = runtime.malloc(_NBYTES)  # 1
        undo.callback(runtime.free, pointer)  # 3
        pattern = secrets.token_bytes(_PATTERN_NBYTES)
        runtime.write(pointer, pattern)
        try:
            handle = runtime.ipc_handle(pointer)
        except CudaError as error:
            if error.fatal:
                raise
            return ProbeResult(False, str(error), error.code)
        request = _Request(runtime.path, runtime.device_uuid(device), handle.hex(), len(pattern))
        return _ask(request, pattern, command, timeout_s)  # 2


def _ask(request: _Request, pattern: bytes, command: Sequence[str], timeout_s: float) -> ProbeResult:
    line = json.dumps(asdict(request)).encode() + b"\n"
    try:
        return _result(_run(command, line, timeout_s), pattern)
    except subprocess.TimeoutExpired:
        return ProbeResult(False, f"no answer in {timeout_s:g} s")
    except OSError as error:
        return ProbeResult(False, f"{command[0]} could not be started: {error.strerror}")


def _run(command: Sequence[str], line: bytes, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    """As subprocess.run, which does not wait for the child's end when this process is interrupted."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as child:
        try:
            output, errors = child.communicate(line, timeout_s)
        finally:
            child.kill()  # nothing, if it has ended
            child.wait()
    return subprocess.CompletedProcess(command, child.returncode, output, errors)


def _result(done: subprocess.CompletedProcess[bytes], pattern: bytes) -> ProbeResult:
    if done.returncode < 0:
        return ProbeResult(False, f"it was ended by signal {-done.returncode}")
    if done.returncode:
        return ProbeResult(False, f"it ended with {done.returncode}: {_last_line(done.stderr)}")
    try:
        reply = json.loads(_last_line(done.stdout))
        if not reply["ok"]:
            return ProbeResult(False, f"{reply['call']}: {reply['name']} ({reply['code']})", int(reply["code"]))
        if bytes.fromhex(reply["bytes"]) != pattern:
            return ProbeResult(False, "it read something else than what was written")
    except (ValueError, KeyError, TypeError):
        return ProbeResult(False, f"it answered {_last_line(done.stdout)!r}")
    return ProbeResult(True)


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")


# In the child


def main() -> None:
    """Answer the request on standard input by a line of JSON. What is no failed call ends it with a traceback."""
    signal.setitimer(signal.ITIMER_REAL, 2 * LIMIT_S)  # SIGALRM ends it should its parent have died, wherever it hangs
    request = _Request(**json.loads(sys.stdin.readline()))
    print(json.dumps(_answer(request)), flush=True)


def _answer(request: _Request) -> dict[str, Any]:
    try:
        return {"ok": True, "bytes": _read(request).hex()}
    except CudaError as error:
        return {"ok": False, "code": error.code, "name": error.name, "call": error.call}


def _read(request: _Request) -> bytes:
    runtime = Cudart(request.library)
    seen = [runtime.device_uuid(device) for device in range(runtime.device_count())]
    if request.uuid not in seen:
        raise LookupError(f"{request.uuid} is not among the devices that a child sees: {', '.join(seen) or 'none'}")
    runtime.set_device(seen.index(request.uuid))
    pointer = runtime.ipc_open(bytes.fromhex(request.handle))
    try:
        return runtime.read(pointer, request.nbytes)
    finally:
        runtime.ipc_close(pointer)


if __name__ == "__main__":
    main()
