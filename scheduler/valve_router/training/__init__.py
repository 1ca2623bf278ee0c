"""Fleet jobs: micro-batches that are queued beside requests and sent to the trainers of the nodes."""
