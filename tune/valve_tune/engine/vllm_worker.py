"""vLLM's CPU worker with a job beside it: `--worker-cls valve_tune.engine.vllm_worker.TrainingWorker`."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from valve_tune.engine.vllm_beside import TrainsBeside


class TrainingWorker(TrainsBeside, CPUWorker):  # type: ignore[misc]
    """Of the CPU."""
