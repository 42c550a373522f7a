"""Runs cases of one target in this process: `python -m tests.fuzz gguf 0 1000`.

The case of a number is always the same. Each is bounded in time by a watchdog that ends the process, also
where no Python runs, and in memory by `tracemalloc`, which sees what Python and numpy take (not what DuckDB,
torch or the tokenizers take by themselves).
"""

from __future__ import annotations

import codecs
import faulthandler
import logging
import random
import shutil
import sys
import time
import traceback
import tracemalloc
import warnings

from quail.errors import QuailError
from tests.fuzz import targets

MOST_SECONDS = 10.0
"""Of the processor. The watchdog waits six times as long by the clock, for machines that do other work too."""

_SHOWN_BYTES = 3000


def main() -> int:
    """Runs cases `first` to `first + count - 1`; prints the number of the case in progress before it runs."""
    name, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    codecs.register_error("surrogatepass_or_replace", _surrogates_stay)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    target = targets.make(name)
    target.read_valid()
    num_refused, slowest, largest = 0, 0.0, 0.0
    tracemalloc.start()
    try:
        for number in range(first, first + count):
            case = target.case(random.Random(f"{name}:{number}"))
            faulthandler.dump_traceback_later(6 * MOST_SECONDS, exit=True)
            sys.stderr.write(f"\rcase {number}")
            sys.stderr.flush()
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            started = time.process_time()
            try:
                case.run()
            except QuailError as error:
                num_refused += 1
                fault = _fault_of_message(str(error))
            except BaseException as error:  # a panic of a Rust package is no Exception
                if isinstance(error, KeyboardInterrupt):
                    raise
                fault = "".join(traceback.format_exception(error))[-3000:]
            else:
                fault = ""
            slowest = max(slowest, time.process_time() - started)
            if slowest > MOST_SECONDS:
                fault = fault or f"took {slowest:.1f} s"
            taken = tracemalloc.get_traced_memory()[1] - before
            largest = max(largest, taken / target.largest(case.num_bytes))
            if taken > target.largest(case.num_bytes):
                fault = fault or f"took {taken:,} bytes for {case.num_bytes:,} bytes of input"
            if fault:
                print(f"\n{name} case {number}: {fault}\npython -m tests.fuzz {name} {number} 1")
                print(repr(case.shown[:_SHOWN_BYTES]))
                return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(target.folder, ignore_errors=True)
    print(
        f"\n{name}: {count} cases, {num_refused} refused, slowest {slowest:.3f} s, {largest:.2f} of the memory"
    )
    return 0


def _fault_of_message(message: str) -> str:
    """What is wrong with a message that people read; empty if nothing."""
    if not message.strip() or len(message) > 20_000:
        return f"a message of {len(message)} characters: {message[:500]!r}"
    if "Traceback" in message or " object at 0x" in message:
        return f"a message that is no sentence: {message!r}"
    message.encode()
    return ""


def _surrogates_stay(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    piece = error.object[error.start : error.start + 3]
    try:
        return piece.decode(errors="surrogatepass"), error.start + 3
    except UnicodeDecodeError:
        return "\ufffd", error.start + 1


if __name__ == "__main__":
    sys.exit(main())
