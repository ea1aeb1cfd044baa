"""By which path KV leaves a GPU's memory. Pure: `probe` gathers the facts."""

from __future__ import annotations

from dataclasses import dataclass

#: Peers map the GPU's memory itself.
CUDA_IPC = "cuda_ipc"
#: Finished blocks are copied to pinned host memory, which peers map.
PINNED = "pinned"
#: CUDA_IPC where nothing is known that speaks against it, else PINNED.
AUTO = "auto"

#: What to change, by the error that a process met which opened another's memory.
_ADVICE = {
    2: "leave room on the card for a second process, or ask for pinned",
    46: "let more than one process use the card (nvidia-smi -c DEFAULT)",
    201: "give each worker a process of its own, in one process namespace (pid in compose, --pid, hostPID)",
    217: "use cards with peer-to-peer access, or ask for pinned",
    304: "run the workers as one user in one IPC and process namespace, with a seccomp profile that allows it",
    801: "virtual GPUs, WSL and confidential computing do not offer it, so ask for pinned",
}
_ADVICE_OTHERWISE = "let two processes of this container share a device's memory, or ask for pinned"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Whether another process could read this device's memory. If not: what happened, and the code of a CUDA error."""

    ok: bool
    what: str = ""
    code: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a device: is it a slice of a card, which visible devices cannot reach its memory, and how the
    probe ended (None: it was not made)."""

    mig: bool = False
    without_peer_access: tuple[int, ...] = ()
    probe: ProbeResult | None = None


@dataclass(frozen=True, slots=True)
class Path:
    """The kind of path that is taken, and why: one line that tells an operator what to change."""

    kind: str
    reason: str


def choose(asked: str, facts: Facts) -> Path:
    """The path for a device of which `facts` are known.

    What is asked for by its name is taken, with a warning in the reason if the facts speak against it. ValueError when
    `asked` is none of "auto", "cuda_ipc" and "pinned".
    """
    if asked == PINNED:
        return Path(PINNED, "it was asked for")
    against = _against_ipc(facts)
    if asked == CUDA_IPC:
        return Path(CUDA_IPC, f"it was asked for, but will hardly work: {against}" if against else "it was asked for")
    if asked != AUTO:
        raise ValueError(f"the path of KV must be {AUTO}, {CUDA_IPC} or {PINNED}, not {asked!r:.40}")
    return Path(PINNED, against) if against else Path(CUDA_IPC, _for_ipc(facts))


def _against_ipc(facts: Facts) -> str:
    """The first objection, empty if there is none: the one that explains the others comes first."""
    if facts.mig:
        return "a slice of a card (MIG) cannot share its memory; give the worker a whole card for cuda_ipc"
    if facts.probe is not None and not facts.probe.ok:
        return f"another process could not read this device's memory ({facts.probe.what}); {_advice(facts.probe)}"
    if facts.without_peer_access:
        listed = ", ".join(map(str, facts.without_peer_access))
        return (
            f"there is no peer-to-peer access to this device from {listed}; hide those (CUDA_VISIBLE_DEVICES), or ask "
            "for cuda_ipc if no worker decodes there"
        )
    return ""


def _for_ipc(facts: Facts) -> str:
    found = "another process could read this device's memory" if facts.probe else "nothing speaks against it"
    return f"{found}; workers in other containers need all GPUs and the same process namespace"


def _advice(probe: ProbeResult) -> str:
    return _ADVICE_OTHERWISE if probe.code is None else _ADVICE.get(probe.code, _ADVICE_OTHERWISE)
