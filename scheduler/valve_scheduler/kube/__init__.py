"""The only folder that talks to the Kubernetes API: raw JSON over asyncio, no model classes.

Decoding a list into the official client's models costs several times its JSON; the arrays of `state.py` need
neither."""
