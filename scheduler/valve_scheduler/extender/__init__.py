"""Answers filter, prioritize and bind of kube-scheduler."""
