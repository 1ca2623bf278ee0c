"""The command `valve cluster`, and the drain that the chart runs before an uninstall."""
