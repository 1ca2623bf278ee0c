"""vLLM: the plugin, what the source patch calls (calls.py), and the scheduler in the hook's terms (engine.py)."""
