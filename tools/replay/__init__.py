"""`valve replay`: experiments over the simulator, their claims, and the pages that show them."""
