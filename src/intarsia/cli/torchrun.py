"""torchrun with a report of one sentence for failed ranks."""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main


def run() -> None:
    """Run the ranks. Print the error of the first failed rank, or its exit status."""
    logging.disable(logging.CRITICAL)  # only torchrun logs in this process
    try:
        main()
    except ChildFailedError as error:
        messages = [text for _, failure in sorted(error.failures.items()) if (text := _message(failure))]
        rank, first = error.get_first_failure()
        status = f"rank {rank} ended with exit status {first.exitcode}"
        print(messages[0] if messages else status, file=sys.stderr)
        raise SystemExit(2 if messages else 3) from None


def _message(failure: ProcessFailure) -> str:
    """The error that a rank recorded, without the name of the exception; empty if it recorded none."""
    data = failure.error_file_data
    message = data.get("message") if isinstance(data, dict) else None
    text = message.get("message", "") if isinstance(message, dict) else ""
    return str(text).partition(": ")[2]


if __name__ == "__main__":
    run()
