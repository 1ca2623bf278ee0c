"""What the daemon and the scheduler share of Kubernetes: API client, names, objects as values, injection.

Raw JSON over asyncio, no model classes: decoding a list into the official client's models costs several times its JSON,
and the arrays of `valve_scheduler.placement.state` need neither."""
