"""The demo: an online service and an offline job share one emulated GPU."""
