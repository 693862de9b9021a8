"""One rank of a multi-process test: RANK OUT REQUEST."""

import json
import sys
from dataclasses import replace
from pathlib import Path

from trainer_helpers import CONFIG

from miles_core.training.worker import TrainerWorker


def main() -> None:
    rank, out, request = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    config = replace(CONFIG, **request["changes"])
    worker = TrainerWorker(config, rank, request["world"], "127.0.0.1", request["port"])
    answers = [getattr(worker, method)(*args) for method, *args in request["calls"]]
    worker.close()
    if rank == 0:
        out.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
