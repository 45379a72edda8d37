"""Stream a rollout: the policy writes, tools answer, and each turn arrives as it happens.

turnwire up                                            # prints the addresses
python examples/stream_a_rollout.py 127.0.0.1:PORT     # of the rollout service
"""

import asyncio
import sys

import turnwire
from turnwire.client import rollout_limits, rollout_task
from turnwire.tensors import from_tensor
from turnwire.v1.common_pb2 import StopReason
from turnwire.v1.rollout_pb2 import TurnFinished

QUESTIONS = ["Compute 417*38.", "Compute 655*71+120.", "Compute (901+244)*17."]


async def main(rollout: str) -> None:
    tasks = [
        rollout_task(
            f"question-{number}",
            question,
            ["python"],
            temperature=1.0,
            seed=number,
            limits=rollout_limits(max_turns=3, max_action_tokens=96),
            answer_tags=("<answer>", "</answer>"),
        )
        for number, question in enumerate(QUESTIONS)
    ]
    async with turnwire.connect_async(rollout=rollout) as there:
        async for event in there.rollout.run(tasks):
            if isinstance(event, TurnFinished):
                print(f"{event.trajectory_id} turn {event.turn.index}: {event.action_text!r}")
                if event.observation_text:
                    print(f"{'':10} tools: {event.observation_text!r}")
            else:
                segment = event.segments[0]
                mask = from_tensor(segment.loss_mask)  # 1 where the policy wrote, 0 for the prompt and the tools
                logprobs = from_tensor(segment.logprobs)[mask == 1]
                print(
                    f"{event.trajectory_id} ended: {StopReason.Name(event.stop_reason)}, "
                    f"answer {event.final_answer!r}, "
                    f"{mask.sum()} of {mask.size} tokens are the policy's, mean logprob {logprobs.mean():.3f}"
                )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
