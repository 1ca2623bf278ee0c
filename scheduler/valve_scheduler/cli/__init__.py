"""Serves people: `valve cluster` and what the chart runs before an uninstall."""
