"""SGLang: a plugin on its hook registry (plugin.py), and its scheduler in the hook's terms (engine.py)."""
