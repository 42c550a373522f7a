"""One engine's process: spoken to in lines of JSON, stopped while another measures, its memory and time read.

The process leads a process group of its own, so that what it starts is stopped and counted with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import last_line

PROC = Path("/proc")


class PeerFailed(Exception):
    """An engine that died, was silent too long, or says that something failed; in one line."""


class PeerProcess:
    """A running engine.

    Args:
        name: for messages.
        command: starts its adapter.
        log: where its standard error goes.
        environment: variables besides the own ones.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: dict[str, str] | None = None
    ) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,
                env=os.environ | (environment or {}),
            )
        self._received = b""

    def ask(self, message: dict[str, Any], *, timeout_seconds: float) -> dict[str, Any]:
        """Sends a message and waits for its reply.

        Raises:
            PeerFailed: no reply in time, the process died, or the reply is an error.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
        except OSError:
            raise self._died() from None
        reply: dict[str, Any] = json.loads(self._line(time.monotonic() + timeout_seconds, timeout_seconds))
        if not reply.pop("ok"):
            raise PeerFailed(f"{self.name}: {reply['error']}")
        return reply

    def pause(self) -> None:
        """Stops the process and all that it started, wherever they are."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets them go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Asks the process to end, and ends it."""
        self.resume()
        with suppress(PeerFailed):
            self.ask({"do": "close"}, timeout_seconds=10)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def cpu_seconds(self) -> float:
        """Processor time that its processes have used so far; 0 where the system does not tell."""
        ticks = os.sysconf("SC_CLK_TCK")
        return sum(int(fields[11]) + int(fields[12]) for _, fields in self._members()) / ticks

    def peak_resident_bytes(self) -> int:
        """The most memory that its processes held, summed; 0 where the system does not tell."""
        return sum(peak_of(PROC / str(pid) / "status") for pid, _ in self._members())

    def _members(self) -> Iterator[tuple[int, list[str]]]:
        """Processes of the group with the fields of their `stat` from the state on."""
        for folder in PROC.glob("[0-9]*"):
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == self._process.pid:
                    yield int(folder.name), fields

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _line(self, deadline: float, timeout_seconds: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise PeerFailed(f"{self.name}: no reply in {timeout_seconds:,.0f} s")
            some = self._process.stdout.read(1 << 16)
            if not some:
                raise self._died()
            self._received += some
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _died(self) -> PeerFailed:
        code = self._process.wait()
        return PeerFailed(f"{self.name} ended with status {code}: {last_line(self.log)}")


def peak_of(status: Path) -> int:
    """The peak of resident bytes that a `status` file tells."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
