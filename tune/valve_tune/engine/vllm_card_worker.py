"""vLLM's worker of a card with a job beside it: `--worker-cls valve_tune.engine.vllm_card_worker.TrainingCardWorker`.

No card has run it: it is refused unless the job is said to be `untried`.
"""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from valve_tune.engine.vllm_beside import TrainsBeside


class TrainingCardWorker(TrainsBeside, Worker):  # type: ignore[misc]
    """Of a CUDA card."""
