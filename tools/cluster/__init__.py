"""A real Kubernetes control plane on loopback with a fleet of made-up nodes: for tests and benchmarks."""
