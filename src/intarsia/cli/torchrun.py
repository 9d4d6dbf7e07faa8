"""torchrun, whose report of ranks that failed is one sentence."""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main


def run() -> None:
    """Run the ranks; say what the first of them said, or how it ended."""
    logging.disable(logging.CRITICAL)  # of this process, which runs nothing of the user's
    try:
        main()
    except ChildFailedError as error:
        said = [text for _, failure in sorted(error.failures.items()) if (text := _sentence(failure))]
        rank, first = error.get_first_failure()
        print(said[0] if said else f"rank {rank} ended with exit status {first.exitcode}", file=sys.stderr)
        raise SystemExit(2 if said else 3) from None


def _sentence(failure: ProcessFailure) -> str:
    """What a rank recorded before it ended, without the exception's name; empty if nothing."""
    data = failure.error_file_data
    message = data.get("message") if isinstance(data, dict) else None
    text = message.get("message", "") if isinstance(message, dict) else ""
    return str(text).partition(": ")[2]


if __name__ == "__main__":
    run()
