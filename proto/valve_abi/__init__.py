"""Gives Python the numbers and layouts of proto/abi/{region,link,kv}.h; `headers.py` is generated at build time.

Names lose the prefix `VALVE_`: `VALVE_LINK_MAGIC` is `LINK_MAGIC`, `enum valve_note` is `Note`, `struct valve_kv_book`
is `KV_BOOK`. The layout of a message (`LINK_HELLO`) begins behind its header. Standard library only: the engine hook
runs in environments that hold nothing else of ours.
"""

from valve_abi.headers import *  # noqa: F403
from valve_abi.layout import Field as Field
from valve_abi.layout import Layout as Layout
