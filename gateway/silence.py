"""A worker that owes an answer: whether it is busy, kept from running, or will never answer. It reads /proc.

A question lies in the worker's channel, so a loop that sleeps would wake at once. Hence, look by look:

- stopped (SIGSTOP, a debugger) or asleep, and not scheduled once between two looks: it is stuck;
- running: it is busy with something. The costliest body that limits allow takes a quarter of a second of CPU;
- runnable but kept from running, paging, or waiting for a disk: it goes on, however slowly. Load looks like this, and
  a network file system that pauses; killing all workers for it would be worse. It gets HANG_S.

Looks are counted, not seconds: a parent that is starved or frozen itself looks less often, and blames nobody for it.
"""

from dataclasses import dataclass
from pathlib import Path

LOOK_S = 0.5
STOPPED_LOOKS = 4
# More than for one that is stopped: that one may hold the accounts' lock, for which its siblings sleep.
ASLEEP_LOOKS = 8
SPIN_CPU_S = 5.0
HANG_S = 30.0

_TICKS_A_SECOND = 100.0  # USER_HZ, the same on every Linux


@dataclass(frozen=True, slots=True)
class Look:
    """A process's main thread, where the event loop runs. state: as in /proc, R S D T t Z. cpu_s: used so far."""

    state: str
    switches: int
    cpu_s: float

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"


def look_at(pid: int) -> Look | None:
    """None where the kernel does not tell, or there is no such process."""
    thread = Path(f"/proc/{pid}/task/{pid}")
    try:
        figures = (thread / "stat").read_text().rpartition(") ")[2].split()
        lines = dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines() if ":\t" in line)
        switches = int(lines["voluntary_ctxt_switches"]) + int(lines["nonvoluntary_ctxt_switches"])
        return Look(figures[0], switches, (int(figures[11]) + int(figures[12])) / _TICKS_A_SECOND)
    except (OSError, KeyError, ValueError, IndexError):
        return None


class Silence:
    """From a question that is not answered to the verdict. Ends with the answer."""

    def __init__(self) -> None:
        self._looks = 0
        self._still = 0  # looks in a row at which it had not run since the one before
        self._last: Look | None = None
        self._began_cpu_s = 0.0

    def verdict(self, look: Look | None) -> str | None:
        """Why the worker is given up, after this look; None: not yet. Call it every LOOK_S."""
        last, self._last = self._last, look
        self._looks += 1
        if look is not None:
            if last is None:
                self._began_cpu_s = look.cpu_s
            ran = last is None or (look.switches, look.cpu_s) != (last.switches, last.cpu_s)
            self._still = 0 if ran or look.state in "RD" else self._still + 1
            if self._still >= (STOPPED_LOOKS if look.stopped else ASLEEP_LOOKS):
                return f"{'stopped' if look.stopped else 'stuck'}, no answer for {self._looks * LOOK_S:g} s"
            if (spun_s := look.cpu_s - self._began_cpu_s) >= SPIN_CPU_S:
                return f"busy with one thing for {spun_s:.1f} s of CPU, no answer"
        if self._looks * LOOK_S >= HANG_S:
            return f"no answer for {HANG_S:g} s"
        return None
