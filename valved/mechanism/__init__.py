"""Effects, behind ports: the native gate, regions, processes, files."""
