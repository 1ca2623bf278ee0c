"""asyncio services: register, gate, wake, report. One loop owns all state."""
