"""Start a training run on a running trainer service, and watch it.

turnwire up                                                # prints the addresses
python examples/start_and_watch_a_run.py 127.0.0.1:PORT    # of the trainer service
"""

import sys
import time
from pathlib import Path

import turnwire
from turnwire.config import apply_overrides, dump, read_yaml
from turnwire.v1.trainer_pb2 import RunState


def main(trainer: str, *overrides: str) -> None:
    run = read_yaml(Path("configs/demo.yaml"))["run"]
    run = apply_overrides(run, ["training.steps=3", "evaluation.tasks=10", *overrides])
    run_id = time.strftime("example-%Y%m%d-%H%M%S")

    with turnwire.connect(trainer=trainer) as there:
        there.trainer.start_run(run_id, dump(run))
        for event in there.trainer.watch_run(run_id):
            match event.WhichOneof("event"):
                case "step":
                    rewards = {k: round(v, 3) for k, v in event.step.metrics.items() if k.startswith("reward/")}
                    print(f"step {event.step.step}: {rewards}")
                case "evaluation":
                    print(f"after step {event.evaluation.step}: accuracy {dict(event.evaluation.accuracy)}")
                case "notice":
                    print(event.notice.text)
        ended = there.trainer.get_run(run_id)
        print(RunState.Name(ended.state), ended.folder, ended.error)


if __name__ == "__main__":
    main(*sys.argv[1:])
